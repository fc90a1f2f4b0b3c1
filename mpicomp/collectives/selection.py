"""Work on selections: merges, means at positions that all ranks know, and means of rows."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.scheme import Exchange, LazyMean, Result, Scheme, undelivered
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import TRAILER, GradientWithResidual
from mpicomp.compressors.wire_format import Selection
from mpicomp.device import current_device, to_python
from mpicomp.errors import MessageError
from mpicomp.rounds import Group, Round, Rounds, gather_rows
from mpicomp.workspace import Workspace


def room(workspace: Workspace, name: str, size: int, dtype: np.dtype[Any]) -> Selection:
    """Return room for a selection; it is the caller's until the same name is asked for again."""
    return Selection(
        workspace.array(f"{name}.indices", size, np.uint32), workspace.array(f"{name}.values", size, dtype)
    )


def added(first: Selection, second: Selection, workspace: Workspace, name: str) -> Selection:
    """Return the union of two selections, the values of common indices added, in the room of a name."""
    out = room(workspace, name, first.indices.size + second.indices.size, first.values.dtype)
    return _begin(
        out, kernels.merge_add(first.indices, first.values, second.indices, second.values, out.indices, out.values)
    )


def less(first: Selection, second: Selection, workspace: Workspace, name: str) -> Selection:
    """Return the first selection minus the second one, zeros left out, in the workspace array of a name."""
    out = room(workspace, name, first.indices.size + second.indices.size, first.values.dtype)
    return _begin(
        out, kernels.merge_subtract(first.indices, first.values, second.indices, second.values, out.indices, out.values)
    )


def common(selection: Selection, indices: NDArray[np.uint32], workspace: Workspace, name: str) -> Selection:
    """Return the part of a selection that is at some indices, in the room of a name."""
    out = room(workspace, name, min(selection.indices.size, indices.size), selection.values.dtype)
    return _begin(out, kernels.intersect(selection.indices, selection.values, indices, out.indices, out.values))


def parted(
    selection: Selection, threshold: int, count: int, workspace: Workspace, name: str
) -> tuple[Selection, Selection]:
    """Return the ``count`` largest elements and the others, in the rooms of two names; see `cpu.split_largest`."""
    dtype = selection.values.dtype
    kept = room(workspace, f"{name}.kept", count, dtype)
    left = room(workspace, f"{name}.left", selection.indices.size - count, dtype)
    kernels.split_largest(
        selection.indices, selection.values, threshold, kept.indices, kept.values, left.indices, left.values
    )
    return kept, left


def _begin(out: Selection, count: int) -> Selection:
    [size] = to_python(count)
    return Selection(out.indices[:size], out.values[:size])


def exchange_at(
    indices: NDArray[np.uint32],
    weights: NDArray[np.floating] | float,
    accumulated: GradientWithResidual,
    context: Context,
    inner: Scheme[Any],
    problem: MessageError | None = None,
) -> Exchange:
    """Average the values at some positions, the same on all ranks, as if they were the whole array.

    If the positions are wrong (``problem``), this rank takes part with zeros and asks all ranks to agree again.
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
    return Result(
        mean=LazyMean.of(accumulated.numel, indices, result.mean_in(context.workspace)),
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


_INDEX = np.dtype(np.int64)
_NONE = -1  # sent by a rank without a gradient in place of the number of its rows


def mean_of_rows(
    indices: NDArray[np.int64] | None, rows: NDArray[np.floating], group: Group
) -> Rounds[tuple[NDArray[np.int64], NDArray[np.floating]] | None]:
    """Average rows over all ranks, a rank's missing rows being zeros. The same bits on every rank; as rounds.

    ``indices`` ascend, None stands for no gradient. Return (indices, means), or None if no rank has a gradient.
    """
    width = rows.shape[1]
    lengths = yield from gather_rows(np.array(_NONE if indices is None else indices.size, _INDEX), group)
    if (lengths == _NONE).all():
        return None
    counts = [max(0, int(length)) for length in lengths]
    send = np.empty(0, _INDEX) if indices is None else np.ascontiguousarray(indices)
    everyones = yield Round("allgatherv", counts, _INDEX, send=send, recv=np.empty(sum(counts), _INDEX))
    task = Round(
        "allgatherv",
        [count * width for count in counts],
        rows.dtype,
        send=np.ascontiguousarray(rows).reshape(-1),
        recv=np.empty(sum(counts) * width, rows.dtype),
    )
    values = (yield task).reshape(-1, width)
    which: NDArray[np.int64] = np.unique(everyones)
    total = np.zeros((which.size, width), rows.dtype)
    start = 0
    for count in counts:  # in rank order, so that all ranks round alike
        part = slice(start, start + count)
        with np.errstate(over="ignore", invalid="ignore"):  # who asks looks at the mean
            total[np.searchsorted(which, everyones[part])] += values[part]
        start += count
    total /= group.size
    return which, total
