"""Choose the plan of least predicted time among those that a policy allows, anew at every step."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import Scheme, bind, variants
from mpicomp.compressors import Compressor
from mpicomp.cost import (
    Candidates,
    CostModel,
    Network,
    broadcast_flag,
    broadcast_flags,
    measure_kernels,
    probe_link,
    sample_views,
    share_model,
)
from mpicomp.cost.network_model import MIN_CHANGE_LOG
from mpicomp.device import HOST
from mpicomp.policies.policy import Plan, Shape, StepReport
from mpicomp.rounds import Group, Rounds
from mpicomp.transport.base import Transport

WORTH = 0.03
"""By how much other plans have to be better than those that run."""

_SETTLING = "as in the step before, until it is known what it takes"
_UNMEASURED = "nothing can be measured, the first that fits"  # one rank, or ranks in lockstep
_CURIOUS = 12, 1 / 64  # plans that may be explored after a start or a change of the network, and more for each step
_SETTLED = 2  # steps of a plan that teach nothing: buffers are made, and compressors find their bounds
_SELDOM = 6  # steps of which one at least is compared with its prediction, so that a change is followed within ten
_PAUSE_S = 0.1  # seconds between two steps that are learnt from, which takes less than 1 ms: 1 % of that
_STEPS = 5  # intervals between steps whose median counts
_TOO_SLOW = 3.0  # times the least predicted seconds: slower plans are not run to check the prediction


@dataclass
class _Turn:
    """The plan that a bucket runs, its number of steps, and whether its seconds are known."""

    row: int
    steps: int = -1
    known: bool = False
    fresh: bool = True  # whether a choice is due since something became known
    asked: tuple[Any, ...] = ()
    plan: Plan | None = None


@dataclass
class PlanTable:
    """Every plan that a bucket may run: each level of its ladder with each collective that carries it, a row each.

    Attributes
    ----------
    schemes : list of Scheme
        A row each.
    levels : array of int64, shape (rows,)
        The level of each.
    kept : array of float64, shape (levels,)
        Elements that each level is expected to keep.
    candidates : Candidates or None
        Their predicted seconds; None where nothing can be measured.
    """

    schemes: list[Scheme[Any]]
    levels: NDArray[np.int64]
    kept: NDArray[np.float64]
    numel: int
    candidates: Candidates | None = None
    bound: dict[int, Scheme[Any]] = field(default_factory=dict)

    @property
    def dense(self) -> int:
        """The last level, which is dense where a ladder has several."""
        return self.kept.size - 1

    def of(self, *levels: int) -> NDArray[np.int64]:
        """Return the rows of some levels."""
        return np.flatnonzero(np.isin(self.levels, levels))

    def level(self, compressor: Compressor) -> int:
        """Return the level that keeps about as much as a compressor does, of its kind where some are."""
        kept = math.log(max(compressor.expected(self.numel), 1))
        apart = np.abs(np.log(self.kept[: self.dense]) - kept)
        kinds = dict(zip(self.levels.tolist(), (scheme.compressor.id for scheme in self.schemes), strict=True))
        alike = np.array([kinds[level] == compressor.id for level in range(apart.size)])
        return int(np.where(alike | ~alike.any(), apart, np.inf).argmin())

    def alike(self, first: int, second: int) -> bool:
        """Return whether two rows differ in nothing, or in a neighbouring level alone."""
        same = self.schemes[first].id == self.schemes[second].id
        return first == second or (same and abs(int(self.levels[first]) - int(self.levels[second])) == 1)

    def scheme(self, row: int, compressor: Compressor | None) -> Scheme[Any]:
        """Return a row's scheme, of another compressor of the same kind where one is given."""
        scheme = self.schemes[row]
        if compressor is None or scheme.compressor == compressor or scheme.compressor.id != compressor.id:
            return scheme
        if row not in self.bound or self.bound[row].compressor != compressor:
            self.bound[row] = bind(compressor, scheme.id)
        return self.bound[row]


class PlanSelector:
    """Choose rows of least predicted time, and learn the seconds that they take.

    Predictions come from a cost model that learns from every step. A row that could be the fastest is explored now and
    then: sooner when little is known of it, when it has not run for long, and when it can cost little. Rows that are
    predicted to take three times the least seconds are not explored. A row runs for several steps in turn, since the
    first ones teach nothing: buffers are made, and thresholds are those of another plan. Where steps are so short that
    choosing and learning would be felt, both are done ten times a second, except for new rows; in between one step of
    up to six is compared with its prediction, and where it differs the next one is learnt from.

    Parameters
    ----------
    name : str
        Name of the policy, for reasons.
    feedback : bool
        Whether there is a residual.
    given : CostModel, str or None
        What is known, or the file that it is in; that of rank 0 counts. None: it is measured before the first step.
    pinned : bool
        Whether the collective is named: then nothing is measured, and seconds are predicted only where rank 0 was given
        what is known.
    """

    def __init__(self, name: str, feedback: bool, given: CostModel | str | None, pinned: bool = False) -> None:
        self.cost: CostModel | None = None
        self.tables: list[PlanTable] = []
        self._name = name
        self._feedback = feedback
        self._given = given
        self._pinned = pinned
        self._is_given = given is not None
        self._turns: list[_Turn] = []
        self._guesses: list[NDArray[np.float64]] = []
        self._changed = False
        self._before = np.zeros(2)  # logarithms of the link's latency and seconds a byte, before a change was suspected
        self._curious: float = _CURIOUS[0]
        self._catching_up = 0  # the bucket that has last taken over what others have learnt
        self._wake()

    def _wake(self) -> None:
        self._count, self._every = 0, 1
        self._learns_at = 0  # step from which on the next one that is heard of is learnt from
        self._began: tuple[int, float] | None = None
        self._step_s: deque[float] = deque(maxlen=_STEPS)

    @property
    def measured(self) -> bool:
        """Whether seconds are predicted, and learnt from steps."""
        return bool(self.tables) and self.tables[0].candidates is not None

    @property
    def wants_telemetry(self) -> bool:
        """Whether ranks are to tell the seconds of this step: of short ones some, and those that bring news."""
        return self.measured and (self._count % self._every == 0 or self._has_news())

    def _has_news(self) -> bool:
        assert self.cost is not None
        if self.cost.network.change_suspected:
            return True
        return any(not turn.known and turn.steps >= _SETTLED for turn in self._turns)

    def know(self, transport: Transport) -> Rounds[CostModel | None]:
        """Return what is known of links and operations, measured where it is not; None where nothing can be.

        Collective over all ranks, as rounds.
        """
        predicts = transport.group.size > 1 and transport.probes
        if predicts and self._pinned:  # ranks may have been given different things: rank 0 decides for all
            predicts = yield from broadcast_flag(self._is_given, transport)
        if predicts:
            self.cost = yield from share_model(self.cost or self._given, transport)
        return self.cost if predicts else None

    def start(
        self, ladders: Sequence[Sequence[tuple[Compressor, Sequence[str]]]], shapes: Sequence[Shape],
        transport: Transport,
    ) -> Rounds[None]:  # fmt: skip
        """Take up new buckets; links, operations and kernels are measured where they are not known.

        Collective over all ranks, as rounds.

        Parameters
        ----------
        ladders : sequence of sequences
            For each bucket its levels, from the one that keeps least: a compressor, and the names of collectives
            for it, the preferred one first.
        shapes : sequence of Shape
            The buckets.
        transport : Transport
            Among the ranks.
        """
        group = transport.group
        self.tables = [_table(ladder, shape.numel) for ladder, shape in zip(ladders, shapes, strict=True)]
        self._turns = [_Turn(0, known=True) for _ in self.tables]
        cost = yield from self.know(transport)
        if cost is None:
            self._guesses = [_guess(table, shape, group) for table, shape in zip(self.tables, shapes, strict=True)]
            return
        ladder = any(table.kept.size > 2 for table in self.tables)
        # Ranks may have the same bucket in different places, and all must know its seconds by one name: rank 0's.
        there = yield from broadcast_flags([shape.device is not HOST for shape in shapes], transport)
        for on_device in sorted(set(there)):
            alike = [bucket for bucket, own in enumerate(there) if own == on_device]
            schemes = [scheme for bucket in alike for scheme in self.tables[bucket].schemes]
            device = shapes[alike[0]].device
            yield from measure_kernels(cost, schemes, self._feedback, transport, ladder, device, on_device)
        for table, shape, own in zip(self.tables, shapes, there, strict=True):
            table.candidates = cost.candidates(table.schemes, shape.numel, shape.dtype, group, ladder, own)
        self._turns = [_Turn(-1) for _ in self.tables]
        self._catching_up = 0
        self._curious = _CURIOUS[0]
        self._wake()

    def refresh(self, transport: Transport) -> Rounds[bool]:
        """Measure the links anew where they have changed, and return whether they have. Collective, as rounds."""
        self._count += 1
        if not self._changed:
            return False
        self._changed = False
        assert self.cost is not None
        network = self.cost.network
        yield from probe_link(network, transport)
        another = bool(np.abs(network.log_link - self._before).max() > MIN_CHANGE_LOG)
        network.resolve_suspicion(changed=another)
        already: set[int] = set()
        for table in self.tables:
            if table.candidates is not None:
                table.candidates.inflate_variance(already)
        for turn in self._turns:
            turn.known = turn.fresh = True
        self._curious = _CURIOUS[0]
        return another

    def row(self, bucket: int) -> int:
        """Return the row that a bucket was last planned to run."""
        return self._turns[bucket].row

    def seconds(self, bucket: int) -> NDArray[np.float64]:
        """Return the predicted seconds of a bucket's rows; where nothing is measured, those of a common network."""
        candidates = self.tables[bucket].candidates
        return self._guesses[bucket] if candidates is None else candidates.seconds()

    def plan(
        self, bucket: int, among: NDArray[np.int64], reason: str = "", compressor: Compressor | None = None
    ) -> Plan:
        """Return the plan of a bucket for this step.

        Parameters
        ----------
        bucket : int
            Number of the bucket.
        among : array of int64
            The rows that may be run.
        reason : str
            Why these; empty where there is no more to say than why one of them.
        compressor : Compressor, optional
            What to send in place of a level that keeps about as much.
        """
        table, turn = self.tables[bucket], self._turns[bucket]
        asked = among, reason, compressor
        if turn.plan is not None and turn.known and not turn.fresh and _same(asked, turn.asked):
            turn.steps += 1
            return turn.plan
        before, why = turn.row, "" if reason and among.size == 1 else _SETTLING
        if table.candidates is None:
            turn.row, why = int(among[0]), why and _UNMEASURED
        elif before < 0 or before not in among:
            turn.row = table.candidates.choose(_TOO_SLOW, among)[0]
            why = why and f"least predicted seconds of {among.size} plans"
        elif turn.known and among.size > 1:
            turn.row, why, explores = _choose(table.candidates, among, before, self._curious >= 1)
            self._curious -= explores
        if table.candidates is not None and before >= 0 and not table.alike(before, turn.row):
            turn.steps, turn.known = 0, False
        else:
            turn.steps += 1
        words = ", ".join(filter(None, (reason, why)))
        prediction = None if table.candidates is None else table.candidates.prediction(turn.row)
        settled = turn.steps >= _SETTLED
        turn.plan = Plan(table.scheme(turn.row, compressor), f"{self._name}: {words}", prediction, settled, turn.row)
        turn.asked, turn.fresh = asked, False
        return turn.plan

    def on_telemetry(self, report: StepReport) -> bool:
        """Learn from the seconds of a step, and return whether that was done: most of the short ones need not be."""
        if not self.measured or not self._turns:
            return False
        assert self.cost is not None
        if report.step < self._learns_at and not self._has_news():
            self._compare(report)
            return False
        self.cost.network.time_update()
        if not self.cost.network.change_suspected:
            self._before = self.cost.network.log_link
        latest = report.latest.tolist()
        for bucket, plan in enumerate(report.plans):
            candidates, turn = self.tables[bucket].candidates, self._turns[bucket]
            assert candidates is not None
            if plan.settled:
                start, end, own, _ = latest[bucket]
                self._changed |= candidates.observe(plan.row, own, end - start)
                if turn.row == plan.row:
                    turn.known = True
            turn.fresh = True
        for table in self.tables:
            assert table.candidates is not None
            table.candidates.time_update()
        if len(self.tables) > 1:  # those of like length learn for each other: one catches up at a time
            self._catching_up = (self._catching_up + 1) % len(self.tables)
            catching_up = self.tables[self._catching_up].candidates
            assert catching_up is not None
            catching_up.refresh_corrections()
        self._curious = min(self._curious + _CURIOUS[1], _CURIOUS[0])
        began = latest[0][0]
        if self._began is not None and report.step > self._began[0]:
            self._step_s.append((began - self._began[1]) / (report.step - self._began[0]))
            step_s = max(statistics.median(self._step_s), 1e-9)
            pause = math.ceil(_PAUSE_S / step_s)
            self._every, self._learns_at = min(_SELDOM, pause), report.step + pause
        self._began = report.step, began
        return True

    def _compare(self, told: StepReport) -> None:
        """Compare a step with its prediction; after one that is far from it the next one is learnt from."""
        for table, plan, (start, end, *_) in zip(self.tables, told.plans, told.latest.tolist(), strict=True):
            assert table.candidates is not None
            if plan.settled:
                table.candidates.check_outlier(plan.row, end - start)

    def give(self, cost: CostModel | None) -> None:
        """Take up a cost model, which counts where none is known yet: that of rank 0."""
        self._given = cost or self._given


def _same(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    """Return whether the same rows are asked for, with the same reason and compressor."""
    return first[1:] == second[1:] and (first[0] is second[0] or np.array_equal(first[0], second[0]))


def _table(ladder: Sequence[tuple[Compressor, Sequence[str]]], numel: int) -> PlanTable:
    schemes, levels = [], []
    for level, (compressor, names) in enumerate(ladder):
        schemes += [bind(compressor, name) for name in names]
        levels += [level] * len(names)
    kept = np.array([max(1, compressor.expected(numel)) for compressor, _ in ladder], float)
    return PlanTable(schemes, np.array(levels), kept, numel)


def _guess(table: PlanTable, shape: Shape, group: Group) -> NDArray[np.float64]:
    """Return the seconds of rows on a network of 1 Gbit/s, without their own work."""
    network = Network(max(2, group.hosts))
    views = sample_views(group)
    seconds = []
    for scheme in table.schemes:
        of_ranks = [scheme.rounds(shape.numel, shape.dtype, view) for view in views]
        seconds.append(network.seconds(network.coefficients(of_ranks, views)))
    return np.array(seconds)


def names_for(compressor: Compressor, group: Group, whole: bool = False) -> list[str]:
    """Return all collectives that carry a compressor; those preferred without measurements come first.

    Parameters
    ----------
    compressor : Compressor
        Of what is carried.
    group : Group
        Where a group has one rank, or there is one group, what is built of both is left out.
    whole : bool
        Whether only those are meant that deliver all that every rank's compressor has selected, where there are any.
    """
    flat = group.hosts in (1, group.size)
    names = [name for name in variants(compressor) if not (flat and "hierarchical" in name)]
    delivering = [name for name in names if not bind(compressor, name).may_drop_selected] if whole else []
    return delivering or names


def _choose(candidates: Candidates, among: NDArray[np.int64], before: int, curious: bool) -> tuple[int, str, bool]:
    """Return the row to run, why, and whether that is for the sake of knowing.

    Parameters
    ----------
    candidates : Candidates
        Their seconds.
    among : array of int64
        Among which to choose.
    before : int
        What runs: it has just been learnt from, and is not taken to know more of it.
    curious : bool
        Whether a row may be taken that would be the fastest if all were as fast as they well may be.
    """
    best, hopeful = candidates.choose(_TOO_SLOW, among)
    why = f"least predicted seconds of {among.size} plans"
    if best != before:
        seconds = candidates.seconds()
        if seconds[best] > (1 - WORTH) * seconds[before]:
            best, why = before, f"as before, within {WORTH:.0%} of the {why}"
    if hopeful in (best, before) or not curious:
        return best, why, False
    age = candidates.age(hopeful)
    known = "never run" if age is None else f"last run {age} steps ago"
    return hopeful, f"exploring, {known}, may be faster than what is predicted to be", True
