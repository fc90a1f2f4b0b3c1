"""Kernels of a device give the bits of `mpicomp.kernels.cpu`: in an emulation on the host, and on a GPU.

Codes of sums, of chunks, fields, votes, exponents and sketches, a test each; `run_twins` compares every array.
"""

import numpy as np
import pytest
from gpu import standin
from gpu.alike import assert_alike, run_twins, with_specials
from marks import slow
from mpicomp.kernels import cpu, gpu
from mpicomp.kernels.gpu.products import PART, ROWS

BAD = [np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0, -0.0]
LAYERS = [(1, 3), (3, 1), (8, 16)]
PLACES = [1, 2, 7, 511, 700]
FIELDS = [0, 1, 257, 2600, 30_011]
EXPONENTS = [0, 1, 31, 32, 33, 63, 64, 65, 255, 257, 1000, 1025, 5000]
SKETCHES = [0, 1, 7, 8, 257, 2047, 2048, 2049, 5000]
KEY = 0x0123456789ABCDEF
UNWRITTEN = 0xDEADBEEFDEADBEEF


@pytest.fixture(params=[np.float32, slow(np.float64)])
def dtype(request):
    return request.param


def drawn(shape, dtype, seed):
    """Numbers whose sums depend on the order in which they are added up."""
    random = np.random.default_rng(seed)
    return (random.standard_normal(shape) * 10.0 ** random.integers(-3, 4, shape)).astype(dtype)


def with_bad(array):
    if array.size > 100:
        array[:70] = np.array(BAD * 10).astype(array.dtype)
    return array


def words(count):
    return np.full(count, UNWRITTEN, np.uint64)


@pytest.mark.parametrize(("size", "chunk", "k"), [(1, 1, 1), (300, 64, 5), (1000, 1000, 1000), (3000, 700, 20)])
@pytest.mark.parametrize("ties", [False, True])
def test_select_in_chunks(place, dtype, size, chunk, k, ties):
    array = np.random.default_rng(size).standard_normal(size).astype(dtype)
    array = with_specials(np.round(array) if ties else array)
    rest = max(1, size % chunk // 3)
    count = size // chunk * k + (rest if size % chunk else 0)
    standin.launches.clear()
    run_twins(place, "select_in_chunks", array, chunk, k, rest, np.empty(count, np.uint32), np.empty(count, dtype))
    assert not place.emulated or len(standin.launches) == 1


@pytest.mark.parametrize("shape", [(1, 2), (4, 16), (7, 8)])
@pytest.mark.parametrize("size", [1, 7, 16, 17, 100, 5000])
def test_blocks(place, dtype, shape, size):
    values, matrix = drawn(size, dtype, 0), drawn(shape, np.float32, 1)
    code = np.empty(-(-size // shape[1]) * shape[0], dtype)
    run_twins(place, "encode_blocks", values, matrix, code)
    run_twins(place, "decode_blocks", code, matrix, np.empty(size, dtype))


@pytest.mark.parametrize(("inputs", "outputs"), LAYERS)
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["conv_halve", "conv_double"])
def test_convolutions(place, dtype, inputs, outputs, places, gated, name):
    halves = name == "conv_halve"
    values = drawn((inputs, 2 * places if halves else places), dtype, 0)
    weights = drawn((outputs, inputs, 3) if halves else (inputs, outputs, 3), np.float32, 1)
    bias, out = drawn(outputs, np.float32, 2), np.empty((outputs, places if halves else 2 * places), dtype)
    gate = drawn(out.shape, dtype, 3) if gated else out
    there = [place.put(array).reshape(array.shape) for array in (values, weights, bias, gate)]
    far = there[3] if not gated else place.empty(out.size, dtype).reshape(out.shape)
    with place.quiet():
        scratch = place.empty(gpu.conv_room(inputs), dtype)
        getattr(gpu, name)(*there[:3], 0.1, there[3], scratch, far)
    getattr(cpu, name)(values, weights, bias, 0.1, gate, np.empty(cpu.conv_room(inputs), dtype), out)
    assert_alike(far.reshape(out.size), out)


@pytest.mark.parametrize(("inputs", "outputs"), LAYERS)
@pytest.mark.parametrize("places", PLACES)
def test_sums_of_channels(place, dtype, inputs, outputs, places):
    values, weights = drawn((inputs, places), dtype, 0), drawn((outputs, inputs), np.float32, 1)
    run_twins(place, "conv_mix", values, weights, drawn(outputs, np.float32, 2), np.empty((outputs, places), dtype))


@pytest.mark.parametrize("size", FIELDS)
@pytest.mark.parametrize(("limit", "ranks"), [(1, 1), (7, 4), (32767, 64)])
@pytest.mark.parametrize("key", [None, 2**40 + 3])
@pytest.mark.parametrize("leveled", [False, True])
def test_fields(place, dtype, size, limit, ranks, key, leveled):
    rng = np.random.default_rng(size)
    array = with_bad((2 * rng.uniform(-1.2, 1.2, size)).astype(dtype))
    largest, grids = 2 * limit * ranks, np.array([1, 4, 16])
    steps, inverses = (2 / limit / grids).astype(dtype), (limit * grids / 2).astype(dtype)
    levels = rng.integers(0, 3, size).astype(np.uint8) if leveled else None
    packed, sent = words(cpu.words_of(size, largest)), np.empty(size, dtype)
    finite = np.where(np.abs(array) < 10, array, 0)
    for values in (finite, array):
        settings = limit, largest, key, packed, sent, levels
        # The sign of a zero that was rounded at random is none of the code's.
        lost, far = run_twins(place, "pack_fields", values, inverses, steps, *settings, signed_zeros=False)
        np.testing.assert_allclose(far.item(), lost, rtol=1e-4)
    run_twins(place, "unpack_fields", packed, steps, limit, largest, np.empty(size, dtype), levels)


@pytest.mark.parametrize("size", FIELDS)
@pytest.mark.parametrize("ranks", [1, 5])
def test_levels(place, dtype, size, ranks):
    array = with_bad(np.random.default_rng(size).normal(size=size).astype(dtype))
    packed = words(cpu.words_of(size, ranks))
    run_twins(place, "pack_objections", array, dtype(7.5), 7, ranks, packed)
    run_twins(place, "settle_levels", packed, ranks, 3, np.zeros(size, np.uint8))


@pytest.mark.parametrize("size", FIELDS)
@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_votes(place, dtype, size, ranks):
    arrays = np.random.default_rng(size).normal(size=(ranks, size)).astype(dtype)
    arrays[:, ::5] = 0
    votes, won = np.zeros((ranks, -(-size // 64)), np.uint64), words(-(-size // 64))
    for array, row in zip(arrays, votes, strict=True):
        run_twins(place, "pack_votes", array, row)
    run_twins(place, "majority", votes, won)
    run_twins(place, "unpack_votes", won, 0.1, np.empty(size, dtype))


def magnitudes(size, dtype):
    rng = np.random.default_rng(size)
    array = rng.laplace(size=size) * 10.0 ** rng.integers(-36, 36, size)
    array[::9] = 2.0 ** rng.integers(-20, 20, array[::9].size)
    array[1::9] = -0.0
    return array.astype(dtype)


def packed_exponents(place, array, key):
    """Pack on both sides; return the code and the elements as sent."""
    code = words(-(-array.size // 64)), np.full(array.size, 99, np.uint8)
    sent = np.empty_like(array)
    lost, far = run_twins(place, "pack_exponents", array, *code, sent, key)
    np.testing.assert_allclose(far.item(), lost, rtol=1e-9)
    return code, sent


@pytest.mark.parametrize("size", EXPONENTS)
@pytest.mark.parametrize("key", [0, KEY])
@pytest.mark.parametrize("special", [False, True])
def test_exponents(place, dtype, size, key, special):
    array = magnitudes(size, dtype)
    code, sent = packed_exponents(place, with_specials(array) if special and size > 200 else array, key)
    out = np.empty_like(sent)
    run_twins(place, "unpack_exponents", *code, out)
    np.testing.assert_array_equal(out, sent)
    total = np.random.default_rng(size).normal(size=size).astype(dtype)
    run_twins(place, "unpack_exponents_add", *code, 0.3, total)


@pytest.mark.parametrize("size", [1e-45, 1e-40, 2.0**-126, 3.3e38, 1e300])
def test_exponents_at_the_ends_of_the_range(place, dtype, size):
    with np.errstate(over="ignore"):
        array = np.full(300, size).astype(dtype)
    array[::3] *= -1
    packed_exponents(place, place.seen(array), 4)


@pytest.mark.parametrize("rows", [slow(1), 3, slow(7)])
@pytest.mark.parametrize("columns", [1, 37, PART - 1, PART, PART + 1, 5000])
def test_sketches(place, dtype, rows, columns):
    """Added to the table, in the order of the elements."""
    for size in SKETCHES:
        rng = np.random.default_rng(size)
        array = (rng.standard_t(3, size) * 10.0 ** rng.integers(-5, 5, size)).astype(dtype)
        run_twins(place, "sketch_add", array, KEY + rows, rng.normal(size=(rows, columns)).astype(dtype))


def test_sketches_of_special_numbers(place, dtype):
    array, table = with_specials(np.random.default_rng(0).normal(size=3000).astype(dtype)), np.zeros((3, 100), dtype)
    run_twins(place, "sketch_add", array, 1, table)
    assert 1 < np.isnan(table).sum() < 100


@pytest.mark.parametrize("rows", [1, 3, 5, 7, ROWS])
@pytest.mark.parametrize("columns", [1, 37, 3000])
def test_estimates(place, dtype, rows, columns):
    for size in SKETCHES:
        table = np.random.default_rng(size).normal(size=(rows, columns)).astype(dtype)
        if columns > 1:
            table[:, ::3] = np.round(table[:, ::3])  # equal numbers, and zeros of both signs
        if columns > 100:
            table = place.seen(with_specials(table.reshape(-1)).reshape(rows, columns))
        run_twins(place, "sketch_estimate", table, KEY, np.empty(size, dtype))


def test_sketches_with_too_many_rows(place):
    table = place.zeros((ROWS + 2) * 4, np.float32).reshape(ROWS + 2, 4)
    with pytest.raises(ValueError, match="at most 15 rows, got 17: take fewer rows"):
        gpu.sketch_estimate(table, 1, place.empty(3, np.float32))


@pytest.mark.parametrize("count", [0, 1, 300])
def test_cleared_cells(place, dtype, count):
    rng = np.random.default_rng(count)
    table = rng.normal(size=(3, 1000)).astype(dtype)
    indices = np.sort(rng.choice(100_000, count, replace=False)).astype(np.uint32)
    run_twins(place, "sketch_clear", indices, KEY, table)
    assert (count == 0) == table.all()
