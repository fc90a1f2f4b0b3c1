"""The transport's own sum."""

from typing import Any, ClassVar

import numpy as np

from mpicomp.collectives.scatter_reduce import ScatterReduce
from mpicomp.collectives.scheme import Exchange, Result, Scheme, gain_of
from mpicomp.compressors.context import Context
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.gradient_with_residual import TRAILER, GradientWithResidual
from mpicomp.device import received_on_host, to_python
from mpicomp.registry import register
from mpicomp.rounds import Group, Round


@register
class Allreduce(Scheme[Dense]):
    """Allreduce of the whole array, with two flags and two energies behind it that are summed along.

    16-bit wires never go through a library's sum (there is no bfloat16 in it, and it would round at every hop),
    and a library whose sums differ between ranks cannot give the mean: both take `ScatterReduce` instead.
    """

    id: ClassVar[str] = "allreduce"
    precedence: ClassVar[int] = 1
    paper: ClassVar[str] = "none: MPI_Allreduce"
    messages: ClassVar[str] = "dense"

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        if not self._summable(group):
            return ScatterReduce(self.compressor).rounds(numel, dtype, group, step)
        return [Round("allreduce", (numel + TRAILER,), dtype)]

    def exchange(self, accumulated: GradientWithResidual, context: Context) -> Exchange:
        group, numel = context.group, accumulated.numel
        if not self._summable(group):
            return (yield from ScatterReduce(self.compressor).exchange(accumulated, context))
        workspace, dtype = context.workspace, accumulated.dtype
        whole = workspace.array("mean", numel + TRAILER, dtype)
        task = Round("allreduce", (numel + TRAILER,), dtype, send=accumulated.with_trailer(), recv=whole)
        whole = yield task
        mean = workspace.part(whole, numel)
        nonfinite, stale, energy, lost = received_on_host(whole[numel:]).tolist()
        place = accumulated.kernels
        [finite] = to_python(place.is_finite(place.scale(mean, 1 / group.size), dtype))
        return Result(
            mean=mean,
            sent=accumulated.array(),
            energy=energy,
            gain=gain_of(lost, energy),
            kept=float(numel),
            nonfinite=nonfinite > 0 or not finite,
            stale=stale > 0,
        )

    def _summable(self, group: Group) -> bool:
        return self.compressor.wire is None and group.identical_sums
