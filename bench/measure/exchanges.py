"""Timed steps of one plan, which all ranks begin at once, with the seconds of each on every rank."""

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from mpicomp.bench.measure.feedback import DTYPE, Gradients, Settled, make_bucket
from mpicomp.bench.measure.mean_check import Check, judge, statement
from mpicomp.bench.measure.timings import gather
from numpy.typing import NDArray

from mpicomp.arrays import to_host
from mpicomp.compressors import Compressor, Sparsifier
from mpicomp.cost import CostModel
from mpicomp.gpu import HOST, StreamOrder
from mpicomp.gpu.routes import RouteTable
from mpicomp.mpi import Transport
from mpicomp.mpi.rounds import Round, dense_ring_bytes
from mpicomp.reducer import Reducer

NAME = "gradient"
MPI = "MPI_Allreduce"  # stands for a collective in the plan of the library's own sum
SECONDS, COMPRESS, EXCHANGE, DECODE, CHOOSING, SENT, WIRE, START, END = range(9)
"""Places of the numbers that a rank reports of a step; start and end are on the clock that ranks share."""

_FIELDS = 9  # numbers that a rank reports of a step
_STATE = 1  # schema of a reducer's state
_SHORT = 1 << 18  # elements of the array on which a residual reaches its steady state


@dataclass(frozen=True)
class Plan:
    """A plan to be timed: a compressor and the name of a collective, which may be ``"auto"`` or `MPI`."""

    compressor: Compressor
    collective: str

    @property
    def name(self) -> str:
        return f"{self.compressor.id} {self.collective}"


class StepPlan(NamedTuple):
    """The plan of a step, its predicted seconds, and its gain."""

    plan: str
    predicted_s: float | None
    gain: float | None


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
    """A plan with a reducer of its own, whose residual is in its steady state; or the library's sum. Collective."""

    def __init__(
        self, plan: Plan, gradients: Gradients, transport: Transport, residuals: Residuals, cost: CostModel | None
    ) -> None:
        self.plan = plan
        self.steps: list[NDArray[np.float64]] = []  # ranks x fields
        self.ran: list[StepPlan] = []
        self.checks: list[Check] = []
        self.route: str | None = None
        self._gradients = gradients
        self._transport = transport
        self._last: NDArray[np.float64] | None = None
        self._reducer: Reducer | None = None
        if plan.collective == MPI:
            self._sum = np.empty(gradients.numel, DTYPE)
            return
        self._reducer = Reducer(
            plan.compressor,
            plan.collective,
            comm=transport,
            bucket_bytes=max(1, gradients.numel * DTYPE.itemsize),
            policy={"cost": cost, "warmup": 0},
        )
        state = residuals.state(plan.compressor, gradients.numel)
        if state is not None:
            self._reducer.load_state_dict(state)
        self._loaded = None if state is None else state["residuals"][NAME]
        plain = plan.compressor.entry.clip is None and not plan.compressor.entry.momentum
        # Whether mean and new residual must add up to gradient and residual, to rounding.
        self._lossless = plain and (self._reducer.feedback or plan.compressor.id == "dense")

    def step(self, check: bool = False) -> None:
        """Exchange a fresh gradient, and check the mean if asked to. Collective."""
        gradient = self._gradients.fresh()
        if self._reducer is None:
            self._add(gradient)
        else:
            before = self._residual(self._reducer) if check else None
            mean = self._reduce(self._reducer, gradient)
        if not check:
            return
        self.catch_up()
        if self._reducer is not None:
            after = None if before is None else self._reducer.residual(NAME)
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

    def slowest(self) -> list[float]:
        """Return the seconds of every step on the rank that took longest."""
        return [float(step[:, SECONDS].max()) for step in self.steps]

    def _add(self, gradient: NDArray[Any]) -> None:
        self.catch_up()
        start = self._transport.clock()
        self._transport.perform(Round("allreduce", (gradient.size,), gradient.dtype, send=gradient, recv=self._sum))
        end = self._transport.clock()
        sent, wire = 4 * gradient.size, dense_ring_bytes(gradient.size, self._transport.group.size)
        self._last = np.array([end - start, 0.0, end - start, 0.0, 0.0, sent, wire, start, end])
        self.ran.append(StepPlan(self.plan.name, None, None))

    def _reduce(self, reducer: Reducer, gradient: Any) -> Any:
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
        bucket = record.buckets[0]
        phases = [bucket.phases_s[name] for name in ("compress", "exchange", "decode")]
        if record.agreed:  # the first step: its other work is done once
            start = end - sum(phases)
        numbers = [end - start, *phases, record.choosing_s, bucket.sent_bytes, bucket.wire_bytes, start, end]
        self._last = np.array(numbers, np.float64)
        self.ran.append(StepPlan(f"{bucket.compressor['id']} {bucket.collective}", bucket.predicted_s, bucket.gain))
        layout = reducer.layout  # known only here, with the bucket's device and its measured routes
        if layout.buckets[0].device is not HOST:
            routes = layout.routes or RouteTable.always("staged")
            self.route = routes.faster(bucket.sent_bytes, "allreduce" in bucket.rounds)
        return mean

    def _residual(self, reducer: Reducer) -> NDArray[np.floating] | None:
        if not reducer.feedback or self._loaded is not None:
            return self._loaded
        if reducer.last_step is None:
            return np.zeros(self._gradients.numel, DTYPE)
        return reducer.residual(NAME)
