"""The joint choice: ratio, collective and wire of every bucket, by predicted seconds and convergence penalty."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import bind
from mpicomp.compressors import Compressor, Dense, Quantiser
from mpicomp.cost import CostModel, Network
from mpicomp.cost.formulas import ring
from mpicomp.errors import ConfigurationError, IncompatiblePairError
from mpicomp.mpi.rounds import Group, Rounds
from mpicomp.mpi.transport import Transport
from mpicomp.policies.convergence_penalty import ElementStatistics, ElementSurvey
from mpicomp.policies.measured_policy import MeasuredPolicy
from mpicomp.policies.plan_selector import SWITCH_MARGIN, Ladder, PlanSelector, collectives_for
from mpicomp.policies.plan_tradeoff import MIN_GAIN, PlanTradeoff
from mpicomp.policies.policy import BucketOutcome, Plan, Shape, StepReport, UserSettings, feedback_of
from mpicomp.policies.ratio_levels import at_ratio, check_adaptable, default_compressor, ladder, suggested_compressors
from mpicomp.policies.surveys import Survey
from mpicomp.registry import register
from mpicomp.setting_checks import is_number

_MIN_RATIO = 0.001  # below it indices take more bytes than values
_MAX_RATIO = 0.25  # above it four bits of all elements are fewer
_RATIO_STEP = 2 ** (1 / 2)  # from one ratio to the next: the best one of them is within 5 % of the best of all
_MIN_SEARCH_INTERVAL = 10  # steps between two surveys and the searches that follow, at first
_SEARCH_INTERVAL_FRACTION = 0.1  # of the steps so far, later: statistics change as slowly as training does
_STEPS_AFTER_FALL = 20  # of the signal, without surveys, until it is learned again
_INTERVAL_GROWTH = 2  # factor of the interval after a search that has changed nothing, up to all steps so far
_LR_CHANGE_FACTOR = 2.0  # of the learning rate since the last survey, up or down, from which on another one is due
_READY_SMOOTHING = 0.1  # weight of a step in the moving average of when buckets are ready
_DENSE_BYTES_RATIO = 8  # bytes of dense exchange over those of all elements in four bits
_WAKEUP_S = 3e-3  # seconds that a thread waits for a core on which another one computes: a slice of Linux' scheduler
# Share of backward during which exchanges cost nothing where ranks share cores. Four buckets of `text-gpt` left 0.76 of
# the throughput and one 0.72, where 0.84 would have been all (docs/policies.md).
BUSY_OVERLAP = 0.4


@dataclass
class _Levels:
    """The compressors that may run."""

    wires: list[Compressor]
    quantisers: list[Quantiser]
    dense: list[Dense] = field(default_factory=lambda: [Dense()])
    ladder: NDArray[np.float64] = field(default_factory=lambda: np.array([]))  # ratios of one wire
    ratios: NDArray[np.float64] = field(default_factory=lambda: np.array([]))  # of all levels that have one
    sends_jointly: list[NDArray[np.bool_]] = field(default_factory=list)
    """By bucket and row, whether all ranks send the same elements."""


@dataclass
class _Signals:
    """Statistics of gradients, by bucket."""

    surveys: list[ElementSurvey] = field(default_factory=list)
    statistics: list[ElementStatistics] = field(default_factory=list)
    known: bool = True  # whether all statistics are
    before_jump: dict[int, int] = field(
        default_factory=dict
    )  # where the signal has jumped, the last step surveyed before
    restored: dict[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass
class _Search:
    """The last search for plans."""

    allowed: list[NDArray[np.int64]] = field(default_factory=list)  # by bucket, the rows that may run
    reason: str = "dense: no gradient statistics yet"
    due: bool = False  # whether another one is
    ready: NDArray[np.float64] | None = None  # when buckets are, relative to the last one
    seconds: float = math.nan  # predicted for the plans that were found


@dataclass
class _Schedule:
    """When gradients are surveyed, in steps since the buckets were laid out."""

    step: int = 0
    next_survey: float = 0.0
    interval: float = 0.0  # from one survey to the next
    surveyed_step: int = -1  # of the second one of two surveys in a row
    lr: float | None = None  # the learning rate since which surveys are scheduled


@register
@dataclass(eq=False)
class Auto(MeasuredPolicy):
    """Choose compressor, ratio, collective and wire of every bucket together, so that the model learns fastest.

    Residuals arrive later and in bursts, so training falls behind dense by a share of its steps, the convergence
    penalty (`mpicomp.policies.convergence_penalty`). The plans minimize ``seconds of a step / (1 - penalty)**2`` with a
    penalty of at most ``1 - fidelity``. It is predicted for every plan, whether it runs or not, from the scales of
    elements and the share of signal in their gradients, which ranks survey now and then.

    Candidates are selections at many ratios, all elements in few bits, and dense. Seconds come from the cost model, in
    the order in which buckets become ready. A dynamic program over the penalty (L-GreCo's, with the end of the last
    bucket in place of bytes) finds the best plans.

    Parameters
    ----------
    fidelity : float
        In (0, 1]. Training may fall behind by ``1 - fidelity`` of its steps; 1 is dense. Its cost is in
        docs/policies.md.
    """

    id: ClassVar[str] = "auto"
    paper: ClassVar[str] = (
        "none; L-GreCo's dynamic program with time in place of bytes, GraVAC's moving gain, Flexible Communication's "
        "collectives"
    )
    resumes: ClassVar[bool] = False

    fidelity: float = 0.7

    def check(self) -> None:
        if not is_number(self.fidelity) or not 0 < self.fidelity <= 1:
            raise ConfigurationError(f"auto: fidelity must be in (0, 1], got {self.fidelity!r}")

    def configure(self, settings: UserSettings) -> None:
        self._pinned = settings.pinned
        self.compressor = settings.compressor or default_compressor()
        self._normalises = settings.normalises
        wires, quantisers = suggested_compressors(settings.compressor, self._normalises)
        self._levels = levels = _Levels(list(filter(self._fits, wires)), list(filter(self._fits, quantisers)))
        compresses = bool(levels.wires or levels.quantisers)
        if not compresses:
            assert self._pinned is not None
            bind(Dense() if settings.compressor is None else self.compressor, self._pinned)  # raises if it does not fit
        is_dense = not compresses or self.compressor.message == "dense" or self.fidelity == 1
        if settings.feedback is False and not is_dense:
            if settings.compressor is not None:
                raise ConfigurationError(
                    "auto: lets gradients be late, which needs error feedback to keep them; leave feedback out, or use "
                    "policy='static'"
                )
            is_dense = True
        if not is_dense:
            check_adaptable("auto", self.compressor)
        self.feedback = feedback_of(self.compressor, settings.feedback)
        self._compresses = not is_dense
        self._chooses = False  # whether there are plans that are not dense: not on one rank
        self._selector = PlanSelector("auto", self.feedback, settings.cost)
        self._shapes: list[Shape] = []
        self._signals, self._search = _Signals(), _Search()
        self._last_step = -1
        self._age = 0  # exchanges
        self._reset_surveys()

    def _reset_surveys(self) -> None:
        self._schedule, self._search.seconds = _Schedule(), math.nan

    def survey(self, bucket: int) -> Survey | None:
        return self._signals.surveys[bucket] if self._surveys_now() else None

    def _surveys_now(self) -> bool:
        # Until statistics are known, and then in two steps in a row now and then
        return self._chooses and self._schedule.step >= self._schedule.next_survey

    def bucket_limit(self, nbytes: int, transport: Transport) -> Rounds[int | None]:
        cost = yield from self._selector.share_cost(transport)
        size, overlap = transport.group.size, overlap_of(transport)
        return None if cost is None else bucket_length(cost.network, size, nbytes, overlap)

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        self._signals.restored |= self._statistics_by_name()
        self._shapes = list(shapes)
        self._restore()
        self._reset_surveys()
        self._search.ready = None
        self.step_times.clear()
        self._ranks, self._overlap = transport.group.size, overlap_of(transport)
        self._chooses = self._compresses and self._ranks > 1
        if self._chooses:
            self._levels.ladder = np.array(ladder(_MIN_RATIO, _MAX_RATIO, _RATIO_STEP))
            self._levels.ratios = np.tile(self._levels.ladder, len(self._levels.wires))
            is_narrow = any(getattr(compressor, "wire", None) == "bf16" for compressor in self._levels.wires)
            self._levels.dense = [Dense(wire="bf16"), Dense()] if is_narrow else [Dense()]
        levels = self._ladder_of(transport.group)  # the same for all buckets
        yield from self._selector.start([levels] * len(shapes), self._shapes, transport, len(levels) - 1)
        self._levels.sends_jointly = [
            np.array([scheme.may_drop_selected for scheme in table.schemes]) for table in self._selector.tables
        ]
        self._allow_dense()

    def repeats(self) -> bool:
        return not (self._search.due or self._surveys_now()) and self._selector.repeats()

    def refresh(self, transport: Transport) -> Rounds[None] | tuple[()]:
        # Search for better plans after surveys, and at once after a change of the network
        rounds = self._selector.refresh(transport)
        return self._refresh(rounds) if rounds or self._search.due else ()

    def _refresh(self, rounds: Rounds[bool] | tuple[()]) -> Rounds[None]:
        changed = yield from rounds
        if not changed and not self._search.due:
            return
        self._search.due = False
        before = self._search.allowed
        self._search_plans()
        is_new = changed or not all(map(np.array_equal, before, self._search.allowed))
        if is_new and self._signals.known:  # else surveys are under way, or wait after a fall
            scheduled = self._schedule.next_survey if self._schedule.next_survey > self._schedule.step else math.inf
            self._schedule_next_search(0)
            self._schedule.next_survey = min(self._schedule.next_survey, scheduled)

    def plan(self, bucket: int) -> Plan:
        return self._selector.plan(bucket, self._search.allowed[bucket], self._search.reason)

    def _schedule_next_search(self, interval: float) -> None:
        least = max(_MIN_SEARCH_INTERVAL, _SEARCH_INTERVAL_FRACTION * self._age, interval)
        self._schedule.interval = min(least, max(_MIN_SEARCH_INTERVAL, self._age))
        self._schedule.next_survey = self._schedule.step + self._schedule.interval

    def on_step_end(self, step: int, outcomes: Sequence[BucketOutcome]) -> None:
        self._last_step = step
        if self._schedule.step > self._schedule.next_survey and self._signals.known:  # the second survey in a row
            self._schedule.surveyed_step = step
            self._schedule_next_search(_INTERVAL_GROWTH * self._schedule.interval)
        self._age += 1
        self._schedule.step += 1

    def on_telemetry(self, report: StepReport) -> None:
        # A step that was undone reports, too
        if self._learn(report):
            relative = report.latest[:, 3] - report.latest[-1, 3]
            before = relative if self._search.ready is None else self._search.ready
            self._search.ready = before + _READY_SMOOTHING * (relative - before)
            seconds = [self._selector.seconds(bucket)[rows].min() for bucket, rows in enumerate(self._search.allowed)]
            predicted_s = sum(map(float, seconds))
            if math.isnan(self._search.seconds):
                self._search.seconds = predicted_s
            margin_s = MIN_GAIN * (self._search.seconds + self.step_times.compute_s)
            self._search.due |= abs(predicted_s - self._search.seconds) > margin_s
        if report.lr and not 1 / _LR_CHANGE_FACTOR < report.lr / (self._schedule.lr or report.lr) < _LR_CHANGE_FACTOR:
            self._schedule.interval, self._schedule.next_survey, self._schedule.lr = 0.0, self._schedule.step, None
        self._schedule.lr = self._schedule.lr or report.lr
        if report.surveys:
            for bucket, surveys in report.surveys.items():
                self._observe_survey(bucket, surveys, report.step)
            signals = self._signals
            was_known, signals.known = signals.known, all(statistics.known for statistics in signals.statistics)
            self._search.due |= signals.known and (not was_known or report.step == self._schedule.surveyed_step)

    def _observe_survey(self, bucket: int, surveys: NDArray[np.float32], step: int) -> None:
        """Learn from a survey; start over after a jump of the signal, which means would follow in dozens of surveys."""
        if step <= self._signals.before_jump.get(bucket, -1):
            return
        jump = self._signals.statistics[bucket].jump(surveys)
        if jump:
            self._signals.before_jump[bucket] = self._last_step
            self._signals.surveys[bucket], self._signals.statistics[bucket] = self._new_survey(self._shapes[bucket])
            # After a fall it often rises again, and plans that would suit little signal cost more than they save.
            self._schedule.next_survey = self._schedule.step + (_STEPS_AFTER_FALL if jump < 0 else 0)
        else:
            self._signals.statistics[bucket].observe(surveys)

    def state_dict(self) -> dict[str, Any]:
        return {"age": self._age, "elements": self._statistics_by_name()}

    def _statistics_by_name(self) -> dict[str, Mapping[str, Any]]:
        pairs = zip(self._shapes, self._signals.statistics, strict=True)
        return {shape.names[0]: statistics.state_dict() for shape, statistics in pairs}

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        self._age = int(state.get("age", 0))
        self._search.due = True
        self._allow_dense()
        self._signals.restored = {str(name): statistics for name, statistics in state.get("elements", {}).items()}
        self._restore()
        self._selector.load_cost(cost)

    def _restore(self) -> None:
        pairs = [self._new_survey(shape) for shape in self._shapes]
        self._signals.surveys = [survey for survey, _ in pairs]
        self._signals.statistics = [statistics for _, statistics in pairs]
        self._signals.before_jump.clear()
        for shape, statistics in zip(self._shapes, self._signals.statistics, strict=True):
            if shape.names[0] in self._signals.restored:
                statistics.load_state_dict(self._signals.restored.pop(shape.names[0]))
        self._signals.known = all(statistics.known for statistics in self._signals.statistics)

    def _new_survey(self, shape: Shape) -> tuple[ElementSurvey, ElementStatistics]:
        statistics = ElementStatistics(shape.numel, len(self._levels.quantisers), self._normalises)
        return ElementSurvey(shape.sizes, self._levels.quantisers), statistics

    def _fits(self, compressor: Compressor) -> bool:
        if self._pinned is not None:
            try:
                bind(compressor, self._pinned)
            except IncompatiblePairError:
                return False
        return True

    def _ladder_of(self, group: Group) -> Ladder:
        def names(compressor: Compressor, complete: bool = False) -> list[str]:
            return [self._pinned] if self._pinned else collectives_for(compressor, group, complete)

        levels: Ladder = []
        for wire, ratio in itertools.product(self._levels.wires, self._levels.ladder.tolist()):
            # Further wires are for fast networks, where kernel seconds matter.
            selection = at_ratio(wire, ratio)
            levels.append((selection, names(selection, wire is not self._levels.wires[0])))
        if self._chooses:
            levels += [(quantiser, names(quantiser)) for quantiser in self._levels.quantisers]
        for dense in self._levels.dense:
            levels.append((dense, names(dense) if self._fits(dense) else collectives_for(dense, group)))
        return levels

    def _dense_rows(self, bucket: int) -> NDArray[np.int64]:
        levels = self._selector.tables[bucket].levels
        return np.flatnonzero(levels > levels[-1] - len(self._levels.dense))

    def _allow_dense(self) -> None:
        self._search.allowed = [self._dense_rows(bucket) for bucket in range(len(self._shapes))]

    def _search_plans(self) -> None:
        self._search.seconds = math.nan
        signals = self._signals
        if not self._chooses or not signals.known or all(statistics.is_zero for statistics in signals.statistics):
            if signals.known:  # else plans stay until the signal is known again after a jump
                self._allow_dense()
            return
        buckets = range(len(self._shapes))
        total = sum(statistics.importance for statistics in signals.statistics)
        tradeoff = PlanTradeoff(
            penalties=[self._penalties(bucket, self._age) for bucket in buckets],
            seconds=[self._selector.seconds(bucket) for bucket in buckets],
            weights=[statistics.importance / total for statistics in signals.statistics],
            ready=[0.0] * len(buckets) if self._search.ready is None else (self._overlap * self._search.ready).tolist(),
            compute_s=self.step_times.compute_s,
            limit=1 - self.fidelity,
        )
        selecting = [table.levels < self._levels.ratios.size for table in self._selector.tables]
        rows = self._best_rows(tradeoff, selecting)
        self._search.allowed = [
            np.flatnonzero((penalties <= penalties[row] * (1 + 1e-9)) & (selects <= selects[row]))
            for penalties, selects, row in zip(tradeoff.penalties, selecting, rows, strict=True)
        ]
        pairs = zip(signals.statistics, tradeoff.weights, strict=True)
        signal = sum(statistics.signal * weight for statistics, weight in pairs)
        self._search.reason = (
            f"convergence penalty {tradeoff.penalty(rows):.2g} of at most {tradeoff.limit:.2g}, "
            f"signal is {signal:.2g} of the energy"
        )

    def _best_rows(self, tradeoff: PlanTradeoff, selecting: Sequence[NDArray[np.bool_]]) -> list[int]:
        buckets = range(len(self._shapes))
        dense_rows = (self._dense_rows(bucket) for bucket in buckets)
        dense = [int(rows[self._selector.seconds(bucket)[rows].argmin()]) for bucket, rows in enumerate(dense_rows)]
        best, last = tradeoff.best_over(dense, selecting), [self._selector.row(bucket) for bucket in buckets]
        is_near = tradeoff.cost(last) <= (1 + SWITCH_MARGIN) * tradeoff.cost(best)
        last_selects, best_selects = (
            any(selects[row] for selects, row in zip(selecting, rows, strict=True)) for rows in (last, best)
        )
        is_safe = best_selects or not last_selects  # as `best`, of which selections have to be much better
        return last if is_near and is_safe and tradeoff.allows(last) and tradeoff.pays(last, dense) else best

    def _penalties(self, bucket: int, age: float) -> NDArray[np.float64]:
        table, statistics, ranks = self._selector.tables[bucket], self._signals.statistics[bucket], self._ranks
        of_levels = np.zeros((2, table.kept.size))  # of ranks that select separately, and jointly
        count = self._levels.ratios.size
        if count:
            both = statistics.selection_penalties(self._levels.ladder, ranks, age, self.compressor.by_magnitude)
            of_levels[:, :count] = np.tile(both, len(self._levels.wires))
        for index in range(len(self._levels.quantisers)):
            of_levels[:, count + index] = statistics.quantiser_penalty(index, ranks, age)
        separate, joint = of_levels[:, table.levels]
        penalties: NDArray[np.float64] = np.where(self._levels.sends_jointly[bucket], joint, separate)
        return penalties


def overlap_of(transport: Transport) -> float:
    """Return the share of backward during which exchanges cost nothing."""
    return 1.0 if transport.group.own_cores else BUSY_OVERLAP


def bucket_length(network: Network, ranks: int, nbytes: int, overlap: float) -> int:
    """Return the bytes of a bucket with which the time that is left after backward is least.

    Of k buckets, backward hides all but the last one's share 1/k of the time T on the links, or ``overlap`` of that,
    and each adds a constant time t: ``overlap T / k + k t`` is least for ``k = sqrt(overlap T / t)``. T is that of four
    bits an element, which is about that of any plan that leaves time to hide.
    """
    total_s = overlap * ring(ranks, nbytes / _DENSE_BYTES_RATIO).seconds(0.0, network.seconds_per_byte)
    bucket_s = _WAKEUP_S + ring(ranks, 0).seconds(network.latency, 0.0)
    return math.ceil(nbytes / max(1, round(math.sqrt(total_s / bucket_s))))
