"""Several objectives at once: the Pareto front, and one choice on it."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.errors import ConfigurationError

Objectives = NDArray[np.float64]  # a row each, shape (rows, objectives); less is better in every column

# Of NSGA-II, as in the published code of Flexible Communication.
_POPULATION = 40
_OFFSPRING = 10
_GENERATIONS = 40
_SEED = 1  # the same on all ranks


def front(objectives: Objectives) -> NDArray[np.int64]:
    """Return the rows that no other one dominates, ascending by the first objective; of equal rows the first."""
    no_worse = (objectives[:, None] <= objectives[None]).all(axis=2)
    better = (objectives[:, None] < objectives[None]).any(axis=2)
    equal_before = np.tril(no_worse & no_worse.T, -1).any(axis=1)
    rows = np.flatnonzero(~((no_worse & better).any(axis=0) | equal_before))
    return rows[np.lexsort(objectives[rows].T[::-1])]


def normalised(objectives: Objectives) -> Objectives:
    """Scale each objective to 0 for its least value among these rows and 1 for its largest."""
    ideal, nadir = objectives.min(axis=0), objectives.max(axis=0)
    scaled: Objectives = (objectives - ideal) / np.where(nadir > ideal, nadir - ideal, 1.0)
    return scaled


def weighted(objectives: Objectives, weights: Sequence[float]) -> int:
    """Return the row of a front whose worst weighted objective is least (achievement scalarizing), after scaling."""
    return int((normalised(objectives) * np.asarray(weights)).max(axis=1).argmin())


def knee(objectives: Objectives) -> int:
    """Return the row of a front that is farthest below the plane through its ends, after scaling."""
    return int(normalised(objectives).sum(axis=1).argmin())


def check_installed() -> None:
    """Raise `ConfigurationError` if a package that `evolve` needs is not installed."""
    if find_spec("pymoo") is None:
        raise ConfigurationError(
            "pareto: NSGA-II needs pymoo, which is not installed; pip install 'mpicomp[nsga]', or use solver='exact'"
        )


def evolve(
    evaluate: Callable[[NDArray[np.float64]], Objectives], least: Sequence[float], most: Sequence[float]
) -> NDArray[np.float64]:
    """Return a front of real variables within bounds, by NSGA-II with the paper's settings; deterministic."""
    check_installed()
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
