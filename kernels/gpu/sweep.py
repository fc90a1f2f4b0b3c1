"""Whole-array sweeps that belong to no family."""

from typing import Any

from mpicomp.kernels.gpu.bits import given
from mpicomp.kernels.gpu.compile import launch, sweeps
from mpicomp.kernels.gpu.reduce import Partials
from numpy import float64


def scale(array: Any, factor: Any) -> Any:
    """Multiply in place and return the largest magnitude bits of the result; see `mpicomp.kernels.cpu.scale`."""
    blocks = sweeps(array.size, array.dtype)
    partials = Partials(blocks, 0, top=True)
    launch("sweep", "scale", array.dtype, blocks, array, array.size, *given(factor, float64), partials.memory)
    return partials.top()


def energy(array: Any) -> Any:
    """Return the squared L2 norm, summed in float64; see `mpicomp.kernels.cpu.energy`."""
    blocks = sweeps(array.size, array.dtype)
    partials = Partials(blocks, 1)
    launch("sweep", "energy", array.dtype, blocks, array, array.size, partials.memory)
    return partials.total(0)


def momentum(gradient: Any, factor: float, velocity: Any, decay: float, nesterov: bool, after: Any, out: Any) -> None:
    """Apply momentum to a gradient before it is accumulated; see `mpicomp.kernels.cpu.momentum`."""
    launch(
        "sweep", "momentum", out.dtype, sweeps(out.size, out.dtype),
        gradient, float(factor), velocity, float(decay), int(nesterov), after, out, out.size,
    )  # fmt: skip


def share_rounding(exact: Any, rounded: Any, ranks: int, array: Any, sent: Any) -> Any:
    """Let the owner of a mean answer for its rounding; see `mpicomp.kernels.cpu.share_rounding`."""
    blocks = sweeps(exact.size, exact.dtype)
    partials = Partials(blocks, 1)
    launch(
        "sweep", "share_rounding", exact.dtype, blocks,
        exact, rounded, float(ranks), array, sent, exact.size, partials.memory,
    )  # fmt: skip
    return partials.total(0)
