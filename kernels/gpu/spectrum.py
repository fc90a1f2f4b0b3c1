"""Counts and energy of magnitudes in logarithmic bins: every selection's threshold and gain in one sweep."""

from typing import Any

import numpy as np
from mpicomp.kernels.cpu import BINS
from mpicomp.kernels.gpu.compile import THREADS, launch, library

_GROUP = 1024
_GROUPS = 64  # of a block


def spectrum(array: Any, counts: Any, energies: Any, stride: int = 1, threads: int = 1) -> None:
    """Count magnitudes in `BINS` bins and sum their squares; see `mpicomp.kernels.cpu.spectrum`.

    Parameters
    ----------
    array : device array, shape (n,)
        float32 or float64, contiguous; float64 magnitudes are binned, and squared, as float32.
    counts, energies : device arrays of int64 and float64, shape (BINS,)
        Overwritten. Energies are good to 3e-5 and have the same bits at every call.
    stride : int
        1 looks at all elements, s at every s-th group of 1024 of them. Nothing is scaled up.
    threads : int
        Of no meaning here.
    """
    memory = library().zeros(2 * BINS, np.uint64)
    sums = memory[:BINS], memory[BINS:]
    blocks = -(-array.size // (_GROUP * _GROUPS * stride))
    launch("spectrum", "spectrum", array.dtype, blocks, array, array.size, stride, *sums)
    launch("spectrum", "finish_spectrum", array.dtype, BINS // THREADS, *sums, counts, energies)
