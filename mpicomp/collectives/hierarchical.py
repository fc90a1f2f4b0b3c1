"""Dense inside a host, through its shared memory; another collective, compressed, between hosts."""

from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.dense import ScatterReduce
from mpicomp.collectives.scheme import (
    Exchange,
    MeanWriter,
    Memory,
    Result,
    Scheme,
    cause_of,
    check_undamaged,
    failed_result,
    far_from_largest,
    gain_of,
    slices_of,
)
from mpicomp.compressors.accumulated import TRAILER, Accumulated, Piece
from mpicomp.compressors.base_compressor import Compressor
from mpicomp.compressors.context import Context
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.kinds import Sparsifier
from mpicomp.compressors.wire import DAMAGED, Selection
from mpicomp.errors import MessageError
from mpicomp.gpu import current_device, to_python
from mpicomp.mpi.rounds import ACROSS, HOST, Group, Request, Round, Rounds, observe, parts_of
from mpicomp.registry import register
from mpicomp.workspace import Workspace

_NUMBER = np.dtype(np.float64)
_REPORT = 7
"""Numbers of a slice that its owner sends to its host: energy, lost energy, kept elements, non-finite, stale; whether
some owner of the slice was sent a damaged message, and whether this one was and those on other hosts do not know.
"""


@register
class Hierarchical(Scheme[Compressor]):
    """The array is cut into as many slices as the host with the fewest ranks has; each slice has one owner a host.

    In a host every rank sends its slices to their owners, who sum them in rank order. The owners of a slice, one a
    host, exchange their sums with the inner collective as if no other ranks existed, and send the means to all ranks of
    their host. So a host counts as one participant: a sparsifier selects from a host's sum, slice by slice, and its
    ratio is that of a host. All links between hosts carry an even share. On one host nothing is compressed; with one
    rank a host it is the inner collective alone.

    Notes
    -----
    With sparse messages error feedback moves inside a host: an owner's accumulated array becomes the host's sum in its
    own slice and zero elsewhere, and that of a rank that owns nothing zero everywhere. ``sent``, the gain and the
    residuals are of these arrays, whose sum over ranks does not change. With dense and packed messages nothing moves:
    an owner's ``sent`` is its array minus the part of the host's sum that the inner collective kept back; other ranks
    have sent their whole arrays.
    """

    id: ClassVar[str] = "hierarchical"
    precedence: ClassVar[int] = 91
    paper: ClassVar[str] = (
        "none: two-level allreduce, as in MPI libraries; an owner for every slice, compressed between hosts only"
    )
    messages: ClassVar[str] = "any"
    overwrites: ClassVar[bool] = True
    needs_whole_message: ClassVar[bool] = True  # slices, by collectives for which it is

    def __init__(self, compressor: Compressor, inner: Scheme[Any]) -> None:
        super().__init__(compressor)
        self._inner = inner
        self._sparse = isinstance(compressor, Sparsifier) and not compressor.shares_positions
        self.may_drop_selected, self.by_value = inner.may_drop_selected, inner.by_value

    @classmethod
    def supports(cls, compressor: type[Compressor] | Compressor) -> bool:
        fits = super().supports(compressor) and compressor.averages
        if isinstance(compressor, type):
            return fits
        # Tied to positions: ratios by layer, and velocities that sent elements clear.
        tied = getattr(compressor, "layers", None) or (compressor.entry.momentum and compressor.entry.masking)
        return fits and not tied

    @classmethod
    def inner_compressor(cls, compressor: Compressor) -> Compressor:
        return compressor

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        if group.hosts == 1:
            return ScatterReduce(Dense()).rounds(numel, dtype, group, step)
        host, across = _groups(group)
        slices = _slices(numel, group)
        inner = []
        if across is not None and (slices[host.rank] or not self._sparse):  # nothing is selected from an empty slice
            rounds = self._inner.rounds(slices[host.rank], dtype, across, step)
            inner = [replace(task, group=ACROSS) for task in rounds]
        if host.size == 1:
            return inner
        none = [0] * (host.size - len(slices))
        return [
            Round("alltoallv", [*slices[:-1], slices[-1] + TRAILER, *none], dtype, group=HOST),
            *inner,
            Round("allgatherv", [_REPORT] * len(slices) + none, _NUMBER, group=HOST),
            Round("allgatherv", slices + none, dtype, group=HOST),
        ]

    def memory(self, numel: int, dtype: np.dtype[Any], group: Group) -> Memory:
        if group.hosts == 1:
            return ScatterReduce(Dense()).memory(numel, dtype, group)
        host, across = _groups(group)
        owned = max(_slices(numel, group))
        inner = Memory(0, 0) if across is None else self._inner.memory(owned, dtype, across)
        if host.size == 1:
            return inner
        part = (owned + TRAILER) * dtype.itemsize
        # Messages, the host's sum and its sent part; the mean, and the unsent part.
        return Memory((host.size + 2) * part + inner.scratch, inner.held + 2 * part)

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        group = context.group
        if group.hosts == 1:
            return (yield from ScatterReduce(Dense()).exchange(accumulated, context))
        host, across = _groups(group)
        if host.size == 1:
            assert across is not None
            if not self._sparse:
                accumulated.array()  # not divided, as owners on other hosts do not divide theirs
            result, damaged = yield from self._between_hosts(accumulated, context, across)
            report = self._report(result, damaged, True)
            return _joined(report, result.mean, result.sent, result.problem, accumulated.numel)
        return (yield from self._exchange(accumulated, context, host, across))

    def _exchange(self, accumulated: Accumulated, context: Context, host: Group, across: Group | None) -> Exchange:
        group, workspace = context.group, context.workspace
        numel, dtype = accumulated.numel, accumulated.dtype
        slices, overwrites = _slices(numel, group), accumulated.may_be_overwritten
        owner, last = host.rank < len(slices), host.rank == len(slices) - 1
        owned_slice = slices_of(slices)[host.rank] if owner else slice(0, 0)
        owned = owned_slice.stop - owned_slice.start

        scatter, *_, report_round, gather = self.rounds(numel, dtype, group, context.step)
        scatter.send = accumulated.with_trailer()
        width = owned + TRAILER * last
        scatter.recv = workspace.scratch("incoming", width * host.size, dtype)
        incoming = (yield scatter).reshape(host.size, width)

        report, problem = np.zeros(_REPORT if owner else 0), None
        mean = incoming.reshape(-1)[:0]
        sent: NDArray[np.floating] | Selection = accumulated.array()
        if self._sparse:
            sent = Selection(workspace.array("none", 0, np.uint32), mean)
        if owner and (owned or not self._sparse):
            assert across is not None
            part = self._part(accumulated, incoming, owned_slice, group.hosts, workspace)
            result, damaged = yield from self._between_hosts(part, context, across)
            report, problem = self._report(result, damaged, last), result.problem
            mean = result.mean_array(part, workspace)
            if self._sparse and isinstance(result.sent, Selection):
                indices = workspace.array("indices", result.sent.indices.size, np.uint32)
                np.add(result.sent.indices, np.uint32(owned_slice.start), out=indices)
                sent = Selection(indices, result.sent.values)
            sent_all = not self._sparse and np.may_share_memory(result.sent, part.array())
            if not sent_all and (overwrites or not self._sparse):
                unsent = workspace.array("unsent", owned, dtype)
                unsent[:] = part.array()
                _subtract(result.sent, unsent)
                if overwrites:  # it is in this rank's slice alone
                    accumulated.unsent = owned_slice.start, unsent
                else:
                    sent = workspace.scratch("sent", numel, dtype)
                    sent[:] = accumulated.array()
                    _subtract(unsent, sent[owned_slice])
        if self._sparse and not overwrites:
            array = accumulated.array()
            array[: owned_slice.start] = 0
            array[owned_slice.stop :] = 0

        report_round.send = report
        report_round.recv = workspace.host_array("reports", _REPORT * len(slices), _NUMBER)
        reports = yield report_round
        gather.send = mean
        gather.recv = accumulated.memory_of_mean(workspace)[:numel]
        return _joined(reports, (yield gather), sent, problem, numel)

    def _part(
        self,
        accumulated: Accumulated,
        incoming: NDArray[np.floating],
        owned_slice: slice,
        hosts: int,
        workspace: Workspace,
    ) -> Accumulated:
        """Sum an owned slice over the host, in rank order."""
        owned = owned_slice.stop - owned_slice.start
        with np.errstate(over="ignore", invalid="ignore"):
            total = incoming[0]
            for other in incoming[1:-1]:
                np.add(total, other, out=total)
            nonfinite, stale, energy, lost = 0.0, 0.0, 0.0, 0.0
            if total.size > owned:
                nonfinite, stale, energy, lost = current_device().to_host(total[owned:] + incoming[-1, owned:]).tolist()
            if self._sparse:
                buffer = accumulated.with_trailer(*[0.0] * TRAILER)[owned_slice.start : owned_slice.stop + TRAILER]
                pieces = [Piece(0, incoming[-1, :owned])]
                return Accumulated(buffer, total[:owned], pieces, stale > 0, accumulated.threads)
        buffer = workspace.scratch("slice", owned + TRAILER, accumulated.dtype)
        moments = kernels.accumulate(incoming[-1, :owned], total[:owned], buffer[:owned], accumulated.threads)
        energy_there, finite_there = to_python(moments.energy, moments.finite)
        if total.size == owned:
            energy = energy_there  # of this slice alone, of which rounding loses a share
        finite = nonfinite == 0 and finite_there
        if finite and self.compressor != Dense():
            # The part of the host's sum that is kept back is subtracted from the owner's sent array.
            finite = _differ_finitely(buffer[:owned], accumulated.array()[owned_slice], energy_there, hosts)
        return Accumulated.ready(buffer, energy, lost, finite, stale > 0)

    def _between_hosts(self, part: Accumulated, context: Context, across: Group) -> Rounds[tuple[Result, bool]]:
        """Return the inner collective's result, over ranks, and whether some owner received a damaged message."""
        inner = replace(
            context,
            group=across,
            memory=context.memory.setdefault("hierarchical", {}),
            workspace=context.workspace.inner("hierarchical"),
        )

        def address(asked: Request) -> None:
            if isinstance(asked, Round):  # not one that was started before and is now waited for
                asked.group = ACROSS

        try:
            result = yield from observe(self._inner.exchange(part, inner), before=address)
        except MessageError as error:
            result = failed_result(part, error, stale=False)
            result.problem = cause_of(error)
            return result, True
        if context.group.size > context.group.hosts:
            result.mean = result.mean_array(part, inner.workspace)
            kernels.scale(result.mean, context.group.hosts / context.group.size)
        return result, False

    def _report(self, result: Result, damaged: bool, last: bool) -> NDArray[np.float64]:
        # The numbers that an owner sends to its host, the same on all hosts.
        with np.errstate(invalid="ignore", over="ignore"):
            lost = (1 - np.float64(result.gain)) * result.energy
        # With dense messages the last slice's energy is that of the ranks' whole arrays.
        energy = result.energy if self._sparse or last else 0.0
        alone = result.problem is not None and not (damaged or result.stale)
        return np.array([energy, lost, result.kept, result.nonfinite, result.stale, damaged, alone], _NUMBER)


def _subtract(sent: NDArray[np.floating] | Selection, array: NDArray[np.floating]) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        if isinstance(sent, Selection):
            kernels.subtract_at(sent.indices, sent.values, array)
        else:
            np.subtract(array, sent, out=array)


def _groups(group: Group) -> tuple[Group, Group | None]:
    host = group.part(HOST)
    assert host is not None
    return host, group.part(ACROSS)


def _slices(numel: int, group: Group) -> list[int]:
    across = group.part(ACROSS)  # without a layout every rank has a host of its own
    owners = min(Counter(group.layout).values()) if across is None else across.sharing
    return parts_of(numel, owners)[::-1]


def _differ_finitely(total: NDArray[np.floating], array: NDArray[np.floating], energy: float, hosts: int) -> bool:
    # Whether any unsent part of a host's sum can be subtracted from an array, if so on all hosts.
    [local_energy] = to_python(kernels.energy(array))
    if far_from_largest((energy + local_energy) * hosts**2, array.dtype):
        return True
    top = max(to_python(*(np.abs(values).max() for values in (total, array) if values.size)), default=0.0)
    return 16 * hosts * float(top) < float(np.finfo(array.dtype).max)


def _joined(
    reports: NDArray[np.float64],
    mean: NDArray[np.floating] | MeanWriter,
    sent: NDArray[np.floating] | Selection,
    problem: MessageError | None,
    numel: int,
) -> Result:
    """Return the result from the reports of a host's owners; ``problem`` is an owner's unreadable message."""
    numbers = (float(number) for number in reports.reshape(-1, _REPORT).sum(axis=0))
    energy, lost, kept, nonfinite, stale, damaged, alone = numbers
    if problem is not None:
        problem = MessageError(f"hierarchical: between hosts: {problem}")
    check_undamaged("hierarchical", DAMAGED * (damaged > 0), problem)
    if problem is None and not 0 <= kept <= numel:
        problem = MessageError(f"hierarchical: inside the host: kept elements must be from 0 to {numel}, got {kept}")
    if alone > 0 and problem is None:
        problem = MessageError("hierarchical: the owner of a slice on this rank's host was sent a damaged message")
    gain = gain_of(lost, energy)
    return Result(mean, sent, energy, gain, kept, nonfinite > 0, stale > 0, problem=problem)
