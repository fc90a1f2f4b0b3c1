"""Whole-array sweeps that belong to no family."""

import numpy as np
from mpicomp.kernels.cpu.bits import as_bits, mask_of
from mpicomp.kernels.cpu.compile import exact, kernel
from numpy.typing import NDArray


def scale(array: NDArray[np.floating], factor: float) -> int:
    """Multiply in place and return the largest magnitude of the result as bits (see `is_finite`).

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.kernels.cpu import is_finite
    >>> array = np.array([2, np.nan], np.float32)
    >>> is_finite(scale(array, 0.5), array.dtype), float(array[0])
    (False, 1.0)
    """
    return int(_scale(array, as_bits(array), mask_of(array.dtype), array.dtype.type(factor)))


def energy(array: NDArray[np.floating]) -> float:
    """Return the squared L2 norm of a contiguous array, summed in float64.

    Examples
    --------
    >>> import numpy as np
    >>> energy(np.array([3, 4], np.float32))
    25.0
    """
    return float(_energy(array))


def momentum(
    gradient: NDArray[np.floating],
    factor: float,
    velocity: NDArray[np.floating],
    decay: float,
    nesterov: bool,
    after: NDArray[np.floating],
    out: NDArray[np.floating],
) -> None:
    """Apply momentum to a gradient before it is accumulated (Deep Gradient Compression, arXiv 1712.01887).

    Parameters
    ----------
    gradient : array, shape (n,)
        float32 or float64; it may be ``out``.
    factor : float
        Factor that the gradient is multiplied by first.
    velocity, after : arrays, shape (n,)
        The velocity u, and where the new one goes: ``u' = decay * u + g``, with Nesterov ``u' = decay * (u + g)``.
    decay : float
        The momentum.
    nesterov : bool
        Whether ``out`` receives ``u' + g`` in place of ``u'``.
    out : array, shape (n,)
        Receives the array that is added to the residual.
    """
    number = out.dtype.type
    _momentum(gradient, number(factor), velocity, number(decay), nesterov, after, out)


def share_rounding(
    exact: NDArray[np.floating],
    rounded: NDArray[np.floating],
    ranks: int,
    array: NDArray[np.floating],
    sent: NDArray[np.floating],
) -> float:
    """Let the owner of a mean answer for its rounding: ``sent -= ranks * (exact - rounded)``.

    Parameters
    ----------
    exact, rounded : arrays, shape (n,)
        A mean over ranks before and after it was rounded.
    ranks : int
        Number of ranks that receive the rounded mean.
    array, sent : arrays, shape (n,)
        The owner's array, and what it has sent of it; ``sent`` is changed in place.

    Returns
    -------
    float
        By how much the squared L2 norm of ``array - sent`` grew.
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
