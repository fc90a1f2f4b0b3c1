"""Kernels that sweep over a whole array: error feedback, sums, and elements scaled or with momentum."""

from typing import Any

import numpy as np
from mpicomp.kernels import cpu
from mpicomp.kernels.cpu.bits import infinity_of
from mpicomp.kernels.gpu.compile import THREADS, launch, library, remaining, scalar_arg, sweeps, twin_of
from mpicomp.kernels.gpu.select import Listing
from mpicomp.kernels.gpu.workspace import COLUMNS, Partials, reuse

_PER_BLOCK = 64 * 1024  # elements that a block of `spectrum` counts


@twin_of(cpu.accumulate)
def accumulate(gradient, residual, out, threads=1, factor=1.0):
    partials = reuse(Partials, sweeps(out.size, out.dtype), COLUMNS, True)
    accumulate_sweep(gradient, residual, out, partials, Listing(), factor=factor)
    return partials.found()


def accumulate_sweep(
    gradient: Any, residual: Any, out: Any, partials: Partials, listing: Listing,
    bound: tuple[Any, int] = (0, 0), state: Any = 0, factor: float = 1.0,
) -> None:  # fmt: skip
    """Launch the kernel that computes the sum; a bound of 0 lists no candidates."""
    launch(
        "accumulate", "accumulate", out.dtype, sweeps(out.size, out.dtype),
        gradient, 0 if residual is None else residual, factor, out, out.size, *bound,
        listing.index, listing.bits, listing.room, listing.starts, listing.counts, state, partials.memory,
    )  # fmt: skip


@twin_of(cpu.scale)
def scale(array, factor):
    blocks = sweeps(array.size, array.dtype)
    partials = reuse(Partials, blocks, 0, True)
    launch("sweep", "scale", array.dtype, blocks, array, array.size, *scalar_arg(factor, np.float64), partials.memory)
    return partials.top() < infinity_of(array.dtype)


@twin_of(cpu.energy)
def energy(array):
    blocks = sweeps(array.size, array.dtype)
    partials = reuse(Partials, blocks, 1)
    launch("sweep", "energy", array.dtype, blocks, array, array.size, partials.memory)
    return partials.total(0)


@twin_of(cpu.momentum)
def momentum(gradient, factor, velocity, decay, nesterov, after, out):
    launch(
        "sweep", "momentum", out.dtype, sweeps(out.size, out.dtype),
        gradient, float(factor), velocity, float(decay), int(nesterov), after, out, out.size,
    )  # fmt: skip


@twin_of(cpu.share_rounding)
def share_rounding(exact, rounded, ranks, array, sent):
    blocks = sweeps(exact.size, exact.dtype)
    partials = reuse(Partials, blocks, 1)
    launch(
        "sweep", "share_rounding", exact.dtype, blocks,
        exact, rounded, float(ranks), array, sent, exact.size, partials.memory,
    )  # fmt: skip
    return partials.total(0)


@twin_of(cpu.logarithms)
def logarithms(array, stride=1, threads=1):
    sampled = remaining(array.size, stride)
    blocks = sweeps(sampled, array.dtype)
    partials = reuse(Partials, blocks, 3)
    launch("sweep", "logarithms", array.dtype, blocks, array, array.size, sampled, stride, partials.memory)
    return partials.count(), partials.total(1), partials.total(2)


@twin_of(cpu.tail_statistics)
def tail_statistics(array, threshold, stride=1, threads=1):
    sampled = remaining(array.size, stride)
    blocks = sweeps(sampled, array.dtype)
    partials = reuse(Partials, blocks, 3)
    launch(
        "sweep", "tail_statistics", array.dtype, blocks,
        array, array.size, sampled, stride, *scalar_arg(threshold, np.float64), partials.memory,
    )  # fmt: skip
    return cpu.TailStatistics(partials.count(), partials.total(1), partials.total(2))


# Energies are good to 3e-5 and have the same bits at every call.
@twin_of(cpu.spectrum)
def spectrum(array, counts, energies, stride=1, threads=1):
    memory = library().zeros(2 * cpu.BINS, np.uint64)
    sums = memory[: cpu.BINS], memory[cpu.BINS :]
    sampled = -(-array.size // (cpu.GROUP * stride)) * cpu.GROUP
    launch("spectrum", "spectrum", array.dtype, -(-sampled // _PER_BLOCK), array, array.size, stride, *sums)
    launch("spectrum", "finish_spectrum", array.dtype, cpu.BINS // THREADS, *sums, counts, energies)
