"""How many elements estimators of a threshold select over those asked for, in arrays that are drawn or trained."""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
from mpicomp.bench.measure.feedback import Selecting, make_bucket
from mpicomp.bench.tasks import get_task
from numpy.typing import NDArray
from study_rows import SharedModel

from mpicomp.compressors import Sparsifier, get_compressor
from mpicomp.compressors.base_compressor import num_kept

_WARM = 25  # steps in which estimators adapt and nothing is counted
SIDCO = tuple(f"sidco.{distribution}" for distribution in ("exponential", "gamma", "pareto"))
_FORMS = {"sidco": "distribution", "redsync": "search"}


def _laplace(random: np.random.Generator, numel: int) -> NDArray[np.floating]:
    array = random.standard_exponential(numel, dtype=np.float32)
    array -= random.standard_exponential(numel, dtype=np.float32)
    return array


def _gamma(random: np.random.Generator, numel: int) -> NDArray[np.floating]:
    array = random.standard_gamma(0.6, numel, dtype=np.float32)
    return np.where(random.integers(0, 2, numel, dtype=np.int8) > 0, array, -array)


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], NDArray[np.floating]]] = {
    "laplace": _laplace,
    "gamma": _gamma,
    "normal": lambda random, numel: random.standard_normal(numel, dtype=np.float32),
    "student": lambda random, numel: random.standard_t(3, numel).astype(np.float32),
}
"""``gamma`` has a shape of 0.6 and random signs, ``student`` 3 degrees of freedom."""


def drawn(name: str, numel: int) -> Iterator[NDArray[np.floating]]:
    """Yield arrays of a distribution."""
    random = np.random.default_rng(sorted(DISTRIBUTIONS).index(name))
    while True:
        yield DISTRIBUTIONS[name](random, numel)


def trained(name: str) -> Iterator[NDArray[np.floating]]:
    """Train a task without compression, and yield each step's gradients in an array that the next step overwrites."""
    task = get_task(name, 0)
    shared = SharedModel(task, task.steps)
    flat = np.zeros(sum(parameter.numel() for parameter in shared.parameters.values()), np.float32)
    for step in itertools.count():
        shared.backward(step, 0, 1)
        place = 0
        for parameter in shared.parameters.values():
            if parameter.grad is not None:
                flat[place : place + parameter.numel()] = parameter.grad.numpy().reshape(-1)
            place += parameter.numel()
        yield flat
        shared.update()


def estimator(label: str, ratio: float) -> Sparsifier:
    """Return the compressor of a label: its name, its form, and whether it is as published.

    >>> estimator("sidco.gamma.published", 0.1).get_config()["distribution"]
    'gamma'
    """
    name, *form = label.removesuffix(".published").split(".")
    config: dict[str, Any] = {"id": name, "ratio": ratio} | ({_FORMS[name]: form[0]} if form else {})
    compressor = get_compressor(config | ({"as_published": True} if label.endswith(".published") else {}))
    assert isinstance(compressor, Sparsifier)
    return compressor


def measure(
    gradients: Iterator[NDArray[np.floating]], feedback: bool, ratios: Sequence[float], steps: int,
    labels: Collection[str],
) -> list[dict[str, Any]]:  # fmt: skip
    """Select with all estimators from the same gradients, with a residual each if there is feedback."""
    gradient = np.ascontiguousarray(next(gradients), np.float32)
    running = []
    for ratio, label in itertools.product(ratios, labels):
        compressor = estimator(label, ratio)
        bucket = make_bucket(gradient.size, compressor, feedback and compressor.feedback)
        running.append((label, ratio, Selecting(compressor, gradient.size), bucket, list[int]()))
    for step in range(_WARM + steps):
        if step > 0:
            gradient = np.ascontiguousarray(next(gradients), np.float32)
        for _, _, selecting, bucket, counts in running:
            count = selecting.step(bucket, gradient, message=False)
            if step >= _WARM:
                counts.append(count)
    found = []
    for label, ratio, _, _, counts in running:
        shares = np.array(counts) / num_kept(ratio, gradient.size)
        mean, least, most = float(shares.mean()), float(shares.min()), float(shares.max())
        found.append({"name": label, "ratio": ratio, "mean": mean, "min": least, "max": most})
    return found
