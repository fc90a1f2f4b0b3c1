"""A collective in one file: sums go up a tree of ranks to rank 0, which sends the mean to all."""

from typing import Any, ClassVar

import numpy as np

import mpicomp
from mpicomp.collectives import Context, Exchange, Result, Scheme
from mpicomp.compressors import Accumulated
from mpicomp.compressors.accumulated import TRAILER
from mpicomp.mpi.rounds import Group, Round


@mpicomp.register
class Tree(Scheme[mpicomp.Dense]):
    """A binomial tree to rank 0 and a broadcast: few steps, each with the whole array."""

    id: ClassVar[str] = "tree"
    paper: ClassVar[str] = "Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521"
    messages: ClassVar[str] = "dense"
    sums_on_the_way: ClassVar[bool] = True  # 16-bit numbers would be rounded at every step

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        """Return the shapes of what `exchange` yields, which follow from the number of elements and of ranks."""
        whole, rank, steps = numel + TRAILER, group.rank, []
        for distance in (1 << bit for bit in range((group.size - 1).bit_length())):
            to = rank - distance if rank % (2 * distance) == distance else None
            source = rank + distance if rank % (2 * distance) == 0 and rank + distance < group.size else None
            counts = 0 if to is None else whole, 0 if source is None else whole
            steps.append(Round("sendrecv", counts, dtype, peers=(to, source)))
        return [*steps, Round("bcast", (whole,), dtype, root=0)]

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        """Add up what arrives, divide on rank 0, and broadcast."""
        numel, dtype, group = accumulated.numel, accumulated.dtype, context.group
        total, part = (context.workspace.array(name, numel + TRAILER, dtype) for name in ("total", "part"))
        total[:] = accumulated.with_trailer()
        *steps, share = self.rounds(numel, dtype, group)
        for task in steps:
            task.send, task.recv = total[: task.counts[0]], part[: task.counts[1]]
            received = yield task
            with np.errstate(over="ignore", invalid="ignore"):
                total[: received.size] += received
        total[:numel] /= group.size
        share.send = share.recv = total
        total = yield share
        return Result.from_trailer(accumulated, total[:numel], total[numel:], group.size)
