"""The paper's search: every ratio runs for ten steps from a checkpoint, and inequalities name the collective."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import bind
from mpicomp.compressors import Compressor
from mpicomp.cost import CostModel, Network
from mpicomp.cost.formulas import Terms, allgather, broadcast, ring, tree
from mpicomp.errors import ConfigurationError
from mpicomp.policies.policy import MAX_REPORT_STEPS, BucketOutcome, Plan, Shape, StepReport, UserSettings
from mpicomp.policies.ratio_levels import at_ratio, ladder
from mpicomp.policies.surveys import Survey
from mpicomp.reducer.agreement import agree
from mpicomp.rounds import Group, Rounds
from mpicomp.systems.flexible import pareto
from mpicomp.systems.flexible.option_policy import Flexible, Option, candidates
from mpicomp.transport.base import Transport

TRIAL_STEPS = 10  # of each candidate
_WEIGHTS = (0.6, 0.6, 0.4)  # of both times and of 1 / gain: the code has one time at 0.6, the paper gives no weights
_CHANGES = 5  # of the gain from step to step, whose mean counts: the window of the paper's code
_ALL_BYTES = 1 << 62  # of a bucket that holds everything
_BETWEEN = 4  # ratios that can run for each factor between two candidates
_LEAST_GAIN = 1e-9  # smallest gain that is divided by
_INNER = {"ring": "ring", "tree": "recursive-doubling"}


class FlexibleSearch(Flexible):
    """The paper's checkpoint-and-search; `Flexible.as_published` makes it.

    All arrays of one dtype are one bucket, so that the ratio is one of the whole gradient. The inequalities (5a to 5c)
    name allgather, or star-topk with a ring or a tree, for the ratio and the link. With star-topk or var-topk named, 5a
    names ring or tree; another named collective runs as it is.

    After the ramp and one step at ``most`` the driver makes a checkpoint. Each candidate of ``least``, ``most`` and
    ``factor`` runs for ten steps, which measure the seconds of the slowest rank's computation, the seconds in rounds
    and the gain. Then everything is restored, and the ratio that NSGA-II finds runs. The search is repeated where the
    gain changes by ``gain_threshold`` from step to step, as the mean of five changes. A ratio is chosen after the first
    search, and where latency or bandwidth change: the formulas then give the seconds in rounds, and the other
    objectives are those of the last search.
    """

    resumes: ClassVar[bool] = False

    def check(self) -> None:
        super().check()
        if not self.published:
            raise ConfigurationError("flexible: FlexibleSearch is made by Flexible.as_published()")

    def configure(self, settings: UserSettings) -> None:
        super().configure(settings)
        for name in self._names():
            bind(self.compressor, name)  # raises if it does not fit
        self._tried = candidates(self.least, self.most, self.factor)
        if self.least < self.most:
            self._ratios = sorted({*self._tried, *ladder(self.least, self.most, self.factor ** (1 / _BETWEEN))})
        self._trial: int | None = None  # the candidate that runs
        self._steps = 0  # of the trial so far
        self._back = False  # whether a trial was interrupted, so that its steps have to be undone
        self.trial_action: str | None = None  # for `TrialDriver`: "keep" copies, "restore" loads the copy
        self.has_driver = False
        self._action_due = False  # whether the last step has ended with an action
        self._candidate_of: dict[int, int] = {}  # by step, until its seconds are known
        self._energies = np.zeros((2, len(self._tried)))  # that trials have sent, and in all
        self._seconds: list[list[tuple[float, float]]] = []  # computing and in rounds, by candidate and step
        self._objectives: pareto.Objectives | None = None
        self._changes = deque[float](maxlen=_CHANGES)  # of the gain, relative, from step to step
        self._last_gain = 0.0  # of the step before; 0 if there is none
        self._link = 0.0, 0.0
        self._reason = "the largest ratio until every candidate has run"

    @property
    def bucket_bytes(self) -> int:
        return _ALL_BYTES

    @property
    def wants_telemetry(self) -> bool:
        return super().wants_telemetry or bool(self._candidate_of)

    def survey(self, bucket: int) -> Survey | None:
        # Trials measure the gains
        return None

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        # A trial that is running is undone, and all are repeated
        self._back = self._back or self._trial is not None
        self._trial, self._candidate_of, self._objectives = None, {}, None
        self._group = transport.group
        yield from self._check_driver()
        yield from super().start(shapes, transport)
        self._look_at_link()

    def refresh(self, transport: Transport) -> Rounds[None]:
        if self._action_due:
            yield from self._check_driver()
            self._action_due = False
        if (yield from self._selector.refresh(transport)):
            self._look_at_link()
            if self._objectives is not None:
                self._objectives[:, 1] = [self._in_rounds(ratio) for ratio in self._tried]
            self._solve()

    def plan(self, bucket: int) -> Plan:
        if self._ramping:
            return self._plan_of_ramp(bucket)
        option, reason = self._current or self._option(self.most), self._reason
        if self._trial is not None:
            option = self._option(self._tried[self._trial])
            reason = f"ratio {option.ratio:.4g} by {option.kind}, trial {self._trial + 1} of {len(self._tried)}"
        return self._selector.plan(bucket, self._rows[bucket][option], reason)

    def on_step_end(self, step: int, outcomes: Sequence[BucketOutcome]) -> None:
        self.trial_action = None
        if self._back:
            self._back, self.trial_action = False, "restore"
        elif self._ramping:
            self._ramped += 1
        elif self._trial is not None:
            self._deliver_trial(self._trial, step, outcomes)
        elif self._asking:
            self.trial_action, self._asking = "keep", False
            self._trial, self._steps, self._awaited = 0, 0, None
            self._energies[:] = 0
            self._seconds = [[] for _ in self._tried]
        elif self._awaited is not None:
            self._asking = step > self._awaited + MAX_REPORT_STEPS  # the reports of their seconds were lost
        else:
            self._since += 1
            self._follow_gain(outcomes)
            self._asking = self._since >= (self.every or math.inf) or self._changed()
        self._action_due = self.trial_action is not None

    def on_telemetry(self, report: StepReport) -> None:
        self._selector.on_telemetry(report)
        trial = self._candidate_of.pop(report.step, None)
        if trial is not None:
            begin, end, work, _ = report.times.max(axis=0).T
            self._seconds[trial].append((float(work.sum()), float((end - begin - work).sum())))
        if self._awaited is None or report.step < self._awaited:
            return
        self._awaited, self._candidate_of = None, {}
        if not all(self._seconds):
            self._asking = True
            return
        gains = self._energies[0] / np.where(self._energies[1] > 0, self._energies[1], 1.0)
        columns = [*np.transpose([np.mean(work, axis=0) for work in self._seconds]), 1 / np.maximum(gains, _LEAST_GAIN)]
        first = self._objectives is None
        self._objectives, self._since = np.stack(columns, axis=1), 0
        self._renew()
        if first:
            self._solve()

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        # The last choice runs until the next search
        super().load_state_dict(state, cost)
        self._trial, self._candidate_of, self._awaited, self._back = None, {}, None, False
        self.trial_action, self._action_due = None, False
        self._objectives = None

    def objectives(self) -> pareto.Objectives:
        """Return seconds of computation, seconds in rounds and 1 / gain of each candidate, shape (candidates, 3)."""
        assert self._objectives is not None
        return self._objectives

    def _check_driver(self) -> Rounds[None]:
        """Raise on all ranks if some rank has no driver, or has not called it after the last step."""
        problem = None
        if self.trial_action is not None or not self.has_driver:
            problem = ConfigurationError(
                f"{self.id}: makes steps for a trial, after which parameters are restored; make a "
                "mpicomp.systems.flexible.TrialDriver and call its after_step() after each step, on all ranks and "
                "without join()"
            )
        yield from agree(None, problem, self._group, self.id)

    def _deliver_trial(self, trial: int, step: int, outcomes: Sequence[BucketOutcome]) -> None:
        self._candidate_of[step] = trial
        self._energies[:, trial] += [
            sum(outcome.energy * outcome.gain for outcome in outcomes), sum(outcome.energy for outcome in outcomes),
        ]  # fmt: skip
        self._steps += 1
        if self._steps == TRIAL_STEPS:
            self.trial_action, self._steps, self._trial = "restore", 0, trial + 1
        if self._trial == len(self._tried):
            self._trial, self._awaited = None, step

    def _follow_gain(self, outcomes: Sequence[BucketOutcome]) -> None:
        energy = sum(outcome.energy for outcome in outcomes)
        if self._current is None or not 0 < energy < math.inf:
            return
        gain = sum(outcome.energy * outcome.gain for outcome in outcomes) / energy
        if self._last_gain > 0:
            self._changes.append(abs(gain - self._last_gain) / self._last_gain)
        self._last_gain = gain

    def _renew(self) -> None:
        super()._renew()
        self._changes.clear()
        self._last_gain = 0.0

    def _changed(self) -> bool:
        return len(self._changes) == _CHANGES and fmean(self._changes) >= self.gain_threshold

    def _solve(self) -> None:
        """Choose a ratio by the current state."""
        if self._objectives is None:
            return
        grid, table = np.log(self._tried), self._objectives

        def evaluate(variables: NDArray[np.float64]) -> pareto.Objectives:
            return np.stack([np.interp(variables[:, 0], grid, column) for column in table.T], axis=1)

        points = grid[:, None]
        if self.solver == "nsga2" and len(self._tried) > 1:
            points = pareto.evolve(evaluate, [grid[0]], [grid[-1]])
        found = evaluate(points)
        best = pareto.front(found)
        front = found[best]
        place = int(best[pareto.weighted(front, _WEIGHTS) if self.choice == "weighted" else pareto.knee(front)])
        ratio = min(self._ratios, key=lambda ratio: abs(math.log(ratio) - points[place, 0]))
        option = self._option(ratio)
        if option != self._current:
            self._current = option
            self._renew()
        self._reason = (
            f"ratio {option.ratio:.4g} by {option.kind}, gain {1 / found[place, 2]:.3f}, {self.choice} of a front of "
            f"{best.size}"
        )

    def _names(self) -> list[str]:
        """Return the collectives that the inequalities may name."""
        if self._pinned not in (None, "star-topk", "var-topk"):
            return [self._pinned]
        sums = [f"{self._pinned or 'star-topk'}:{inner}" for inner in _INNER.values()]
        return sums if self._pinned else ["allgather", *sums]

    def _ladder(self, group: Group) -> list[tuple[Compressor, Sequence[str]]]:
        return [(at_ratio(self.compressor, ratio), self._names()) for ratio in self._ratios]

    def _kind_of(self, collective: str) -> str:
        return collective

    def _option(self, ratio: float) -> Option:
        """Return a ratio with the collective that the inequalities name for it."""
        if self._pinned not in (None, "star-topk", "var-topk"):
            return Option(ratio, self._pinned)
        way = self._way(ratio)
        return Option(ratio, way if way == "allgather" else f"{self._pinned or 'star-topk'}:{_INNER[way]}")

    def _option_of_ramp(self, ratio: float) -> Option:
        return Option(self._ratios[-1], self._option(ratio).kind)

    def drive_trials(self, optimizer: Any, model: Any = None) -> Any:
        """Return the driver of a training loop with a `DistributedOptimizer`; see `trials.drive_trials`."""
        from mpicomp.systems.flexible.trials import drive_trials  # which imports this module

        return drive_trials(optimizer, model)

    def _way(self, ratio: float) -> str:
        ranks, nbytes = self._group.size, self._kept_bytes(ratio)
        if self._pinned is None:
            return published_choice(ranks, nbytes, *self._link)
        return "ring" if ring_beats_tree(ranks, nbytes, *self._link) else "tree"

    def _in_rounds(self, ratio: float) -> float:
        """Return the seconds of the formulas."""
        way = "allgather" if self._pinned == "allgather" else self._way(ratio)
        return sparse_sum(way, self._group.size, self._kept_bytes(ratio)).seconds(*self._link)

    def _kept_bytes(self, ratio: float) -> float:
        return ratio * sum(shape.numel * shape.dtype.itemsize for shape in self._shapes)

    def _look_at_link(self) -> None:
        cost = self._selector.cost
        network = Network(max(2, self._group.hosts)) if cost is None else cost.network
        self._link = network.latency, network.seconds_per_byte


def sparse_sum(kind: str, ranks: int, nbytes: float) -> Terms:
    """Return the paper's cost of averaging selections: Table I, or AR-Topk by ring or tree, equations 4a and 4b."""
    if kind == "allgather":
        return allgather(ranks, 2 * nbytes)
    return broadcast(ranks, nbytes) + {"ring": ring, "tree": tree}[kind](ranks, nbytes)


def published_choice(ranks: int, nbytes: float, latency: float, seconds_per_byte: float) -> str:
    """Return the kind of `sparse_sum` that the inequalities (5a to 5c) name, without their divisions by zero."""
    if ranks == 1:
        return "allgather"
    depth, latency_bytes = math.log2(ranks), latency / seconds_per_byte
    if ring_beats_tree(ranks, nbytes, latency, seconds_per_byte):
        return "ring" if latency_bytes < (1 - 1 / ranks - depth / (2 * (ranks - 1))) * nbytes else "allgather"
    return "tree" if latency_bytes < ((ranks - 1) / depth - 1.5) * nbytes else "allgather"


def ring_beats_tree(ranks: int, nbytes: float, latency: float, seconds_per_byte: float) -> bool:
    """Return whether inequality 5a names a ring for the sum."""
    depth = math.log2(ranks)
    return latency / seconds_per_byte * (ranks - 1 - depth) < (depth - (ranks - 1) / ranks) * nbytes
