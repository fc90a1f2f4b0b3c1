"""Flexible Communication: one ratio and one collective for the whole model, chosen by time and by gain.

**The paper** (Tyagi and Swany 2023, arXiv 2312.02493). AR-Topk averages a selection by a broadcast of one rank's
indices and an allreduce of the values at them; inequalities in latency, bandwidth and size name the fastest of an
allgather, a ring and a tree. The ratio is a problem of three objectives: seconds of compression, seconds of exchange,
and 1 / gain. If the gain or the network changes, each candidate ratio runs for ten steps from a checkpoint, NSGA-II
finds the front, and one of its points runs. The collectives are in `mpicomp.collectives`: star-topk and var-topk.

Here nothing is tried: gains of all ratios come from one spectrum, seconds from the cost model, and all options are
compared, dense among them. docs/papers.md has all that differs. The published search undoes steps of training, so it
is a training loop: ``studies/papers/flexible_search.py``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import bind
from mpicomp.compressors import Dense
from mpicomp.cost import CostModel
from mpicomp.mpi.rounds import Rounds
from mpicomp.mpi.transport import Transport
from mpicomp.policies.measured_policy import MeasuredPolicy
from mpicomp.policies.plan_selector import Ladder, PlanSelector, PlanTable, collectives_for
from mpicomp.policies.policy import BucketOutcome, Plan, Shape, StepReport, UserSettings, feedback_of
from mpicomp.policies.ratio_levels import at_ratio, check_adaptable, check_ratios, default_compressor, lost_share
from mpicomp.policies.surveys import Spectra, SpectrumSurvey, Survey
from mpicomp.registry import register
from mpicomp.setting_checks import check_least, check_range

__all__ = ["Flexible"]

_WEIGHTS = (0.6, 0.4)  # weights of seconds and of 1 / gain
_LEADER_KINDS = ("star-topk", "var-topk")  # collectives in which one rank's indices are those of all
_KINDS = ("allgather", *_LEADER_KINDS)  # collectives that carry a sparsifier
_WINDOW = 5  # steps over which gains are averaged, or as many as there are ranks if that is more
_STRIDE = 8  # a survey reads one group of elements in eight
_MIN_GAIN = 1e-9  # smallest gain that is divided by


@dataclass
class _Run:
    """Steps of the current option, the mean gain of its last ones, and that at the last measurement."""

    steps: int = 0
    gain: float = 0.0
    reference: float | None = None


@dataclass
class _Surveys:
    """Whether this step is surveyed, the step whose survey has not arrived, and steps since the last that has."""

    due: bool = True
    awaited: int | None = None
    age: int = 0


Objectives = NDArray[np.float64]  # a row each, shape (rows, objectives); less is better in every column


@dataclass(frozen=True)
class Option:
    """An option of `Flexible`: a ratio, 1 for dense, and a collective, ``"dense"`` for those of dense messages."""

    ratio: float
    kind: str


@dataclass
class _Table:
    """Ratios, the collective if the user named one, buckets, and for each of them the rows of every option."""

    ratios: list[float]
    pinned: str | None
    shapes: list[Shape] = field(default_factory=list)
    rows: list[dict[Option, NDArray[np.int64]]] = field(default_factory=list)


@dataclass
class _Gains:
    """Gains by spectra, and measured ones."""

    survey: SpectrumSurvey = field(default_factory=lambda: SpectrumSurvey(_STRIDE))
    spectral: NDArray[np.float64] | None = None  # of the ratios
    seen: dict[Option, float] = field(default_factory=dict)  # measured gain of an option over that of the spectrum
    window: int = _WINDOW


@register
@dataclass(eq=False)
class Flexible(MeasuredPolicy):
    """Chooses a ratio, and allgather, star-topk, var-topk or dense, by seconds and by gain.

    It chooses star-topk and var-topk although they leave out elements that the leading rank has not selected: their
    gain counts that. Whether a sum takes a ring or a tree follows from the predicted seconds.

    An option is a ratio with a kind of collective, or dense. Its objectives are 1 / gain and the predicted seconds of
    all buckets, computation and exchange. Of the options on the front the one of the least weighted objective is
    chosen. Each bucket then takes the fastest collective of that kind.

    Gains are measured if the gain of the current option has changed by ``gain_threshold``, and after ``every`` steps;
    the choice is repeated then, and if latency or bandwidth of the network have changed.

    Gains of all ratios come from one survey of one element in eight of large layers. With another rank's indices the
    gain is less, by as much as was measured when that option last ran. Until the first survey arrives, two steps, all
    is dense, or of the largest ratio if the collective is named. Without measurements seconds are those of a network of
    1 Gbit/s.

    Parameters
    ----------
    least, most : float
        Smallest and largest ratio, in (0, 1].
    factor : float
        Quotient of neighboring ratios, above 1.
    gain_threshold : float
        Relative change of the gain at which gains are measured, above 0.
    every : int or None
        Steps between measurements of gains at most; None sets no limit.
    """

    id: ClassVar[str] = "flexible"
    paper: ClassVar[str] = (
        "Flexible Communication, Tyagi and Swany 2023, arXiv 2312.02493; gains of all ratios from one spectrum in "
        "place of ten steps each, two objectives since seconds hold both times, all options in place of NSGA-II, "
        "gain as the squared norm's share over all ranks, dense among the options"
    )

    least: float = 0.001
    most: float = 0.1
    factor: float = 3.0
    gain_threshold: float = 0.1
    every: int | None = 500

    def check(self) -> None:
        check_ratios(self.id, self.least, self.most)
        check_range(self.id, "factor", self.factor, 1, math.inf, above=True)
        check_range(self.id, "gain_threshold", self.gain_threshold, 0, math.inf, above=True)
        if self.every is not None:
            check_least(self.id, "every", self.every)

    def configure(self, settings: UserSettings) -> None:
        self.compressor = settings.compressor or default_compressor()
        check_adaptable(self.id, self.compressor)
        self.feedback = feedback_of(self.compressor, settings.feedback)
        self._table = _Table(candidates(self.least, self.most, self.factor), settings.pinned)
        if settings.pinned is not None:
            bind(self.compressor, settings.pinned)  # raises if it does not fit
        self._selector = PlanSelector(self.id, self.feedback, settings.cost)
        self.options: list[Option] = []
        """The options that can be chosen."""
        self.current: Option | None = None
        """The option that is chosen; None before the first choice."""
        self._gains = _Gains()
        self._run = _Run()
        self._surveys = _Surveys()
        first = "dense" if settings.pinned is None else "the largest ratio"
        self._reason = f"{first}: no gradient statistics yet"

    @property
    def wants_telemetry(self) -> bool:
        # The survey of a step arrives in a later one
        return super().wants_telemetry or self._surveys.awaited is not None

    def survey(self, bucket: int) -> Survey | None:
        return self._gains.survey if self._surveys.due else None

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        group = transport.group
        self._table.shapes = list(shapes)
        self._run, self._surveys, self._gains.spectral = _Run(), _Surveys(), None
        self._gains.window = max(_WINDOW, group.size)
        ladder: Ladder = []
        for ratio in self._table.ratios:
            compressor = at_ratio(self.compressor, ratio)
            names = collectives_for(compressor, group)
            if compressor.message == "sparse" and not compressor.shares_positions:
                names = [name for name in names if name.partition(":")[0] in _KINDS]
            ladder.append((compressor, [self._table.pinned] if self._table.pinned else names))
        ladder.append((Dense(), collectives_for(Dense(), group)))
        yield from self._selector.start([ladder] * len(shapes), shapes, transport)
        self._table.rows = [self._by_option(table) for table in self._selector.tables]
        found = self._table.rows[0] if self._table.rows else {}  # there may be no buckets
        self.options = [option for option in found if self._table.pinned is None or option.kind != "dense"]
        if self.current not in self.options:
            self.current = None

    def refresh(self, transport: Transport) -> Rounds[None]:
        # A changed network needs another choice
        if (yield from self._selector.refresh(transport)):
            self._solve()

    def plan(self, bucket: int) -> Plan:
        first = max(self.options, key=lambda option: option.ratio)
        return self._selector.plan(bucket, self._table.rows[bucket][self.current or first], self._reason)

    def on_step_end(self, step: int, outcomes: Sequence[BucketOutcome]) -> None:
        surveys, run = self._surveys, self._run
        surveys.age += 1
        if surveys.due:
            surveys.due, surveys.awaited = False, step
        energy = sum(outcome.energy for outcome in outcomes)
        if self.current is not None and 0 < energy < math.inf:
            gain = sum(outcome.energy * outcome.gain for outcome in outcomes) / energy
            run.steps += 1
            run.gain += (gain - run.gain) / min(run.steps, self._gains.window)
        if surveys.awaited is None and (surveys.age >= (self.every or math.inf) or self._has_changed()):
            surveys.due = True

    def on_telemetry(self, report: StepReport) -> None:
        self._selector.on_telemetry(report)
        surveys = self._surveys
        if surveys.awaited is None or report.step < surveys.awaited:
            return
        surveys.awaited = None
        if len(report.surveys) < len(self._table.shapes):  # the survey was lost
            surveys.due = True
            return
        spectra = [Spectra(shape.sizes, report.surveys[bucket]) for bucket, shape in enumerate(self._table.shapes)]
        energies = np.array([spectrum.energies.sum() for spectrum in spectra])
        shares = np.array([lost_share(self.compressor, spectrum, self._table.ratios) for spectrum in spectra])
        lost = energies @ shares / energies.sum() if energies.sum() > 0 else shares.mean(axis=0)
        self._gains.spectral, surveys.age = 1 - lost, 0
        self._compare_with_spectrum()
        self._run.reference = self._run.gain if self._run.steps >= self._gains.window else None
        self._solve()

    def state_dict(self) -> dict[str, Any]:
        seen = [[option.ratio, option.kind, share] for option, share in self._gains.seen.items()]
        current = None if self.current is None else [self.current.ratio, self.current.kind]
        return {"current": current, "seen": seen}

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        # The last choice runs until gradients have been surveyed
        super().load_state_dict(state, cost)
        current = state.get("current")
        self.current = None if current is None else Option(float(current[0]), str(current[1]))
        if self.options and self.current not in self.options:
            self.current = None
        seen = state.get("seen", [])
        self._gains.seen = {Option(float(ratio), str(kind)): float(share) for ratio, kind, share in seen}
        self._reason = "as before the restart: no gradient statistics yet"
        self._surveys.due, self._run = True, _Run()

    def objectives(self) -> Objectives:
        """Return seconds and 1 / gain of each option, shape (options, 2), in the order of `options`."""
        assert self._gains.spectral is not None
        seconds, gains = np.zeros(len(self.options)), np.ones(len(self.options))
        for place, option in enumerate(self.options):
            for bucket in range(len(self._table.shapes)):
                seconds[place] += self._selector.seconds(bucket)[self._table.rows[bucket][option]].min()
            if option.kind != "dense":
                spectral = self._gains.spectral[self._table.ratios.index(option.ratio)]
                gains[place] = spectral * self._gains.seen.get(option, 1.0)
        return np.stack((seconds, 1 / np.maximum(gains, _MIN_GAIN)), axis=1)

    def _by_option(self, table: PlanTable) -> dict[Option, NDArray[np.int64]]:
        found: dict[Option, list[int]] = {}
        for row, (level, scheme) in enumerate(zip(table.levels.tolist(), table.schemes, strict=True)):
            option = Option(1.0, "dense")
            if level < len(self._table.ratios):
                option = Option(self._table.ratios[level], scheme.id.partition(":")[0])
            found.setdefault(option, []).append(row)
        return {option: np.array(rows) for option, rows in found.items()}

    def _has_changed(self) -> bool:
        run = self._run
        if run.steps < self._gains.window or self._gains.spectral is None:
            return False
        if run.reference is None:
            run.reference = run.gain
            if self._compare_with_spectrum():
                self._solve()
            return False
        return abs(run.gain - run.reference) >= self.gain_threshold * run.reference

    def _compare_with_spectrum(self) -> bool:
        """Record the measured gain of borrowed indices over that of the spectrum; return whether it has changed."""
        option = self.current
        if option is None or option.kind not in _LEADER_KINDS or self._run.steps < self._gains.window:
            return False
        assert self._gains.spectral is not None
        spectral = max(float(self._gains.spectral[self._table.ratios.index(option.ratio)]), _MIN_GAIN)
        before, now = self._gains.seen.get(option, 1.0), min(max(self._run.gain / spectral, _MIN_GAIN), 1.0)
        self._gains.seen[option] = now
        return abs(now - before) >= self.gain_threshold * before

    def _solve(self) -> None:
        if self._gains.spectral is None:
            return
        objectives = self.objectives()
        place, on_front = pick(objectives, _WEIGHTS)
        option = self.options[place]
        if option != self.current:
            self.current, self._run = option, _Run()
        gain = 1 / objectives[place, 1]
        self._reason = f"ratio {option.ratio:.4g} by {option.kind}, gain {gain:.3f}, weighted of a front of {on_front}"


def candidates(least: float, most: float, factor: float) -> list[float]:
    """Return ratios from the least to the most one, each ``factor`` times the one before but at the lower end."""
    count = max(1, round(math.log(most / least) / math.log(factor))) if most > least else 0
    ratios = [least, *(most / factor**place for place in range(count))]
    return sorted({float(f"{ratio:.4g}") for ratio in ratios})


def pareto_front(objectives: Objectives) -> NDArray[np.int64]:
    """Return the rows that no other one dominates, ascending by the first objective; of equal rows the first."""
    no_worse = (objectives[:, None] <= objectives[None]).all(axis=2)
    better = (objectives[:, None] < objectives[None]).any(axis=2)
    equal_before = np.tril(no_worse & no_worse.T, -1).any(axis=1)
    rows = np.flatnonzero(~((no_worse & better).any(axis=0) | equal_before))
    return rows[np.lexsort(objectives[rows].T[::-1])]


def pick(objectives: Objectives, weights: Sequence[float]) -> tuple[int, int]:
    """Return the row that is chosen from the front, and the rows on the front.

    Objectives are scaled to 0 for the best and 1 for the worst row on the front. It is the row whose worst weighted
    objective is least (achievement scalarizing).
    """
    best = pareto_front(objectives)
    front = objectives[best]
    ideal, nadir = front.min(axis=0), front.max(axis=0)
    scaled = (front - ideal) / np.where(nadir > ideal, nadir - ideal, 1.0)
    scores = (scaled * np.asarray(weights)).max(axis=1)
    return int(best[scores.argmin()]), best.size
