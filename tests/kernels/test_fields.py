from collections import Counter

import numpy as np
import pytest
from mpicomp.kernels import cpu

SIZES = [0, 1, 2, 31, 255, 256, 257, 2600, 5003]
LIMITS = [1, 7, 127, 32767]


def place_of(element, numel, width):
    """The word and the lowest bit of an element's field, from the words of the definition."""
    fields = 64 // width
    words = -(-numel // fields)
    block, inside = divmod(element, 256 * fields)
    span = min(256, words - 256 * block)
    return 256 * block + inside % span, inside // span * width


def read(words, numel, largest):
    """Every element's field, with Python's integers."""
    width = max(1, largest.bit_length())
    places = [place_of(element, numel, width) for element in range(numel)]
    return [int(words[word]) >> shift & (1 << width) - 1 for word, shift in places]


def pack(kernels, array, step, limit, ranks, key=None, levels=None, scales=(1,)):
    """Pack onto grids whose steps are ``step`` over each of ``scales``."""
    dtype = array.dtype.type
    largest = 2 * limit * ranks
    steps = np.array([step / scale for scale in scales], dtype)
    inverses = np.array([scale / step for scale in scales], dtype)
    words = np.full(cpu.words_of(array.size, largest), 0xDEADBEEFDEADBEEF, np.uint64)  # rubbish
    sent = np.full(array.size, np.nan, dtype)
    lost = kernels.pack_fields(array, inverses, steps, limit, largest, key, words, sent, levels)
    return words, sent, lost, largest


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_fields_hold_the_nearest_integers(kernels, dtype, limit, ranks):
    for size in SIZES:
        step = 0.25
        array = (step * limit * np.random.default_rng(size).uniform(-1, 1, size)).astype(dtype)
        words, sent, lost, largest = pack(kernels, array, step, limit, ranks)
        nearest = np.round(np.float64(array) / step)  # ties to even
        np.testing.assert_array_equal(read(words, size, largest), nearest + limit)
        np.testing.assert_array_equal(sent, nearest * step)
        np.testing.assert_allclose(lost, np.square(np.float64(array) - sent).sum(), rtol=1e-5)
        used = {place_of(element, size, largest.bit_length()) for element in range(size)}
        assert len(used) == size
        assert sum(int(word).bit_count() for word in words) == sum(int(n + limit).bit_count() for n in nearest)


@pytest.mark.parametrize(("limit", "ranks"), [(7, 1), (7, 4), (127, 5), (1, 64)])
def test_sums_of_words_are_sums_of_integers(kernels, dtype, limit, ranks):
    for size in SIZES:
        rng = np.random.default_rng(size)
        arrays = [rng.uniform(-limit, limit, size).astype(dtype) for _ in range(ranks)]
        total, expected = 0, np.zeros(size)
        for rank, array in enumerate(arrays):
            words, sent, _, largest = pack(kernels, array, 1.0, limit, ranks, key=rank)
            total = total + words
            expected += sent
        factors = np.array([0.5], dtype)
        out = np.full(size, np.nan, dtype)
        kernels.unpack_fields(total, factors, limit * ranks, largest, out)
        np.testing.assert_array_equal(out, expected / 2)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64, 1000, 1024, 4095, 4096])
@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_no_sum_overflows_at_any_number_of_ranks(kernels, ranks, bits):
    """All ranks at one end, and all at the other, in turns: the fullest fields there are, next to empty ones."""
    limit = 2 ** (bits - 1) - 1
    size = 3000
    array = np.where(np.arange(size) % 3 == 0, -limit, limit).astype(np.float32)
    words, _, _, largest = pack(kernels, array, 1.0, limit, ranks)
    total = words * np.uint64(ranks)  # what as many equal ranks sum to
    np.testing.assert_array_equal(read(total, size, largest), np.where(array < 0, 0, largest))
    out = np.empty(size)
    kernels.unpack_fields(total, np.ones(1), limit * ranks, largest, out)
    np.testing.assert_array_equal(out, np.float64(array) * ranks)
    assert cpu.words_of(size, largest) == -(-size // (64 // int(np.ceil(np.log2(largest + 1)))))


@pytest.mark.parametrize(("limit", "ranks"), [(1, 1), (7, 4), (32767, 64)])
@pytest.mark.parametrize("leveled", [False, True])
def test_random_fields_on_a_gpu_are_those_of_the_host(gpu_kernels, dtype, limit, ranks, leveled):
    """Of numbers of all kinds, on several grids; the fixture compares bits."""
    for size in (0, 1, 257, 2600, 30_011):
        rng = np.random.default_rng(size)
        array = (2 * rng.uniform(-1.2, 1.2, size)).astype(dtype)
        array[:140:2] = np.resize([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0, -0.0], array[:140:2].size)
        levels = rng.integers(0, 3, size).astype(np.uint8) if leveled else None
        scales = (limit / 2, 2 * limit, 8 * limit)
        for values in (array, np.where(np.abs(array) < 10, array, 0)):
            words, _, _, largest = pack(gpu_kernels, values, 1.0, limit, ranks, 2**40 + 3, levels, scales)
        factors = np.array([1 / scale for scale in scales], dtype)
        gpu_kernels.unpack_fields(words, factors, limit, largest, np.empty(size, dtype), levels)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("limit", [1, 7, 32767])
def test_rounding_at_random_is_right_on_the_average(dtype, limit):
    size, draws, step = 1200, 2000, 0.37
    array = (step * limit * np.random.default_rng(0).uniform(-1, 1, size)).astype(dtype)
    array[::7] = step * dtype(1e-4)
    total, square = np.zeros(size), np.zeros(size)
    for key in range(draws):
        _, sent, lost, _ = pack(cpu, array, step, limit, 4, key=key * 0x9E3779B97F4A7C15 % 2**64)
        exact = np.square(np.float64(array) - sent)
        np.testing.assert_allclose(lost, exact.sum(), rtol=1e-3)
        assert np.abs(np.float64(array) - sent).max() <= step * (1 + 1e-5)
        total += sent
        square += exact
    for block in np.arange(size).reshape(-1, 100):
        error = (total / draws - array)[block].sum()
        deviation = np.sqrt(square[block].sum() / draws / draws)
        assert abs(error) <= 4 * deviation + 100 * 3e-7 * step * limit
    assert square.sum() / draws <= size * step**2 / 4 * 1.02


def test_draws_are_spread_and_follow_the_key():
    array, sizes = np.full(60_000, 0.5, np.float32), []
    keys = [int(key) for key in np.random.SeedSequence(0).generate_state(4, np.uint64)]
    drawn = [pack(cpu, array, 1.0, 1, 1, key=key)[1] for key in (keys[0], *keys)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    for first in range(1, 5):
        share = drawn[first].mean()
        assert abs(share - 0.5) < 4 * 0.5 / np.sqrt(60_000)
        for second in range(first + 1, 5):
            agree = (drawn[first] == drawn[second]).mean()
            assert abs(agree - 0.5) < 4 * 0.5 / np.sqrt(60_000)
        neighbours = Counter(zip(drawn[first][:-1].tolist(), drawn[first][1:].tolist(), strict=True))
        sizes.append(max(abs(count - 15_000) for count in neighbours.values()))
    assert max(sizes) < 5 * np.sqrt(60_000 * 0.25 * 0.75)


@pytest.mark.parametrize("key", [None, 3])
def test_fields_beyond_the_ends_saturate(kernels, dtype, key):
    array = np.array([1e30, -1e30, np.inf, -np.inf, np.nan, 7.4, -7.4, 0.0, -0.0], dtype)
    words, sent, lost, largest = pack(kernels, array, 1.0, 7, 2, key=key)
    np.testing.assert_array_equal(sent, [7, -7, 7, -7, -7, 7, -7, 0, 0])
    np.testing.assert_array_equal(read(words, array.size, largest), [14, 0, 14, 0, 0, 14, 0, 7, 7])
    assert not np.isfinite(lost)
    assert pack(kernels, array[5:7], 1.0, 7, 2, key=key)[2] == pytest.approx(0.32, rel=1e-5)


@pytest.mark.parametrize("size", [1, 300, 4000])
def test_finer_grids_are_for_elements_all_ranks_accept(kernels, dtype, size):
    limit, ranks, scales = 3, 3, (1, 4, 16)
    rng = np.random.default_rng(size)
    arrays = [(limit * rng.uniform(-1, 1, size) ** 5).astype(dtype) for _ in range(ranks)]
    levels = np.zeros(size, np.uint8)
    for level, scale in enumerate(scales[1:], 1):
        total = 0
        for array in arrays:
            words = np.full(cpu.words_of(size, ranks), 0xDEADBEEFDEADBEEF, np.uint64)
            kernels.pack_out_of_range(array, dtype(scale), limit, ranks, words)
            objections = [int(abs(float(value) * scale) > limit) for value in array]
            assert read(words, size, ranks) == objections
            total = total + words
        kernels.resolve_levels(total, ranks, level, levels)
    largest_of = np.abs(arrays).max(axis=0)
    expected = [max(level for level, scale in enumerate(scales) if value * scale <= limit) for value in largest_of]
    np.testing.assert_array_equal(levels, expected)

    total, sum_sent = 0, np.zeros(size)
    for rank, array in enumerate(arrays):
        words, sent, lost, largest = pack(kernels, array, 1.0, limit, ranks, rank, levels, scales)
        steps = 1 / np.array(scales)[levels]
        assert (np.abs(array - sent) <= steps * (1 + 1e-6)).all()
        np.testing.assert_allclose(lost, np.square(np.float64(array) - sent).sum(), rtol=1e-4)
        total, sum_sent = total + words, sum_sent + sent
    out = np.empty(size, dtype)
    kernels.unpack_fields(total, np.array([1 / scale for scale in scales], dtype), limit * ranks, largest, out, levels)
    np.testing.assert_allclose(out, sum_sent, rtol=0, atol=1e-6)
    np.testing.assert_allclose(out / steps, np.round(out / steps), atol=1e-6)


def test_a_nonfinite_element_does_not_fit(kernels):
    words = np.empty(1, np.uint64)
    kernels.pack_out_of_range(np.array([np.nan, np.inf, 1], np.float32), np.float32(1), 7, 1, words)
    assert read(words, 3, 1) == [1, 1, 0]
