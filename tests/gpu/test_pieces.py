"""Pieces one behind the other: in an emulation on the host, and on a GPU where there is one."""

import warnings

import numpy as np
import pytest
from gpu import standin
from gpu.alike import with_specials
from marks import slow
from mpicomp.kernels import cpu, gpu

DTYPES = [np.float32, slow(np.float64)]
KINDS = ["as out", np.float16, np.uint16]
LENGTHS = [[], [0], [1], [31], [33, 1000], [0, 1, 0, 0, 2, 0], [20_011], [9000, 3, 4100, 0], [1024, 2048, 4096, 512]]


def word(dtype):
    return np.uint32 if dtype == np.float32 else np.uint64


def drawn(rng, length, kind, dtype):
    if kind is np.uint16:
        return rng.integers(0, 2**16, length).astype(np.uint16)  # all kinds of bfloat16
    array = rng.normal(size=length).astype(dtype if kind == "as out" else kind)
    return with_specials(array) if kind == "as out" and length else array


def widened(piece, dtype):
    if piece.dtype == np.uint16:
        piece = (piece.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # NaN that signals
        return piece.astype(dtype)


def written(pieces, dtype, scale):
    """What has to come out, from NumPy's own concatenation."""
    whole = np.concatenate([np.empty(0, dtype), *(widened(piece, dtype) for piece in pieces)])
    with np.errstate(all="ignore"):
        return whole if scale == 1 else dtype(scale) * whole


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0), (1 / 3, 0), (1 / 3, 1)])
def test_pieces_of_all_kinds(place, dtype, kind, lengths, scale, shift):
    rng = np.random.default_rng(sum(lengths))
    kinds = [KINDS[n % 3] if kind == "mixed" else kind for n in range(len(lengths))]
    pieces = [drawn(rng, length, own, dtype) for length, own in zip(lengths, kinds, strict=True)]
    out, own = place.empty(sum(lengths), dtype, shift), np.empty(sum(lengths), dtype)
    there = [place.put(piece, shift * n) for n, piece in enumerate(pieces)]
    standin.launches.clear()
    with place.quiet():
        gpu.concatenate(there, out, scale)
    assert standin.launches in ([["concatenate"]] if place.emulated else [[]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpu.concatenate(pieces, own, scale)
    expected, told = written(pieces, dtype, scale), out.get()
    np.testing.assert_array_equal(own, expected)
    if scale != 1:
        own = expected = place.seen(expected)
    np.testing.assert_array_equal(told, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(told.view(word(dtype))[numbers], own.view(word(dtype))[numbers])
    if scale == 1 and kind == "as out":
        np.testing.assert_array_equal(told.view(word(dtype)), expected.view(word(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", [np.float16, np.uint16])
def test_every_16_bit_number_widens(place, dtype, wire):
    halves = np.arange(1 << 16, dtype=np.uint16).view(wire)
    out = place.empty(halves.size + 1, dtype)
    gpu.concatenate([place.put(halves[:70]), place.put(np.ones(1, dtype)), place.put(halves[70:])], out)
    told = out.get()
    assert told[70] == 1
    np.testing.assert_array_equal(np.delete(told, 70), widened(halves, dtype))


def test_a_factor_on_the_device(place):
    array, out = np.random.default_rng(0).normal(size=50).astype(np.float32), place.empty(50, np.float32)
    there, scale = place.put(array), place.scalar(0.1, np.float64)
    with place.quiet():
        gpu.concatenate([there], out, scale)
    np.testing.assert_array_equal(out.get(), np.float32(0.1) * array)


def test_a_table_serves_as_long_as_pieces_stay_where_they_are(place):
    arrays = [np.arange(5, dtype=np.float32), np.arange(3, dtype=np.float16)]
    pieces, out = [place.put(array) for array in arrays], place.empty(8, np.float32)
    table = gpu.concatenate(pieces, out)
    assert table.fits(pieces)
    with place.quiet():
        assert gpu.concatenate(pieces, out, 2.0, table) is table
    np.testing.assert_array_equal(out.get(), 2 * np.concatenate(arrays))
    moved = [pieces[0], place.put(arrays[1])]
    assert not table.fits(moved)
    assert not table.fits(pieces[:1])
    assert not table.fits([pieces[0], pieces[1].view(np.uint16)])
    assert not table.fits([pieces[0][:4], pieces[1]])
    other = gpu.concatenate(moved, out, 1.0, table)
    assert other is not table
    assert other.fits(moved)
    np.testing.assert_array_equal(out.get(), np.concatenate(arrays))
    own = cpu.concatenate(arrays, np.empty(8, np.float32))
    assert own.fits(arrays)
    assert cpu.concatenate(arrays, np.empty(8, np.float32), 1.0, own) is own


@pytest.mark.parametrize("kernels", [cpu, gpu])
def test_what_cannot_be_put_together_is_refused(place, kernels):
    def array(size, dtype):
        return np.zeros(size, dtype) if kernels is cpu else place.zeros(size, dtype)

    with pytest.raises(ValueError, match="pieces of 3 elements do not fill 4"):
        kernels.concatenate([array(3, np.float32)], array(4, np.float32))
    with pytest.raises(ValueError, match="of float32, float16 or uint16, got float64"):
        kernels.concatenate([array(4, np.float64)], array(4, np.float32))
