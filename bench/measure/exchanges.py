"""Timed steps of one plan, which all ranks begin at once, with the seconds of each on every rank."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpicomp.bench.measure.feedback import DTYPE, Gradients, Settled, make_bucket
from mpicomp.bench.measure.mean_check import Check, judge, statement
from mpicomp.bench.measure.timings import gather
from numpy.typing import NDArray

from mpicomp.arrays import to_host
from mpicomp.compressors import Compressor, Dense, Sparsifier
from mpicomp.cost import CostModel
from mpicomp.gpu import HOST, StreamOrder
from mpicomp.gpu.routes import RouteTable
from mpicomp.mpi import Transport
from mpicomp.mpi.rounds import Round, dense_ring_bytes
from mpicomp.reducer import Reducer, StepRecord

NAME = "gradient"
MPI = "MPI_Allreduce"  # stands for a collective in the plan of the library's own sum
Adding = Callable[[NDArray[Any], NDArray[Any]], None]
"""Writes the sum of all ranks' arrays, the first one, to the second one."""
SECONDS, COMPRESS, EXCHANGE, DECODE, CHOOSING, SENT, WIRE, START, END = range(9)
"""Places of the numbers that a rank reports of a step; start and end are on the clock that ranks share."""

_FIELDS = 9  # numbers that a rank reports of a step
_STATE = 1  # schema of a reducer's state
_SHORT = 1 << 18  # elements of the array on which a residual reaches its steady state


@dataclass(frozen=True)
class Plan:
    """A plan to be timed: a compressor and the name of a collective, which may be ``"auto"``."""

    compressor: Compressor
    collective: str

    @property
    def name(self) -> str:
        return name_of(self.compressor.id, self.collective)


def name_of(compressor: str, collective: str) -> str:
    """Return a plan's name."""
    return f"{compressor} {collective}"


class Residuals:
    """Residuals in their steady state, of any length, as states that a reducer loads."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._settled: dict[tuple[str, int], Settled] = {}

    def state(self, compressor: Compressor, numel: int) -> dict[str, Any] | None:
        """Return the state of a reducer of one array, None for a compressor that selects nothing."""
        if not compressor.feedback or not isinstance(compressor, Sparsifier):
            return None
        size = min(_SHORT, numel)
        key = (json.dumps(compressor.get_config(), sort_keys=True), size)
        if key not in self._settled:
            self._settled[key] = Settled(compressor, Gradients(size, seed=self._rank))
        bucket = make_bucket(numel, compressor, True)
        self._settled[key].fill(bucket)
        ((_, residual),) = bucket.residuals()
        return {"schema": _STATE, "step": 0, "residuals": {NAME: residual}}


class Runner:
    """A plan with a reducer of its own, whose residual is in its steady state. Collective."""

    def __init__(
        self, plan: Plan, gradients: Gradients, transport: Transport, residuals: Residuals, cost: CostModel | None
    ) -> None:
        self.plan = plan
        self.steps: list[NDArray[np.float64]] = []
        self.checks: list[Check] = []
        self.ran: list[str] = []
        self.predicted: list[float | None] = []
        self.gains: list[float | None] = []
        self.route: str | None = None
        self._gradients = gradients
        self._transport = transport
        self._reducer: Reducer | None = Reducer(
            plan.compressor,
            plan.collective,
            comm=transport,
            bucket_bytes=max(1, gradients.numel * DTYPE.itemsize),
            policy={"cost": cost, "warmup": 0},
        )
        state = residuals.state(plan.compressor, gradients.numel)
        if state is not None:
            self._reducer.load_state_dict(state)
        plain = plan.compressor.entry.clip is None and not plan.compressor.entry.momentum
        # Whether mean and new residual must add up to gradient and residual, to rounding.
        self._lossless = plain and (self._reducer.feedback or plan.compressor.id == "dense")
        self._loaded = None if state is None else state["residuals"][NAME]
        self._last: NDArray[np.float64] | None = None

    def step(self, check: bool = False) -> None:
        """Exchange a fresh gradient, and check the mean if asked to. Collective."""
        reducer = self._reducer
        assert reducer is not None, "it was closed"
        gradient = self._gradients.fresh()
        before = self._residual(reducer) if check else None
        self._loaded = None
        self.catch_up()  # all ranks start together
        start = self._transport.clock()
        mean = reducer.reduce({NAME: gradient})[NAME]
        device, order = self._gradients.device, StreamOrder()
        device.mark([mean], order)
        device.wait_for(order)
        device.wait()
        end = self._transport.clock()
        record = reducer.last_step
        assert record is not None
        self._note(start, end, record)
        bucket, layout = record.buckets[0], reducer.layout
        self.route = None  # only here are the bucket's device and its measured routes known
        if layout.buckets[0].device is not HOST:
            routes = layout.routes or RouteTable.always("staged")
            self.route = routes.faster(bucket.sent_bytes, "allreduce" in bucket.rounds)
        if check:
            self.catch_up()
            after = None if before is None else reducer.residual(NAME)
            statements = gather(statement(to_host(gradient), before, after, to_host(mean)), self._transport)
            self.checks.append(judge(statements, self._lossless))

    def catch_up(self) -> None:
        """Meet the other ranks, and receive the seconds of their last steps. Collective."""
        shared = gather(np.zeros(_FIELDS) if self._last is None else self._last, self._transport)
        if self._last is not None:
            self.steps.append(shared)
        self._last = None

    def close(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
        self._reducer = None

    def slowest(self) -> list[float]:
        """Return the seconds of every step on the rank that took longest."""
        return [float(step[:, SECONDS].max()) for step in self.steps]

    def spans(self) -> list[float]:
        """Return the seconds of every step from when the last rank began to when the last one ended."""
        return [float(step[:, END].max() - step[:, START].max()) for step in self.steps]

    def _note(self, start: float, end: float, record: StepRecord) -> None:
        bucket = record.buckets[0]
        phases = [bucket.phases_s[name] for name in ("compress", "exchange", "decode")]
        if record.agreed:  # the first step: its other work is done once
            start = end - sum(phases)
        numbers = [end - start, *phases, record.choosing_s, bucket.sent_bytes, bucket.wire_bytes, start, end]
        self._last = np.array(numbers, np.float64)
        self.ran.append(name_of(bucket.compressor["id"], bucket.collective))
        self.predicted.append(bucket.predicted_s)
        self.gains.append(bucket.gain)

    def _residual(self, reducer: Reducer) -> NDArray[np.floating] | None:
        if not reducer.feedback or self._loaded is not None:
            return self._loaded
        if reducer.last_step is None:
            return np.zeros(self._gradients.numel, DTYPE)
        return reducer.residual(NAME)


class LibraryRunner(Runner):
    """MPI's own sum of the same gradients: no mean, and nothing of mpicomp's before or after it."""

    def __init__(self, gradients: Gradients, transport: Transport) -> None:
        self.plan = Plan(Dense(), MPI)
        self.steps, self.checks, self.ran = [], [], []
        self.predicted, self.gains, self.route = [], [], None
        self._gradients, self._transport = gradients, transport
        self._sum = np.empty(gradients.numel, DTYPE)
        self._add = add_over_mpi(transport)
        self._last = None

    def step(self, check: bool = False) -> None:
        gradient = self._gradients.fresh()
        self.catch_up()
        start = self._transport.clock()
        self._add(gradient, self._sum)
        end = self._transport.clock()
        sent, wire = 4 * gradient.size, dense_ring_bytes(gradient.size, self._transport.group.size)
        self._last = np.array([end - start, 0.0, end - start, 0.0, 0.0, sent, wire, start, end])
        self.ran.append(self.plan.name)
        if check:
            self.catch_up()

    def close(self) -> None:
        pass


def add_over_mpi(transport: Transport) -> Adding:
    """Return the sum by MPI's Allreduce."""

    def add(array: NDArray[Any], out: NDArray[Any]) -> None:
        transport.perform(Round("allreduce", (array.size,), array.dtype, send=array, recv=out))

    return add


def in_turn(runners: Sequence[Runner]) -> Iterator[Runner]:
    """Yield each once, another one first every time, always in the same cyclic order."""
    turn = len(runners[0].steps) % len(runners)
    yield from [*runners[turn:], *runners[:turn]]
