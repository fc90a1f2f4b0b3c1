"""Concatenation of pieces."""

import warnings

import numpy as np
import pytest
from device import emulator
from device.kinds import with_specials, word_of
from mpicomp.kernels import cpu, gpu

KINDS = ["as out", np.float16, np.uint16]
LENGTHS = [[], [0], [1], [31], [33, 1000], [0, 1, 0, 0, 2, 0], [20_011], [9000, 3, 4100, 0], [1024, 2048, 4096, 512]]


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


def slowly(pieces, dtype, scale):
    whole = np.concatenate([np.empty(0, dtype), *(widened(piece, dtype) for piece in pieces)])
    with np.errstate(all="ignore"):
        return whole if scale == 1 else dtype(scale) * whole


@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0), (1 / 3, 1)])
def test_pieces_of_all_kinds(kernels, dtype, kind, lengths, scale, shift):
    rng, kernels.shift = np.random.default_rng(sum(lengths)), shift
    kinds = [KINDS[n % 3] if kind == "mixed" else kind for n in range(len(lengths))]
    pieces = [drawn(rng, length, each, dtype) for length, each in zip(lengths, kinds, strict=True)]
    out, expected = np.empty(sum(lengths), dtype), slowly(pieces, dtype, scale)
    emulator.launches.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.concatenate(pieces, out, scale)
    assert emulator.launches == ["concatenate"] * kernels.emulated
    expected = expected if scale == 1 else kernels.seen(expected)
    np.testing.assert_array_equal(out, expected)
    numbers = np.full(out.size, True) if scale == 1 and kind == "as out" else ~np.isnan(expected)
    np.testing.assert_array_equal(out.view(word_of(dtype))[numbers], expected.view(word_of(dtype))[numbers])


def test_a_table_serves_while_pieces_stay_in_place(place):
    arrays = [np.arange(5, dtype=np.float32), np.arange(3, dtype=np.float16)]
    pieces, out = [place.put(array) for array in arrays], place.empty(8, np.float32)
    table = gpu.concatenate(pieces, out)
    assert table.fits(pieces)
    with place.quiet():
        assert gpu.concatenate(pieces, out, 2.0, table) is table
    np.testing.assert_array_equal(out.get(), 2 * np.concatenate(arrays))
    moved = [pieces[0], place.put(arrays[1])]
    for others in (moved, pieces[:1], [pieces[0], pieces[1].view(np.uint16)], [pieces[0][:4], pieces[1]]):
        assert not table.fits(others)
    other = gpu.concatenate(moved, out, 1.0, table)
    assert other is not table
    assert other.fits(moved)
    np.testing.assert_array_equal(out.get(), np.concatenate(arrays))
    on_host = cpu.concatenate(arrays, np.empty(8, np.float32))
    assert on_host.fits(arrays)
    assert cpu.concatenate(arrays, np.empty(8, np.float32), 1.0, on_host) is on_host


def test_pieces_that_do_not_fit_are_refused(kernels):
    with pytest.raises(ValueError, match="pieces of 3 elements do not fill 4"):
        kernels.concatenate([np.zeros(3, np.float32)], np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="of float32, float16 or uint16, got float64"):
        kernels.concatenate([np.zeros(4, np.float64)], np.zeros(4, np.float32))
