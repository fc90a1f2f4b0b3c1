"""`Scope`, as `Context` was called where a compressor saw it."""

import warnings
from typing import Any

from mpicomp.compressors.context import Context
from mpicomp.rounds import Group
from mpicomp.workspace import Workspace


class Scope(Context):
    """A `Context` that is made from a rank; use `mpicomp.Context`."""

    def __init__(
        self,
        rank: int = 0,
        step: int = 0,
        bucket: int = 0,
        seed: int = 0,
        memory: dict[str, Any] | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        warnings.warn("mpicomp.Scope is now mpicomp.Context, with group= for rank=", DeprecationWarning, stacklevel=2)
        memory = {} if memory is None else memory
        super().__init__(Group(rank, rank + 1), step, bucket, seed, memory, workspace or Workspace())
