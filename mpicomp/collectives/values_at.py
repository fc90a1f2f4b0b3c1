"""The sum of all ranks' values at positions that all ranks know."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.scheme import Exchange, Result, Scheme, undelivered
from mpicomp.collectives.sparse_mean import SparseMean
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import TRAILER, GradientWithResidual
from mpicomp.compressors.wire_format import Selection
from mpicomp.device import current_device, to_python
from mpicomp.errors import MessageError


def exchange_at(
    indices: NDArray[np.uint32],
    weights: NDArray[np.floating] | float,
    accumulated: GradientWithResidual,
    context: Context,
    inner: Scheme[Any],
    problem: MessageError | None = None,
) -> Exchange:
    """Average the values at some positions with another collective, as if they were the whole array.

    Where positions are wrong this rank takes part with zeros, and asks all ranks to agree anew.

    Parameters
    ----------
    indices : array of uint32, shape (count,)
        The same on all ranks, without repetition.
    weights : array, shape (count,), or float
        Factor of values before they are sent.
    accumulated, context
        As in `Scheme.exchange`.
    inner : Scheme
        The other collective; its compressor sends all elements.
    problem : MessageError or None
        What is wrong with the indices, of which then only the number counts.
    """
    array, dtype = accumulated.array(), accumulated.dtype
    buffer = context.workspace.array("positions", indices.size + TRAILER, dtype)
    values = buffer[: indices.size]
    weighted = isinstance(weights, np.ndarray) or weights != 1
    right, kept, lost = False, 0.0, 0.0
    if problem is None:
        gathered = kernels.gather(array, indices, values)
        right, kept = accumulated.to_host(gathered, 0.0 if weighted else kernels.energy(values))
        if not right:
            wrong = f"an index of the ranks' common positions is not below {accumulated.numel}"
            problem = MessageError(f"{inner.id}: {wrong}")
    if problem is not None:
        values[:] = 0
    elif weighted:
        factors = (
            current_device().to_device(weights.astype(dtype, copy=False))
            if isinstance(weights, np.ndarray)
            else weights
        )
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(values, factors, out=values, casting="same_kind")
        lost = _lost(array, indices, values, accumulated.energy)
    else:
        lost = max(0.0, accumulated.energy - kept)
    stale = accumulated.stale or problem is not None
    part = GradientWithResidual.ready(buffer, accumulated.energy, lost, accumulated.finite, stale)
    result = yield from inner.exchange(part, context)
    problem = problem or result.problem
    if problem is not None:
        return undelivered(accumulated, problem, result.stale)
    assert not isinstance(result.sent, Selection)
    mean = SparseMean.cleared(context.workspace, accumulated.numel, dtype)
    mean.add(indices, result.mean, 1.0)
    return Result(
        mean=mean.array,
        sent=Selection(indices, result.sent),
        energy=result.energy,
        gain=result.gain,
        kept=float(indices.size),
        nonfinite=result.nonfinite,
        stale=result.stale,
    )


def _lost(array: NDArray[np.floating], indices: NDArray[np.uint32], sent: NDArray[np.floating], energy: float) -> float:
    """Return the energy of ``array - sent``, which may be more than that of the array."""
    exact = array[indices]
    with np.errstate(over="ignore", invalid="ignore"):
        before, after = to_python(kernels.energy(exact), kernels.energy(exact - sent))
        return float(energy - before + after)
