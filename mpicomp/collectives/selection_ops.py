"""Operations on selections in a workspace's arrays, for collectives that merge selections."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.wire_format import Selection
from mpicomp.device import to_python
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
        out,
        kernels.merge_add(first.indices, first.values, second.indices, second.values, out.indices, out.values),
    )


def less(first: Selection, second: Selection, workspace: Workspace, name: str) -> Selection:
    """Return the first selection minus the second one, zeros left out, in the workspace array of a name."""
    out = room(workspace, name, first.indices.size + second.indices.size, first.values.dtype)
    return _begin(
        out,
        kernels.merge_subtract(first.indices, first.values, second.indices, second.values, out.indices, out.values),
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
