"""Whole-array sweeps that belong to no family."""

import numpy as np
from mpicomp.kernels.cpu.bits import as_bits, mask_of
from mpicomp.kernels.cpu.compile import Floats, exact, kernel


def scale(array: Floats, factor: float) -> int:
    """Multiply in place and return the largest magnitude of the result as bits; see `is_finite`."""
    return int(_scale(array, as_bits(array), mask_of(array.dtype), array.dtype.type(factor)))


def energy(array: Floats) -> float:
    """Return the squared L2 norm of an array, summed in float64."""
    return float(_energy(array))


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


@kernel
def _energy(array):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(array.size):
        value = np.float64(array[i])
        total += value * value
    return total


@kernel
def _share_rounding(exact, rounded, ranks, array, sent):  # type: ignore[no-untyped-def]
    growth = 0.0
    for i in range(exact.size):
        before = np.float64(array[i] - sent[i])
        sent[i] -= ranks * (exact[i] - rounded[i])
        after = np.float64(array[i] - sent[i])
        growth += after * after - before * before
    return growth


@kernel
def _scale(array, bits, mask, factor):  # type: ignore[no-untyped-def]
    top = mask ^ mask
    for i in range(array.size):
        array[i] *= factor
        top = max(top, bits[i] & mask)
    return top


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
