"""Seconds that ranks compute in an exchange: as they were measured, and what more ranks add to it."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from mpicomp.bench.simulate.topology import Topology

from mpicomp.collectives import Context, Scheme, bind
from mpicomp.compressors.gradient_with_residual import TRAILER, GradientWithResidual, Piece
from mpicomp.cost import CostModel
from mpicomp.cost.kernel_costs import KernelCost, measure_kernel
from mpicomp.cost.model import scheme_key
from mpicomp.rounds import Group, Request, Round, Rounds, observe
from mpicomp.transport.local import LocalWorld
from mpicomp.workspace import Workspace

_RANKS = 4  # among which it is measured what another rank's message takes
_SIDE = 1 << 9  # of the square matrix on which it is
_WARM = 3  # steps before the timed ones, in which thresholds settle
_TIMED = 5  # steps whose least counts, since what disturbs only adds
_RATIO = 0.1  # at least, so that what is decoded is no small part of it
_LATER = 1 << 30  # number of a step in the long run


class ComputeTime:
    """Seconds that schemes compute among the ranks of a topology.

    What one rank takes alone is in the cost model. The seconds of decoding a byte of what others have sent are measured
    here, among ranks in one process, as is all of what the cost model does not know.
    """

    def __init__(self, cost: CostModel, slower: float | None = None) -> None:
        self._cost = cost
        self._slower = cost.slowdown() if slower is None else slower
        self._alone: dict[str, KernelCost] = {}
        self._per_byte: dict[tuple[str, str], float] = {}
        self.measured_here: set[str] = set()

    def seconds(self, scheme: Scheme[Any], numel: int, dtype: np.dtype[Any], topology: Topology) -> float:
        """Return the seconds that a rank computes in one exchange."""
        alone = self._of(scheme).seconds(numel, scheme.compressor.expected(numel))
        if topology.ranks == 1:
            return self._slower * alone
        group = topology.group(0)
        coming = sum(
            received_bytes(task, part)
            for task in scheme.rounds(numel, dtype, group, _LATER)
            if (part := group.part(task.group)) is not None
        )
        return self._slower * (alone + coming * self._of_a_byte(scheme))

    def _of(self, scheme: Scheme[Any]) -> KernelCost:
        for ladder in (False, True):
            key = scheme_key(scheme, ladder)
            if key in self._cost.kernels:
                return self._cost.kernels[key]
        if key not in self._alone:
            other = None
            if hasattr(scheme.compressor, "ratio"):
                more = min(1.0, 4 * scheme.compressor.ratio)
                other = (
                    bind(replace(scheme.compressor, ratio=more), scheme.id) if more > scheme.compressor.ratio else None
                )
            feedback = scheme.compressor.feedback
            self._alone[key] = KernelCost(*measure_kernel(scheme, other, feedback, time.thread_time))
            self.measured_here.add(scheme.compressor.id)
        return self._alone[key]

    def _of_a_byte(self, scheme: Scheme[Any]) -> float:
        key = scheme.id, scheme_key(scheme, True)
        if key not in self._per_byte:
            self._per_byte[key] = _measure_a_byte(scheme)
        return self._per_byte[key]


def received_bytes(task: Round, group: Group) -> int:
    """Return the bytes from other ranks that a rank is given by a round to work on; a library's sum is ready."""
    if group.size == 1:
        return 0
    match task.operation:
        case "allgatherv":
            elements = sum(task.counts) - task.counts[group.rank]
        case "gatherv":
            elements = sum(task.counts) - task.counts[group.rank] if group.rank == task.root else 0
        case "alltoallv":
            count = task.counts[group.rank]
            elements = (count * group.size if task.received is None else sum(task.received)) - count
        case "bcast":
            elements = task.counts[0] if group.rank != task.root else 0
        case "sendrecv":
            elements = task.counts[1]
        case _:
            elements = 0
    return elements * task.dtype.itemsize


def _measure_a_byte(scheme: Scheme[Any]) -> float:
    """Return the seconds of computation that a byte from another rank adds."""
    compressor = scheme.compressor
    if hasattr(compressor, "ratio"):
        compressor = replace(compressor, ratio=max(_RATIO, compressor.ratio))
    bound = bind(compressor.bind(["gradient"], [_SIDE**2], [(_SIDE, _SIDE)], warm_up=False), scheme.id)
    worlds = _Ranks(bound, 1), _Ranks(bound, _RANKS)
    for _ in range(_WARM):
        for world in worlds:
            world.step()
    alone, among = np.array([[world.step() for world in worlds] for _ in range(_TIMED)]).min(axis=0)
    return max(0.0, float(among - alone)) / worlds[1].nbytes if worlds[1].nbytes else 0.0


class _Ranks:
    """Ranks in this process that exchange gradients by a scheme."""

    def __init__(self, scheme: Scheme[Any], ranks: int) -> None:
        self.nbytes = 0.0
        self._scheme = scheme
        self._world = LocalWorld(ranks, hosts=min(ranks, 2))  # so that there is something between hosts
        self._step = 0
        self._memories: list[dict[str, Any]] = [{} for _ in range(ranks)]
        self._spaces = [Workspace() for _ in range(ranks)]
        self._arrays = []
        for rank in range(ranks):
            random = np.random.default_rng(rank)
            draw = [random.laplace(size=_SIDE**2).astype(np.float32) for _ in range(2)]
            self._arrays.append((*draw, np.empty(_SIDE**2 + TRAILER, np.float32)))

    def step(self) -> float:
        """Exchange, and return the seconds that a rank takes between rounds."""
        clocks = [_ComputeClock(end.group) for end in self._world.transports]
        exchanges = []
        for rank, clock in enumerate(clocks):
            context = Context(
                group=self._world.transports[rank].group,
                step=self._step,
                memory=self._memories[rank],
                workspace=self._spaces[rank],
            )
            gradient, residual, buffer = self._arrays[rank]
            accumulated = GradientWithResidual(
                buffer, residual if self._scheme.compressor.feedback else None, [Piece(0, gradient)]
            )
            exchanges.append(clock.over(self._scheme.exchange(accumulated, context)))
        self._world.run(exchanges)
        self._step += 1
        self.nbytes = sum(clock.nbytes for clock in clocks) / len(clocks)
        return sum(clock.seconds for clock in clocks) / len(clocks)


class _ComputeClock:
    """Counts the seconds that one rank computes, callbacks on arrival included."""

    def __init__(self, group: Group) -> None:
        self.seconds = 0.0
        self.nbytes = 0.0
        self._group = group
        self._since = 0.0

    def over(self, exchange: Rounds[Any]) -> Rounds[Any]:
        self._since = time.thread_time()
        result = yield from observe(exchange, before=self._ask, after=self._go_on)
        self.seconds += time.thread_time() - self._since
        return result

    def _ask(self, asked: Request) -> None:
        self.seconds += time.thread_time() - self._since
        if isinstance(asked, Round):
            part = self._group.part(asked.group)
            assert part is not None
            self.nbytes += received_bytes(asked, part)
            if asked.arrived is not None:
                asked.arrived = self._timed(asked.arrived)

    def _go_on(self, asked: Request) -> None:
        self._since = time.thread_time()

    def _timed(self, arrived: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def timed(start: int, stop: int) -> None:
            begin = time.thread_time()
            arrived(start, stop)
            self.seconds += time.thread_time() - begin

        return timed
