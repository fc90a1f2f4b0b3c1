"""Choose the plan of least predicted time among those that a policy allows, at every step."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import Scheme, bind, variants
from mpicomp.compressors import Compressor, Dense
from mpicomp.cost import (
    Candidates,
    CostModel,
    Network,
    broadcast_flags,
    measure_kernels,
    probe_link,
    sample_views,
    share_model,
)
from mpicomp.cost.network_model import MIN_CHANGE_LOG
from mpicomp.gpu import HOST
from mpicomp.mpi.rounds import Group, Rounds
from mpicomp.mpi.transport import Transport
from mpicomp.policies.policy import Plan, Shape, StepReport

Ladder = list[tuple[Compressor, Sequence[str]]]
"""Settings of a bucket's compressor, ascending by bytes, each with the collectives that may carry it."""

SWITCH_MARGIN = 0.03  # fraction by which other plans have to be better than those that run

_REPEATING = "repeating the last plan to time it"
_UNMEASURED = "seconds cannot be measured, so the first collective that fits"  # one rank, or ranks in lockstep
_EXPLORATIONS = 12, 1 / 64  # plans that may be explored after a start or a change of the network; more for each step
_UNTIMED_STEPS = 2  # first steps of a plan, not timed: buffers are allocated, and compressors find their thresholds
_MAX_SILENT_STEPS = 6  # at least one step of these is compared with its prediction: a change is followed within ten
_LEARNING_INTERVAL_S = 0.1  # seconds between two steps that are learned from, which takes 1 ms: 1 % of that
_MEDIAN_STEPS = 5  # intervals between steps whose median counts
# Limits of a plan's memory besides gradients and residuals: a share of all gradients, or bytes. 48 MB are those of 8
# bits through two-phase in buckets of the default length; of dense plans some need next to nothing, and a ring of four
# ranks a quarter of an array.
_MEMORY_SHARE, _MEMORY_BYTES, _DENSE_BYTES = 0.5, 48 << 20, 8 << 20
_MAX_SLOWNESS_RATIO = 1.5  # of predicted seconds over the least: slower plans are not run to check the prediction


@dataclass
class BucketState:
    """The plan that a bucket runs, its number of steps, and whether its seconds are known."""

    row: int
    steps: int = -1
    known: bool = False
    must_choose: bool = True  # something was learned since the last choice
    request: tuple[Any, ...] = (None, None, None)  # arguments of the last choice
    plan: Plan | None = None


@dataclass
class PlanTable:
    """All plans of a bucket, a row each: every level of its ladder with every collective that carries it."""

    schemes: list[Scheme[Any]]  # by row
    levels: NDArray[np.int64]  # by row
    kept: NDArray[np.float64]  # by level, the elements that it is expected to keep
    numel: int  # of the bucket
    candidates: Candidates | None = None  # the rows' predicted seconds; None if nothing can be measured
    _bound: dict[int, Scheme[Any]] = field(default_factory=dict)

    @property
    def dense(self) -> int:
        """The last level, which is dense in a ladder of several."""
        return self.kept.size - 1

    def rows_of(self, *levels: int) -> NDArray[np.int64]:
        """Return the rows of some levels."""
        return np.flatnonzero(np.isin(self.levels, levels))

    def level(self, compressor: Compressor) -> int:
        """Return the level that keeps about as much as a compressor, of the same kind if there is one."""
        kept = math.log(max(compressor.expected(self.numel), 1))
        distances = np.abs(np.log(self.kept[: self.dense]) - kept)
        kinds = dict(zip(self.levels.tolist(), (scheme.compressor.id for scheme in self.schemes), strict=True))
        same_kind = np.array([kinds[level] == compressor.id for level in range(distances.size)])
        return int(np.where(same_kind | ~same_kind.any(), distances, np.inf).argmin())

    def are_similar(self, first: int, second: int) -> bool:
        """Return whether two rows are the same, or neighboring levels with the same collective."""
        same = self.schemes[first].id == self.schemes[second].id
        return first == second or (same and abs(int(self.levels[first]) - int(self.levels[second])) == 1)

    def scheme(self, row: int, compressor: Compressor | None) -> Scheme[Any]:
        """Return a row's scheme, with another compressor of the same kind if one is passed."""
        scheme = self.schemes[row]
        if compressor is None or scheme.compressor == compressor or scheme.compressor.id != compressor.id:
            return scheme
        if row not in self._bound or self._bound[row].compressor != compressor:
            self._bound[row] = bind(compressor, scheme.id)
        return self._bound[row]


class PlanSelector:
    """Chooses rows of least predicted time, and learns the seconds that they take.

    A row that may be the fastest within its uncertainty is explored now and then: sooner if little is known of it, if
    it has not run for long, and if it can cost little. A row runs for several successive steps, since the first ones
    are not timed. Of short steps some are learned from, ten a second, and the first ones of a new row; between them one
    step of up to six is compared with its prediction, and an outlier requests telemetry of the next step.

    ``cost`` is a cost model or the file that it is in; that of rank 0 counts, and None measures one before the first
    step. With a ``pinned`` collective nothing is measured, and seconds are predicted only if rank 0 has a cost model.
    """

    def __init__(self, name: str, feedback: bool, cost: CostModel | str | None, pinned: bool = False) -> None:
        self.cost: CostModel | None = None  # shared by all ranks
        self.tables: list[PlanTable] = []  # by bucket
        self.measured = False  # whether seconds are predicted and learned
        self._name = name  # for reasons
        self._feedback = feedback
        self._source = cost
        self._pinned = pinned
        self._has_source = cost is not None
        self._states: list[BucketState] = []
        self._unknown: set[int] = set()  # buckets whose plan has run long enough to be timed and was not
        self._nominal: list[NDArray[np.float64]] = []
        self._changed = False
        self._link_before = np.zeros(2)  # `Network.log_link` before a change was suspected
        self._explorations: float = _EXPLORATIONS[0]
        self._refreshed = 0  # the bucket whose corrections were refreshed last
        self._reset_intervals()

    def _reset_intervals(self) -> None:
        self._count, self._interval = 0, 1  # steps, and of how many one wants telemetry
        self._learns_from = 0  # the next report of this step or a later one is learned from
        self._last_learned: tuple[int, float] | None = None  # step, and its start
        self._step_s: deque[float] = deque(maxlen=_MEDIAN_STEPS)

    @property
    def wants_telemetry(self) -> bool:
        """Whether ranks are to share the seconds of this step: of some short steps, and if something is unknown."""
        if not self.measured:
            return False
        assert self.cost is not None
        return self._count % self._interval == 0 or bool(self._unknown) or self.cost.network.change_suspected

    def share_cost(self, transport: Transport) -> Rounds[CostModel | None]:
        """Return the cost model of all ranks, measured if there is none; None if nothing can be measured. As rounds."""
        predicts = transport.group.size > 1 and transport.probes
        if predicts and self._pinned:  # ranks may have been passed different things: rank 0 decides for all
            [predicts] = yield from broadcast_flags([self._has_source], transport)
        if predicts:
            self.cost = yield from share_model(self.cost or self._source, transport)
        return self.cost if predicts else None

    def load_cost(self, cost: CostModel | None) -> None:
        """Use a cost model unless one is shared before; that of rank 0 counts."""
        self._source = cost or self._source

    def start(
        self, ladders: Sequence[Ladder], shapes: Sequence[Shape], transport: Transport, num_optional: int = 0
    ) -> Rounds[None]:
        """Build the tables of new buckets, from the level that keeps least; measure unknown costs. As rounds.

        The first ``num_optional`` levels are left out where all of their plans need much memory.
        """
        group = transport.group
        self.measured = False
        self._unknown.clear()
        total = sum(shape.numel * shape.dtype.itemsize for shape in shapes)
        self.tables = [
            _table(ladder, shape, total, group, num_optional) for ladder, shape in zip(ladders, shapes, strict=True)
        ]
        self._states = [BucketState(0, known=True) for _ in self.tables]
        cost = yield from self.share_cost(transport)
        if cost is None:
            self._nominal = [
                _nominal_seconds(table, shape, group) for table, shape in zip(self.tables, shapes, strict=True)
            ]
            return
        ladder = any(table.kept.size > 2 for table in self.tables)
        # Ranks may have the same bucket on different devices, and need one name for its seconds: rank 0's.
        on_device = yield from broadcast_flags([shape.device is not HOST for shape in shapes], transport)
        for flag in sorted(set(on_device)):
            buckets = [bucket for bucket, other in enumerate(on_device) if other == flag]
            schemes = [scheme for bucket in buckets for scheme in self.tables[bucket].schemes]
            device = shapes[buckets[0]].device
            yield from measure_kernels(cost, schemes, self._feedback, transport, ladder, device, flag)
        for table, shape, flag in zip(self.tables, shapes, on_device, strict=True):
            table.candidates = cost.candidates(table.schemes, shape.numel, shape.dtype, group, ladder, flag)
        self._states = [BucketState(-1) for _ in self.tables]
        self.measured = bool(self.tables)
        self._refreshed = 0
        self._explorations = _EXPLORATIONS[0]
        self._reset_intervals()

    def repeats(self) -> bool:
        """Begin a step in which the last plans run and no seconds are compared; return False if it is not one."""
        if self.measured:
            assert self.cost is not None
            if self._changed or self._unknown or self.cost.network.change_suspected:
                return False
            if (self._count + 1) % self._interval == 0:
                return False
        for state in self._states:
            if state.plan is None or state.must_choose or not state.known:
                return False
        self._count += 1
        for state in self._states:
            state.steps += 1
        return True

    def refresh(self, transport: Transport) -> Rounds[bool] | tuple[()]:
        """Begin a step: measure the links again if they seem to have changed; return whether they have.

        Collective, as rounds, or an empty tuple if there are none.
        """
        self._count += 1
        return self._measure_links(transport) if self._changed else ()

    def _measure_links(self, transport: Transport) -> Rounds[bool]:
        self._changed = False
        assert self.cost is not None
        network = self.cost.network
        yield from probe_link(network, transport)
        changed = bool(np.abs(network.log_link - self._link_before).max() > MIN_CHANGE_LOG)
        self._link_before = network.log_link
        are_plans_wrong = network.resolve_suspicion(changed)
        inflated: set[int] = set()
        for table, state in zip(self.tables, self._states, strict=True):
            if table.candidates is not None:
                if are_plans_wrong:
                    table.candidates.widen(state.row)
                table.candidates.inflate_variance(inflated)
        for state in self._states:
            state.known = state.must_choose = True
        self._unknown.clear()
        self._explorations = _EXPLORATIONS[0]
        return changed

    def row(self, bucket: int) -> int:
        """Return the row of a bucket's last plan."""
        return self._states[bucket].row

    def seconds(self, bucket: int) -> NDArray[np.float64]:
        """Return the predicted seconds of a bucket's rows; those on a network of 1 Gbit/s if nothing is measured."""
        candidates = self.tables[bucket].candidates
        return self._nominal[bucket] if candidates is None else candidates.seconds()

    def plan(
        self, bucket: int, among: NDArray[np.int64], reason: str = "", compressor: Compressor | None = None
    ) -> Plan:
        """Return the plan of a bucket for this step: one of some rows, with another compressor if one is passed."""
        state = self._states[bucket]
        if state.plan is not None and state.known and not state.must_choose:
            # In the steady state policies pass the objects of the step before.
            last_among, last_reason, last_compressor = state.request
            if (
                reason == last_reason
                and (compressor is last_compressor or compressor == last_compressor)
                and (among is last_among or np.array_equal(among, last_among))
            ):
                state.steps += 1
                return state.plan
        table, last = self.tables[bucket], state.row
        choice = "" if reason and among.size == 1 else _REPEATING
        if table.candidates is None:
            state.row, choice = int(among[0]), choice and _UNMEASURED
        elif last < 0 or last not in among:
            state.row = table.candidates.choose(_MAX_SLOWNESS_RATIO, among)[0]
            choice = choice and f"least predicted seconds of {among.size} plans"
        elif state.known and among.size > 1:
            state.row, choice, is_exploration = choose_plan(table.candidates, among, last, self._explorations >= 1)
            self._explorations -= is_exploration
        if table.candidates is not None and last >= 0 and not table.are_similar(last, state.row):
            state.steps, state.known = 0, False
        else:
            state.steps += 1
        prediction = None if table.candidates is None else table.candidates.prediction(state.row)
        is_timed = state.steps >= _UNTIMED_STEPS
        if is_timed and not state.known:
            self._unknown.add(bucket)
        else:
            self._unknown.discard(bucket)
        text = f"{self._name}: {'; '.join(filter(None, (reason, choice)))}"
        state.plan = Plan(table.scheme(state.row, compressor), text, prediction, is_timed, state.row)
        state.request, state.must_choose = (among, reason, compressor), False
        return state.plan

    def on_telemetry(self, report: StepReport) -> bool:
        """Learn from the seconds of a step; return whether it did: most of the short ones are only compared."""
        if not self.measured:
            return False
        assert self.cost is not None
        must_learn = bool(self._unknown) or self.cost.network.change_suspected
        if report.step < self._learns_from and not must_learn:
            self._compare(report)
            return False
        self.cost.network.time_update()
        if not self.cost.network.change_suspected:
            self._link_before = self.cost.network.log_link
        latest = report.latest.tolist()
        for bucket, (table, state, plan) in enumerate(zip(self.tables, self._states, report.plans, strict=True)):
            assert table.candidates is not None
            if plan.settled:
                start, end, kernels_s, _ = latest[bucket]
                self._changed |= table.candidates.observe(plan.row, kernels_s, end - start)
                if state.row == plan.row:
                    state.known = True
                    self._unknown.discard(bucket)
            state.must_choose = True
        for table in self.tables:
            assert table.candidates is not None
            table.candidates.time_update()
        if len(self.tables) > 1:  # buckets of similar length share corrections; one of them is refreshed at a time
            self._refreshed = (self._refreshed + 1) % len(self.tables)
            candidates = self.tables[self._refreshed].candidates
            assert candidates is not None
            candidates.refresh_corrections()
        self._explorations = min(self._explorations + _EXPLORATIONS[1], _EXPLORATIONS[0])
        start = latest[0][0]
        if self._last_learned is not None and report.step > self._last_learned[0]:
            step, last_start = self._last_learned
            self._step_s.append((start - last_start) / (report.step - step))
            steps = math.ceil(_LEARNING_INTERVAL_S / max(statistics.median(self._step_s), 1e-9))
            self._interval, self._learns_from = min(_MAX_SILENT_STEPS, steps), report.step + steps
        self._last_learned = report.step, start
        return True

    def _compare(self, report: StepReport) -> None:
        for table, plan, (start, end, *_) in zip(self.tables, report.plans, report.latest.tolist(), strict=True):
            assert table.candidates is not None
            if plan.settled:
                table.candidates.check_outlier(plan.row, end - start)


def choose_plan(
    candidates: Candidates, among: NDArray[np.int64], last: int, may_explore: bool
) -> tuple[int, str, bool]:
    """Return (plan, reason, is_exploration); the last plan is not explored, since its seconds were just learned."""
    best, hopeful = candidates.choose(_MAX_SLOWNESS_RATIO, among)
    reason = f"least predicted seconds of {among.size} plans"
    if best != last:
        seconds = candidates.seconds()
        if seconds[best] > (1 - SWITCH_MARGIN) * seconds[last]:
            best, reason = last, f"kept, within {SWITCH_MARGIN:.0%} of the {reason}"
    if hopeful in (best, last) or not may_explore:
        return best, reason, False
    age = candidates.age(hopeful)
    known = "never run" if age is None else f"last run {age} steps ago"
    return hopeful, f"exploring a plan that may be the fastest, {known}", True


def collectives_for(compressor: Compressor, group: Group, complete: bool = False) -> list[str]:
    """Return the names of all collectives that carry a compressor, those preferred without measurements first.

    If ``complete``, only those that deliver all that every rank's compressor has selected, if there are any.
    """
    is_flat = group.hosts in (1, group.size)  # hierarchical ones need several hosts, and several ranks on one
    names = [name for name in variants(compressor) if not (is_flat and "hierarchical" in name)]
    delivering = [name for name in names if not bind(compressor, name).may_drop_selected] if complete else []
    return delivering or names


def _table(ladder: Ladder, shape: Shape, total_bytes: int, group: Group, num_optional: int) -> PlanTable:
    schemes: list[Scheme[Any]] = []
    levels: list[int] = []
    for level, (compressor, names) in enumerate(ladder):
        of_level = [bind(compressor, name) for name in names]
        fitting = _fitting(of_level, shape, total_bytes, group, level < num_optional)
        schemes += fitting
        levels += [level] * len(fitting)
    kept = np.array([max(1, compressor.expected(shape.numel)) for compressor, _ in ladder], float)
    return PlanTable(schemes, np.array(levels), kept, shape.numel)


def _fitting(
    schemes: Sequence[Scheme[Any]], shape: Shape, total_bytes: int, group: Group, may_be_empty: bool
) -> list[Scheme[Any]]:
    """Return the schemes that need little memory; where none does, the one that needs least unless it ``may_be_empty``.

    Held arrays are counted as if all buckets ran the same scheme.
    """
    everywhere = []
    for scheme in schemes:
        by_view = [scheme.memory(shape.numel, shape.dtype, view) for view in sample_views(group)]
        scratch, held = (max(column) for column in zip(*by_view, strict=True))
        everywhere.append(scratch + held * total_bytes / max(1, shape.numel * shape.dtype.itemsize))
    dense = schemes[0].compressor == Dense()
    some = _DENSE_BYTES if dense else _MEMORY_BYTES
    limit = max(_MEMORY_SHARE * total_bytes, some, 0 if may_be_empty else min(everywhere))
    return [scheme for scheme, wanted in zip(schemes, everywhere, strict=True) if wanted <= limit]


def _nominal_seconds(table: PlanTable, shape: Shape, group: Group) -> NDArray[np.float64]:
    network = Network(max(2, group.hosts))
    views = sample_views(group)
    seconds = []
    for scheme in table.schemes:
        rounds = [scheme.rounds(shape.numel, shape.dtype, view) for view in views]
        seconds.append(network.seconds(network.coefficients(rounds, views)))
    return np.array(seconds)
