"""Mutual information of ranks' gradients, LGC's section III: ``python studies/papers/lgc_correlation.py``.

The paper does not print its histograms' bins, on which the result depends. Here 16 bins hold equally many elements of
an array, so that layers can be compared, and zeros have a bin of their own. An estimate from few elements is too high,
about ``(bins - 1)**2 / (2 elements)`` nats; the control is the same estimate with one of the two arrays shuffled.
Information also counts which elements are large, whatever their signs; the correlation is about directions.
"""

import itertools
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np
import paper_runs
from mpicomp.bench.tasks import get_task
from numpy.typing import NDArray
from study_rows import Rows, SharedModel, Study, show

_BINS = 16


def correlation(one: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    """Return Pearson's correlation coefficient; 0 where an array is constant."""
    left, right = one - one.mean(dtype=np.float64), other - other.mean(dtype=np.float64)
    norms = float(np.linalg.norm(left)) * float(np.linalg.norm(right))
    return float(np.dot(left, right)) / norms if norms > 0 else 0.0


def bins_of(array: NDArray[np.floating]) -> NDArray[np.intp]:
    """Return the bin of every element; values that fill several bins have one."""
    edges = np.quantile(array, np.arange(1, _BINS) / _BINS)
    repeated = edges[1:][edges[1:] == edges[:-1]]
    return np.searchsorted(np.unique(np.concatenate([edges, np.nextafter(repeated, np.inf)])), array, side="right")


def information(left: NDArray[np.intp], right: NDArray[np.intp]) -> tuple[float, float]:
    """Return the mutual information of two arrays' bins, and the mean entropy of one; in nats."""
    pairs = np.bincount(left * _BINS + right, minlength=_BINS**2).reshape(_BINS, _BINS) / left.size
    alone = _entropy(pairs.sum(axis=1)) + _entropy(pairs.sum(axis=0))
    return max(0.0, alone - _entropy(pairs.ravel())), alone / 2


def _entropy(shares: NDArray[np.float64]) -> float:
    positive = shares[shares > 0]
    return float(-(positive * np.log(positive)).sum())


def train(task: str, ranks: int, seed: int, steps: int, every: int) -> dict[str, Any]:
    """Train with dense exchange; every few steps, compare each rank's gradients with the next one's."""
    shared, random = SharedModel(get_task(task, seed), steps), np.random.default_rng(seed)
    found: dict[str, list[tuple[float, ...]]] = {}
    for step in range(steps):
        gradients = []
        for rank in range(ranks):
            shared.backward(step, rank, ranks)
            gradients.append(shared.gradients())
        shared.set_gradients({name: np.mean([each[name] for each in gradients], axis=0) for name in gradients[0]})
        shared.update()
        for rank in range(ranks) if step % every == 0 else ():
            for name, array in gradients[rank].items():
                if array.size >= _BINS**2:
                    one, other = array.ravel(), gradients[(rank + 1) % ranks][name].ravel()
                    left, right = bins_of(one), bins_of(other)
                    control, _ = information(left, random.permutation(right))
                    found.setdefault(name, []).append((correlation(one, other), control, *information(left, right)))
    means = {name: np.mean(values, axis=0).tolist() for name, values in found.items()}
    return {"layers": [(name, shared.parameters[name].numel(), *values) for name, values in means.items()]}


def rows(_: Rows, arguments: Namespace) -> Iterator[tuple[Any, ...]]:
    for task, seed in itertools.product(arguments.tasks, arguments.seeds):
        key = task, arguments.ranks, seed
        yield key, train, *key, arguments.steps, arguments.every


def tables(measured: Rows, _: Namespace) -> None:
    lines = []
    for row in measured.made:
        sizes, values = zip(*((layer[1], layer[2:]) for layer in row["layers"]), strict=True)
        every = [*row["layers"], ("all", sum(sizes), *np.average(values, axis=0, weights=sizes))]  # by their elements
        for layer, elements, direction, control, shared, entropy in every:
            lines.append({
                "task": row["task"], "ranks|d": row["ranks"], "seed|d": row["seed"], "layer": layer,
                "elements|,d": elements, "correlation|.3f": direction, "information|.1%": shared / entropy,
                "control|.1%": control / entropy,
            })  # fmt: skip
    notes = ["information: share of the entropy, about 80 % in the paper; control: of arrays that share nothing"]
    show("Mutual information of two ranks' gradients", lines, notes)


STUDY = Study(
    "papers/lgc_correlation", "Show the mutual information of ranks' gradients in dense training.",
    ("task", "ranks", "seed"), rows, tables,
    paper_runs.options("digits", 100, 4) | {"--every": (5, "N", "steps between comparisons")},
    {"steps": 1, "ranks": 2, "every": 1},
)  # fmt: skip

if __name__ == "__main__":
    STUDY.main()
