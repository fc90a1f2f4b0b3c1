"""Flexible Communication as published: a training loop that tries every ratio for ten steps from a checkpoint."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import Scheme, bind
from mpicomp.compressors import TopK
from mpicomp.cost.formulas import Terms, allgather, broadcast, ring, tree
from mpicomp.mpi.rounds import Rounds
from mpicomp.mpi.transport import Transport
from mpicomp.policies import Plan, Policy, Shape, UserSettings
from mpicomp.systems.flexible import Objectives, candidates, pick

TRIAL_STEPS = 10  # of each candidate
_WEIGHTS = (0.6, 0.6, 0.4)  # of both times and of 1 / gain: the code has one time at 0.6, the paper gives no weights
_CHANGES = 5  # of the gain from step to step, whose mean counts: the window of the paper's code
_BETWEEN = 4  # ratios that can run for each factor between two candidates
_MIN_GAIN = 1e-9  # smallest gain that is divided by
_ALL_BYTES = 1 << 62  # of a bucket that holds everything
# Of NSGA-II, as in the published code
_POPULATION, _OFFSPRING, _GENERATIONS = 40, 10, 40
_SEED = 1  # the same on all ranks
COLLECTIVES = {"allgather": "allgather", "ring": "star-topk:ring", "tree": "star-topk:recursive-doubling"}


@dataclass(eq=False)
class TopKAsTold(Policy):
    """Runs top-k at the ratio and by the collective that the search sets, with all arrays of one dtype in a bucket."""

    id: ClassVar[str] = "flexible-search"
    ratio = 1.0
    collective = "allgather"
    reason = ""

    def configure(self, settings: UserSettings) -> None:
        self.compressor, self.bucket_bytes = TopK(), _ALL_BYTES
        self._shapes: list[Shape] = []
        self._schemes: dict[tuple[int, float, str], Scheme[Any]] = {}

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        self._shapes = list(shapes)
        self._schemes.clear()
        return
        yield

    def plan(self, bucket: int) -> Plan:
        key = bucket, self.ratio, self.collective
        if key not in self._schemes:
            shape = self._shapes[bucket]
            bound = TopK(ratio=self.ratio).bind(shape.names, shape.sizes, shape.shapes)
            self._schemes[key] = bind(bound, self.collective)
        return Plan(self._schemes[key], self.reason)


@dataclass(frozen=True)
class Outcome:
    """A step: seconds of the slowest rank's own work and of rounds, energy that was sent, and energy in all."""

    work_s: float
    rounds_s: float
    sent: float
    energy: float


@dataclass
class Search:
    """The paper's checkpoint-and-search around a training.

    After a ramp of ratios from 1 to ``most`` and a step there, a checkpoint is made. Each candidate of ``least``,
    ``most`` and ``factor`` runs for ten steps from it, by the collective that the inequalities name; then training
    continues from it. The trials are repeated if the gain changes by ``gain_threshold`` from step to step, as the mean
    of five changes. A ratio is chosen by NSGA-II after the first trials, and if the network has changed: the formulas
    then give the seconds in rounds, and the other objectives are those of the last trials.
    """

    step: Callable[[float, str, str], Outcome]
    """Makes a step of all ranks at a ratio, by a collective, for a reason."""
    keep: Callable[[], Any]
    """Returns a copy of parameters, the optimizer's state and residuals."""
    restore: Callable[[Any], None]
    link: Callable[[], tuple[float, float]]
    """Returns the network's latency and seconds per byte now."""
    ranks: int
    nbytes: int
    """Length of the gradient."""
    least: float = 0.001
    most: float = 0.1
    factor: float = 3.0
    gain_threshold: float = 0.1
    ramp: int = 0
    solver: str = "nsga2"

    def __post_init__(self) -> None:
        self.ratios = candidates(self.least, self.most, self.factor)
        self.objectives: Objectives = np.zeros((0, 3))
        """Seconds of work, seconds in rounds and 1 / gain of each candidate; empty before the first trials."""
        self.ratio = self.most

    def run(self, steps: int) -> None:
        """Make the steps of a training; those of trials come besides."""
        for done in range(min(self.ramp, steps)):
            ratio = 1 + (self.most - 1) * done / self.ramp
            self.step(ratio, self.collective(self.most), f"ratio {ratio:.4g}, step {done} of the ramp")
        changes = deque[float](maxlen=_CHANGES)
        last_gain, link, reason = 0.0, self.link(), "the largest ratio until every candidate has run"
        for done in range(self.ramp, steps):
            if self.link() != link and len(self.objectives):
                link = self.link()
                self.objectives[:, 1] = [self.rounds_s(ratio) for ratio in self.ratios]
                reason = self.choose()
                changes.clear()
                last_gain = 0.0
            outcome = self.step(self.ratio, self.collective(self.ratio), reason)
            if outcome.energy > 0:
                gain = outcome.sent / outcome.energy
                if last_gain > 0:
                    changes.append(abs(gain - last_gain) / last_gain)
                last_gain = gain
            has_changed = len(changes) == _CHANGES and fmean(changes) >= self.gain_threshold
            if done < steps - 1 and (not len(self.objectives) or has_changed):
                is_first = not len(self.objectives)
                self.objectives = self.try_all()
                if is_first:
                    link, reason = self.link(), self.choose()
                changes.clear()
                last_gain = 0.0

    def try_all(self) -> Objectives:
        """Run each candidate from the same checkpoint, to which training returns; return the objectives."""
        kept = self.keep()
        rows = []
        for number, ratio in enumerate(self.ratios, 1):
            collective = self.collective(ratio)
            reason = f"ratio {ratio:.4g} by {collective}, trial {number} of {len(self.ratios)}"
            outcomes = [self.step(ratio, collective, reason) for _ in range(TRIAL_STEPS)]
            self.restore(kept)
            energy = sum(outcome.energy for outcome in outcomes)
            gain = sum(outcome.sent for outcome in outcomes) / energy if energy > 0 else 0.0
            work_s, rounds_s = (fmean(getattr(each, name) for each in outcomes) for name in ("work_s", "rounds_s"))
            rows.append((work_s, rounds_s, 1 / max(gain, _MIN_GAIN)))
        return np.array(rows)

    def choose(self) -> str:
        """Choose a ratio, between two candidates too; return the reason."""
        grid, ratios = np.log(self.ratios), np.array(self.ratios)

        def evaluate(variables: NDArray[np.float64]) -> Objectives:
            return np.stack([np.interp(variables[:, 0], grid, column) for column in self.objectives.T], axis=1)

        points = grid[:, None]
        if self.solver == "nsga2" and grid.size > 1:
            points = evolve(evaluate, [grid[0]], [grid[-1]])
            count = _BETWEEN * (grid.size - 1) + 1
            ratios = np.unique([*ratios, *np.geomspace(self.least, self.most, count)])
        found = evaluate(points)
        place, on_front = pick(found, _WEIGHTS)
        self.ratio = float(ratios[np.abs(np.log(ratios) - points[place, 0]).argmin()])
        return f"ratio {self.ratio:.4g}, gain {1 / found[place, 2]:.3f}, weighted of a front of {on_front}"

    def collective(self, ratio: float) -> str:
        """Return the collective that the inequalities name for a ratio."""
        return COLLECTIVES[published_choice(self.ranks, ratio * self.nbytes, *self.link())]

    def rounds_s(self, ratio: float) -> float:
        """Return the seconds of the formulas."""
        kept = ratio * self.nbytes
        kind = published_choice(self.ranks, kept, *self.link())
        return sparse_sum(kind, self.ranks, kept).seconds(*self.link())


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
    if latency_bytes * (ranks - 1 - depth) < (depth - (ranks - 1) / ranks) * nbytes:
        return "ring" if latency_bytes < (1 - 1 / ranks - depth / (2 * (ranks - 1))) * nbytes else "allgather"
    return "tree" if latency_bytes < ((ranks - 1) / depth - 1.5) * nbytes else "allgather"


def evolve(
    evaluate: Callable[[NDArray[np.float64]], Objectives], least: Sequence[float], most: Sequence[float]
) -> NDArray[np.float64]:
    """Return a front of real variables within bounds, by NSGA-II with the paper's settings; deterministic."""
    from pymoo.algorithms.moo.nsga2 import NSGA2
    from pymoo.core.problem import Problem
    from pymoo.operators.crossover.sbx import SBX
    from pymoo.operators.mutation.pm import PM
    from pymoo.optimize import minimize

    class _Problem(Problem):  # type: ignore[misc]  # pymoo has no types
        def _evaluate(self, x: NDArray[np.float64], out: dict[str, Any], *_: Any, **__: Any) -> None:
            out["F"] = evaluate(x)

    lower, upper = np.asarray(least, float), np.asarray(most, float)
    problem = _Problem(n_var=lower.size, n_obj=evaluate(lower[None]).shape[1], xl=lower, xu=upper)
    algorithm = NSGA2(
        pop_size=_POPULATION, n_offsprings=_OFFSPRING, crossover=SBX(prob=0.9, eta=15), mutation=PM(eta=20)
    )
    found: NDArray[np.float64] = minimize(problem, algorithm, ("n_gen", _GENERATIONS), seed=_SEED).X
    return np.atleast_2d(found)
