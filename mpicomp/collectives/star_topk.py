"""STAR-Topk: one rank's indices for all, the ranks taking turns."""

from typing import Any, ClassVar

import numpy as np

from mpicomp.collectives.scheme import Exchange, check_counts
from mpicomp.collectives.shared_indices import Leading
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.registry import register
from mpicomp.rounds import Group, Round


@register
class StarTopk(Leading):
    """Bcast of the selecting rank's indices, then a sum of every rank's values at them.

    The selecting rank is ``step mod ranks``; the others select nothing. See `Leading`.
    """

    id: ClassVar[str] = "star-topk"
    precedence: ClassVar[int] = 4
    paper: ClassVar[str] = (
        "AR-Topk with round-robin selection, Tyagi and Swany 2023, arXiv 2312.02493; indices coded or of 32 bits, "
        "residuals start at zero, gain from all ranks' norms"
    )
    messages: ClassVar[str] = "sparse"

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        leader = step % group.size
        asked = [] if self.compressor.count(numel) is not None else [self._ask(leader)]
        return [*asked, *self._rounds_led(leader, self.compressor.expected(numel), numel, dtype, group, step)]

    def exchange(self, accumulated: GradientWithResidual, context: Context) -> Exchange:
        leader = context.step % context.group.size
        leads = context.group.rank == leader
        chosen = self.compressor.select(accumulated, context) if leads else None
        count = self.compressor.count(accumulated.numel)
        if count is None:
            ask = self._ask(leader)
            ask.recv = context.workspace.host_array("count", 1, np.int64)
            if chosen is not None:
                ask.send = np.array([chosen.indices.size], np.int64)
            sent = None if chosen is None else (0, chosen.indices.size)
            [count] = check_counts(self.id, (yield ask), 0, accumulated.numel, sent)
        return (yield from self._exchange_led(leader, count, chosen, accumulated, context))

    def _ask(self, leader: int) -> Round:
        return Round("bcast", (1,), np.dtype(np.int64), root=leader)
