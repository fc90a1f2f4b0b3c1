"""Whole-array sweeps that belong to no family."""

import numpy as np
from mpicomp.kernels.cpu.compile import Floats, exact, kernel


def scale(array: Floats, factor: float) -> bool:
    """Multiply in place and return whether every element of the result is finite; on a device, 0-d."""
    return bool(_scale(array, array.dtype.type(factor), np.finfo(array.dtype).max))


@kernel
def energy(array: Floats) -> float:
    """Return the squared L2 norm of an array, summed in float64."""
    total = 0.0
    for i in range(array.size):
        value = np.float64(array[i])
        total += value * value
    return total


def momentum(
    gradient: Floats, factor: float, velocity: Floats, decay: float, nesterov: bool, after: Floats, out: Floats
) -> None:
    """Apply momentum to ``factor * gradient`` before it is accumulated (Deep Gradient Compression, arXiv 1712.01887).

    ``after`` receives the velocity, ``decay * velocity + g``, and so does ``out``. With Nesterov the velocity is
    ``decay * (velocity + g)``, and ``out`` receives its sum with ``g``. The gradient may be ``out``.
    """
    number = out.dtype.type
    _momentum(gradient, number(factor), velocity, number(decay), nesterov, after, out)


def share_rounding(exact: Floats, rounded: Floats, ranks: int, array: Floats, sent: Floats) -> float:
    """Charge the rounding of a mean to its owner: ``sent -= ranks * (exact - rounded)``.

    Return the growth of the squared L2 norm of ``array - sent``.
    """
    return float(_share_rounding(exact, rounded, exact.dtype.type(ranks), array, sent))


@exact
def _less_share(sent, ranks, rounding):  # type: ignore[no-untyped-def]
    return sent - ranks * rounding


@kernel
def _share_rounding(exact, rounded, ranks, array, sent):  # type: ignore[no-untyped-def]
    growth = 0.0
    for i in range(exact.size):
        before = np.float64(array[i] - sent[i])
        sent[i] = _less_share(sent[i], ranks, exact[i] - rounded[i])
        after = np.float64(array[i] - sent[i])
        growth += after * after - before * before
    return growth


@kernel
def _scale(array, factor, largest):  # type: ignore[no-untyped-def]
    nonfinite = 0
    for i in range(array.size):
        value = array[i] * factor
        array[i] = value
        nonfinite += not abs(value) <= largest
    return nonfinite == 0


@exact
def _momentum(gradient, factor, velocity, decay, nesterov, after, out):  # type: ignore[no-untyped-def]
    if nesterov:
        for i in range(out.size):
            entering = factor * gradient[i]
            after[i] = decay * (velocity[i] + entering)
            out[i] = after[i] + entering
    else:
        for i in range(out.size):
            after[i] = decay * velocity[i] + factor * gradient[i]
            out[i] = after[i]
