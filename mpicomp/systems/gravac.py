"""GraVAC: the ratio that sends most of the gradient per second, found while training.

**The paper** (Tyagi and Swany 2023, arXiv 2305.12201). Training has a candidate ratio and a floor, which starts at the
largest ratio. A step is sent at the candidate if its gain is at least epsilon, else at the floor if the gain there is,
else dense. Every window of steps the next lower ratio becomes the candidate, and

- where the gain at the candidate is within omega of that at the floor, the candidate becomes the floor;
- where the two highest throughputs, gain over seconds of a step, are within omega of each other, the higher one of
  their ratios becomes the candidate and the search ends: from then on epsilon alone decides.

The gain comes from two compressions on each rank: of the gradient at the floor, and of that selection at the candidate.
Here gains of all candidates come from one spectrum in one step of four, and a throughput is the median of a window.
docs/papers.md has all that differs, also with `GraVAC.as_published`.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors import Compressor, Context, Sparsifier
from mpicomp.compressors.accumulated import TRAILER, Accumulated, Piece
from mpicomp.compressors.base_compressor import num_kept
from mpicomp.cost import CostModel
from mpicomp.gpu import Device, current_device, to_python
from mpicomp.mpi.rounds import Rounds
from mpicomp.mpi.transport import Transport
from mpicomp.policies.measured_policy import Adaptive
from mpicomp.policies.policy import BucketOutcome, Shape, StepReport, UserSettings
from mpicomp.policies.ratio_levels import at_ratio, check_adaptable, check_ratios, lost_share
from mpicomp.policies.surveys import Spectra, SpectrumSurvey, Survey
from mpicomp.registry import register
from mpicomp.setting_checks import check_choice, check_flag, check_least, check_range
from mpicomp.workspace import Workspace

_STRIDE = 16  # a survey reads one group of elements in 16
_MIN_STEPS = 3  # at a ratio: of fewer, an interrupted one could be the median


class LevelsSurvey:
    """Energies of a bucket, of its selection at the floor, and of the candidate's selection from that."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self.ratios = 1.0, 1.0  # floor and candidate
        self._workspaces: dict[tuple[Device, int], Workspace] = {}

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        floor, candidate = self.ratios
        first = self._selected(accumulated, floor, step, 0)
        most = num_kept(candidate, accumulated.size)
        second = first if first.size <= most else self._selected(first, most / first.size, step, 1)
        with np.errstate(over="ignore"):
            return np.array(to_python(*(kernels.energy(values) for values in (accumulated, first, second))), np.float32)

    def _selected(self, array: NDArray[np.floating], ratio: float, step: int, level: int) -> NDArray[np.floating]:
        compressor = at_ratio(self._compressor, ratio)
        workspace = self._workspaces.setdefault((current_device(), level), Workspace(current_device()))
        context = Context(step=step, bucket=level, workspace=workspace)  # estimators start afresh
        assert isinstance(compressor, Sparsifier)
        buffer = workspace.array("copy", array.size + TRAILER, array.dtype)
        return compressor.select(Accumulated(buffer, None, [Piece(0, array)]), context).values


class _Choice(NamedTuple):
    level: int | None  # that was sent; None is dense
    floor: int
    candidate: int


class _TimedStep(NamedTuple):
    step: int
    began: float
    level: int
    gain: float


@dataclass
class _Search:
    """State of the search, for a checkpoint; floor and candidate are levels, that is places in ``ratios``."""

    ratios: list[float]
    floor: int
    candidate: int
    throughputs: list[deque[float]]  # of each level, in the last window
    ended: bool = False
    steps: int = 0  # with gains
    gains: NDArray[np.float64] | None = None  # of all levels; NaN where unknown


@dataclass
class _Progress:
    """Reports that were received, and those that are awaited."""

    unsurveyed: int = 0  # steps since the last survey
    surveyed: int = -1  # the last step whose survey has arrived
    choices: dict[int, _Choice] = field(
        default_factory=dict
    )  # of steps that were not undone, until their report arrives
    last: _TimedStep | None = None  # whose end is not known yet


@register
@dataclass(eq=False)
class GraVAC(Adaptive):
    """One ratio for the whole model, lowered while that pays and raised where too little of the gradient would be sent.

    Candidates are fractions of ``most``, down to ``least``: with ``"exponential"`` 1/2, 1/4, 1/16, 1/256 ..., with
    ``"geometric"`` 1/2, 1/4, 1/8, 1/16 ... Gains are those of the accumulated gradients of all ranks, averaged over
    steps; until there are gains, steps are dense. Without seconds (one rank, or ranks of one process without a
    simulated network) the search continues down to ``least``.

    Parameters
    ----------
    least, most : float
        Ratios in (0, 1]: 1 / theta_max and 1 / theta_min of the paper.
    scaling : {"exponential", "geometric"}
        Rule by which ratios are lowered.
    window : int
        Steps for which a candidate is tried.
    omega : float
        Relative difference, in [0, 1], below which gains, or throughputs, are equal.
    epsilon : float
        Least gain, in (0, 1].
    smoothing : float or None
        Share of a step in the average of gains, in (0, 1]; None is a hundredth for every rank, and 1 at most.
    every : int
        Steps from one measurement of gains to the next, which stands for all of them; 1 is the paper's.
    published : bool
        Set by `as_published`: gains from two compressions, throughputs of one step, a bucket for each array, never
        dense for its speed.
    """

    id: ClassVar[str] = "gravac"
    paper: ClassVar[str] = (
        "GraVAC, Tyagi and Swany 2023, arXiv 2305.12201; gains of all candidates from spectra, now and then and late; "
        "medians of throughputs in place of the last one; the floor is raised to the candidate that was tried"
    )

    least: float = 0.001
    most: float = 0.1
    scaling: str = "exponential"
    window: int = 20
    omega: float = 0.01
    epsilon: float = 0.7
    smoothing: float | None = None
    every: int = 4
    published: bool = field(default=False, kw_only=True)

    @classmethod
    def as_published(cls, **settings: Any) -> Self:
        """Return the paper's GraVAC, but for ``settings``."""
        return cls.from_config({"published": True, "window": 500, "every": 1} | settings)

    def check(self) -> None:
        check_flag(self.id, "published", self.published)
        check_ratios(self.id, self.least, self.most)
        check_choice(self.id, "scaling", self.scaling, ("exponential", "geometric"))
        check_least(self.id, "window", self.window)
        check_least(self.id, "every", self.every)
        check_range(self.id, "omega", self.omega, 0, 1)
        check_range(self.id, "epsilon", self.epsilon, 0, 1, above=True)
        check_range(self.id, "smoothing", 1 if self.smoothing is None else self.smoothing, 0, 1, above=True)

    def check_compressor(self) -> None:
        check_adaptable(self.id, self.compressor)

    def configure(self, settings: UserSettings) -> None:
        super().configure(settings)
        self.bucket_bytes = 1 if self.published else None  # as published each array is a bucket
        self.may_be_dense = not self.published
        ratios, exponent = [self.most], 1
        while ratios[-1] > self.least:
            ratios.append(max(self.most / 2**exponent, self.least))
            exponent = 2 * exponent if self.scaling == "exponential" else exponent + 1
        timings = 1 if self.published else self.window  # of which the median is a throughput
        times = [deque[float](maxlen=timings) for _ in ratios]
        self._search = _Search(ratios, 0, min(1, len(ratios) - 1), times)
        self._compressors = [at_ratio(self.compressor, ratio) for ratio in ratios]
        self._timed = False
        self._share = 1.0  # of a step in the average of gains
        self._survey = LevelsSurvey(self.compressor) if self.published else SpectrumSurvey(_STRIDE)
        self._progress = _Progress()
        first = f"floor {self.most:.4g}" if self.published else "dense"
        # The level of the next step, None for dense, and the reason
        self._decision: tuple[int | None, str] = 0 if self.published else None, f"{first}: no gradient statistics yet"

    @property
    def wants_telemetry(self) -> bool:
        # Steps are counted and timed until the search has ended
        return self._selector.wants_telemetry or not self._search.ended

    def survey(self, bucket: int) -> Survey | None:
        # At every step until there are gains, then every few steps
        search = self._search
        if search.gains is not None and self._progress.unsurveyed + 1 < self.every:
            return None
        if isinstance(self._survey, LevelsSurvey):
            self._survey.ratios = search.ratios[search.floor], search.ratios[search.candidate]
        return self._survey

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        # The search continues: it is about the whole model
        group = transport.group
        self._timed = transport.probes and group.size > 1
        self._share = min(1.0, group.size / 100) if self.smoothing is None else self.smoothing
        self._progress.last = None
        yield from super().start(shapes, transport)

    def levels(self) -> list[Compressor]:
        return self._compressors[::-1]

    def choose(self, bucket: int) -> tuple[Compressor | None, str]:
        level, reason = self._decision
        return None if level is None else self._compressors[level], reason

    def on_step_end(self, step: int, outcomes: Sequence[BucketOutcome]) -> None:
        self._progress.choices[step] = _Choice(self._decision[0], self._search.floor, self._search.candidate)
        self._progress.unsurveyed = 0 if self.survey(0) is not None else self._progress.unsurveyed + 1

    def on_telemetry(self, report: StepReport) -> None:
        super().on_telemetry(report)
        search, began = self._search, float(report.latest[0, 0])
        last, self._progress.last = self._progress.last, None
        if last is not None and report.step == last.step + 1 and began > last.began:
            search.throughputs[last.level].append(last.gain / (began - last.began))
        choice = self._progress.choices.get(report.step)
        self._progress.choices = {step: past for step, past in self._progress.choices.items() if step > report.step}
        if choice is None:
            return
        self._update_gains(report, choice)
        if search.gains is None:
            return
        if choice.level is not None and self._timed:
            self._progress.last = _TimedStep(report.step, began, choice.level, float(search.gains[choice.level]))
        search.steps += 1
        if search.steps % self.window == 0 and not search.ended:
            self._try_next(search, search.gains)
        self._decide(search, search.gains)

    def state_dict(self) -> dict[str, Any]:
        gains = self._search.gains
        return vars(self._search) | {
            "ratios": list(self._search.ratios),
            "gains": None if gains is None else [None if gain != gain else gain for gain in gains.tolist()],
            "throughputs": [list(values) for values in self._search.throughputs],
        }

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        # With other candidates the search starts again
        super().load_state_dict(state, cost)
        search = self._search
        if state.get("ratios") != search.ratios:
            return
        search.floor, search.candidate = int(state["floor"]), int(state["candidate"])
        search.ended, search.steps = bool(state["ended"]), int(state["steps"])
        pairs = zip(state["throughputs"], search.throughputs, strict=True)
        search.throughputs = [deque(values, maxlen=times.maxlen) for values, times in pairs]
        self._progress.last = None
        self._progress.choices.clear()
        if state["gains"] is not None:
            search.gains = np.array(state["gains"], float)  # None becomes NaN
            self._decide(search, search.gains)

    def _update_gains(self, report: StepReport, choice: _Choice) -> None:
        if len(report.surveys) < len(self._shapes):
            return
        search = self._search
        gains = np.full(len(search.ratios), np.nan)
        if self.published:
            surveys = (survey.astype(np.float64).sum(axis=0) for survey in report.surveys.values())
            energy, *selected = sum(surveys).tolist()
            if 0 < energy < np.inf:
                gains[[choice.floor, choice.candidate]] = np.array(selected) / energy
        else:
            lost, energy = np.zeros(gains.size), 0.0
            for bucket, survey in report.surveys.items():
                spectra = Spectra(self._shapes[bucket].sizes, survey)
                bucket_energy = float(spectra.energies.sum())
                lost += bucket_energy * lost_share(self.compressor, spectra, search.ratios)
                energy += bucket_energy
            if 0 < energy < np.inf:
                gains = 1 - lost / energy
        if not 0 < energy < np.inf:
            return
        before = gains if search.gains is None else search.gains
        average = before + (1 - (1 - self._share) ** max(1, report.step - self._progress.surveyed)) * (gains - before)
        # A level that is known only from this step, or only from before, has nothing to average
        search.gains = np.where(np.isnan(gains), before, np.where(np.isnan(before), gains, average))
        self._progress.surveyed = report.step

    def _try_next(self, search: _Search, gains: NDArray[np.float64]) -> None:
        tried = search.candidate
        search.candidate = min(tried + 1, len(search.ratios) - 1)
        if abs(gains[search.floor] - gains[tried]) <= self.omega * gains[search.floor]:
            search.floor = tried
        enough = 1 if self.published else min(_MIN_STEPS, self.window)
        timed = [(values, level) for level, values in enumerate(search.throughputs) if len(values) >= enough]
        medians = [(statistics.median(values), level) for values, level in timed]
        if len(medians) > 1:
            (second, one), (first, other) = sorted(medians)[-2:]
            if first - second <= self.omega * second:
                search.ended = True
                search.candidate = min(one, other)
                search.floor = min(search.floor, search.candidate)

    def _decide(self, search: _Search, gains: NDArray[np.float64]) -> None:
        state = "found" if search.ended else "tried"
        for name, level in (("candidate", search.candidate), ("floor", search.floor)):
            if gains[level] >= self.epsilon:
                self._decision = level, f"{name} {search.ratios[level]:.4g} {state}, gain {gains[level]:.3f}"
                return
        gain, floor = gains[search.floor], search.ratios[search.floor]
        self._decision = None, f"dense, gain {gain:.3f} at the floor {floor:.4g} is too little"
