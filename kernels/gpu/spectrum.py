"""Counts and energy of magnitudes in logarithmic bins: every selection's threshold and gain in one sweep."""

from typing import Any

import numpy as np
from mpicomp.kernels.cpu import BINS, GROUP
from mpicomp.kernels.gpu.compile import THREADS, launch, library

_PER_BLOCK = 64 * 1024  # elements that are looked at


def spectrum(array: Any, counts: Any, energies: Any, stride: int = 1, threads: int = 1) -> None:
    """Count magnitudes in `BINS` bins and sum their squares; see `mpicomp.kernels.cpu.spectrum`.

    Parameters
    ----------
    array : device array, shape (n,)
        float32 or float64, contiguous; float64 magnitudes are binned, and squared, as float32.
    counts, energies : device arrays of int64 and float64, shape (BINS,)
        Overwritten. Energies are good to 3e-5 and have the same bits at every call.
    stride : int
        1 looks at all elements, s at every s-th group of `GROUP` of them. Nothing is scaled up.
    threads : int
        Of no meaning here.
    """
    memory = library().zeros(2 * BINS, np.uint64)
    sums = memory[:BINS], memory[BINS:]
    seen = -(-array.size // (GROUP * stride)) * GROUP
    blocks = -(-seen // _PER_BLOCK)
    launch("spectrum", "spectrum", array.dtype, blocks, array, array.size, stride, *sums)
    launch("spectrum", "finish_spectrum", array.dtype, BINS // THREADS, *sums, counts, energies)
