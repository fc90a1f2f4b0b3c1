"""Counts and energy of magnitudes in logarithmic bins: every selection's threshold and gain in one sweep."""

import numpy as np
from mpicomp.kernels.cpu.bits import infinity_of
from mpicomp.kernels.cpu.compile import Floats, kernel, spread
from mpicomp.kernels.cpu.moments import strided
from numpy.typing import NDArray

BINS = 2048  # bins of a spectrum: eight for every power of two that a float32 reaches, from zero to infinity and NaN

_FINE = 15  # bits of a float32 left out of a fine bin: 256 of them for every power of two
_COARSE = 20  # bits of a float32 left out of a bin of the result: eight of them for every power of two
GROUP = 256
"""Elements in a row that a strided sweep looks at: as few as are still swept fast, since rows of a matrix differ."""

_MIN_FINE_BINNED = 1 << 18  # elements; fewer are binned one by one, in less time than fine bins are gathered


def edges() -> NDArray[np.float64]:
    """Return the lower edges of the bins, ascending; those of bins that hold infinity and NaN are infinity."""
    bits = np.arange(BINS, dtype=np.uint32) << _COARSE
    bits[bits > infinity_of(np.dtype(np.float32))] = infinity_of(np.dtype(np.float32))  # NaN
    return bits.view(np.float32).astype(np.float64)


def spectrum(
    array: Floats, counts: NDArray[np.int64], energies: NDArray[np.float64], stride: int = 1, threads: int = 1
) -> None:
    """Count magnitudes in `BINS` bins, an eighth of a power of two wide, and sum their squares.

    float64 magnitudes are binned as float32. ``counts`` and ``energies`` are overwritten. The energy of a bin comes
    from the centers of finer bins: for many elements it is good to 0.4 % at worst, where they are all equal, and to
    about 1e-6 for a smooth distribution. With a stride s every s-th group of `GROUP` elements is swept; nothing is
    scaled up.
    """
    counts[:] = 0
    energies[:] = 0
    if array.size < _MIN_FINE_BINNED * stride:
        _spectrum_small(array, stride, counts, energies)
        return

    def sweep(part: slice) -> NDArray[np.uint32]:
        fine = np.zeros(1 << (31 - _FINE), np.uint32)
        _spectrum_fine(array[part], stride, fine)
        return fine

    for fine in spread(sweep, strided(array.size, stride, threads, GROUP)):
        _gather_fine(fine, counts, energies)


@kernel
def _magnitude(value):  # type: ignore[no-untyped-def]
    return np.float32(value).view(np.uint32) & np.uint32(0x7FFFFFFF)


@kernel
def _spectrum_small(array, stride, counts, energies):  # type: ignore[no-untyped-def]
    for start in range(0, array.size, GROUP * stride):
        block = array[start : start + GROUP]
        for i in range(block.size):
            place = _magnitude(block[i]) >> np.uint32(_COARSE)
            value = np.float64(block[i])
            counts[place] += 1
            energies[place] += value * value


@kernel
def _spectrum_fine(array, stride, fine):  # type: ignore[no-untyped-def]
    for start in range(0, array.size, GROUP * stride):
        block = array[start : start + GROUP]
        for i in range(block.size):
            fine[_magnitude(block[i]) >> np.uint32(_FINE)] += np.uint32(1)


@kernel
def _gather_fine(fine, counts, energies):  # type: ignore[no-untyped-def]
    for place in range(fine.size):
        if fine[place] > 0:
            bits = np.uint32((np.uint32(place) << np.uint32(_FINE)) | np.uint32(1 << (_FINE - 1)))
            low = np.float64(np.uint32(np.uint32(place) << np.uint32(_FINE)).view(np.float32))
            middle = np.float64(bits.view(np.float32))
            half = middle - low
            coarse = place >> (_COARSE - _FINE)
            counts[coarse] += fine[place]
            # The mean square over a bin that is evenly filled.
            energies[coarse] += fine[place] * (middle * middle + half * half / 3) if place > 0 else 0.0
