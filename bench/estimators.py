"""How near the estimated thresholds come to the ratio that was asked for."""

import importlib.util
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from mpicomp.bench.measure.feedback import Selecting, make_bucket
from mpicomp.bench.tasks import get_task, list_tasks
from numpy.typing import NDArray

from mpicomp.compressors import Sparsifier, compressor_class, get_compressor, list_compressors
from mpicomp.compressors.base import kept
from mpicomp.errors import ConfigurationError, UnknownNameError
from mpicomp.reducer.bucket import Bucket

WARM = 25
"""Steps in which estimators adapt and nothing is counted."""

# Parameters that make another estimator of a compressor.
_VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sidco": ("distribution", ("exponential", "gamma", "pareto")),
    "redsync": ("search", ("trimmed", "binary")),
}


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Parameters
    ----------
    numel : int
        Elements of the arrays that are drawn.
    ratios : sequence of float
        Asked of every estimator.
    steps : int
        That are counted, after `WARM` others.
    data : sequence of str
        Names of distributions and tasks; see `sources`.
    recorded : mapping of str to array, shape (steps, numel)
        Gradients of your own, by name.
    feedback : bool
        Whether real gradients are selected from with error feedback.
    """

    numel: int
    ratios: Sequence[float]
    steps: int
    data: Sequence[str]
    recorded: Mapping[str, NDArray[np.floating]] = field(default_factory=dict)
    feedback: bool = True


def _laplace(random: np.random.Generator, numel: int) -> NDArray[np.floating]:
    array = random.standard_exponential(numel, dtype=np.float32)
    array -= random.standard_exponential(numel, dtype=np.float32)
    return array


def _gamma(random: np.random.Generator, numel: int) -> NDArray[np.floating]:
    array = random.standard_gamma(0.6, numel, dtype=np.float32)
    return np.where(random.integers(0, 2, numel, dtype=np.int8) > 0, array, -array)


def _normal(random: np.random.Generator, numel: int) -> NDArray[np.floating]:
    return random.standard_normal(numel, dtype=np.float32)


def _student(random: np.random.Generator, numel: int) -> NDArray[np.floating]:
    return random.standard_t(3, numel).astype(np.float32)


_DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], NDArray[np.floating]]] = {
    "laplace": _laplace,
    "gamma": _gamma,
    "normal": _normal,
    "student": _student,
}


def sources() -> tuple[list[str], list[str]]:
    """Give what estimators can be measured on: the names of distributions, and of tasks whose training is recorded."""
    return list(_DISTRIBUTIONS), list(list_tasks())


def check_data(names: Sequence[str]) -> None:
    """Refuse names that stand for nothing, and tasks that cannot be trained here.

    Raises
    ------
    ConfigurationError
        For either.
    """
    distributions, tasks = sources()
    for name in names:
        if name in tasks:
            _task(name)
        elif name not in distributions:
            raise UnknownNameError("bench estimators: --data", name, [*distributions, *tasks])


def trainable() -> bool:
    """Tell whether what the tasks need is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "sklearn"))


def load_gradients(path: str, steps: int) -> dict[str, NDArray[np.floating]]:
    """Read gradients of one's own.

    Parameters
    ----------
    path : str
        An ``.npz`` file with arrays of shape (steps, elements).
    steps : int
        How many steps there must be at least.

    Raises
    ------
    ConfigurationError
        Where the file is not like that.
    """
    expected = "an .npz file with arrays of shape (steps, elements) is needed"
    try:
        with open(path, "rb") as file:
            archive = np.load(file)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("one array without a name")
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigurationError(f"bench estimators: cannot read '{path}' ({reason}); {expected}") from error
    if not arrays:
        raise ConfigurationError(f"bench estimators: '{path}' holds nothing; {expected}")
    for name, array in arrays.items():
        if array.ndim != 2 or array.dtype.kind != "f" or not array.shape[1]:
            raise ConfigurationError(
                f"bench estimators: '{name}' in '{path}' is {array.dtype} of shape {array.shape}; {expected}"
            )
        if len(array) < steps:
            raise ConfigurationError(
                f"bench estimators: '{name}' in '{path}' has {len(array)} steps, at least {steps} are needed; "
                "choose fewer --steps"
            )
        if not np.isfinite(array).all():
            raise ConfigurationError(f"bench estimators: '{name}' in '{path}' holds NaN or infinity")
    return arrays


def estimators(ratio: float) -> dict[str, Sparsifier]:
    """Give every compressor that selects about as many elements as it is asked to, by name.

    Examples
    --------
    >>> estimators(0.1)["topk"]
    TopK(ratio=0.1)
    """
    found: dict[str, Sparsifier] = {}
    for name in list_compressors():
        cls = compressor_class(name)
        parameters = {entry.name for entry in fields(cls)}
        if not issubclass(cls, Sparsifier) or "ratio" not in parameters:
            continue
        variant, values = _VARIANTS.get(name, ("", ()))
        if variant not in parameters:
            configs: dict[str, dict[str, Any]] = {name: {}}
        else:
            configs = {f"{name}.{value}": {variant: value} for value in values}
        for label, config in configs.items():
            compressor = get_compressor({"id": name, "ratio": ratio} | config)
            assert isinstance(compressor, Sparsifier)
            found[label] = compressor
    return found


def measure(settings: Settings, note: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """Let all estimators select from the same data.

    What is drawn is drawn anew at each step and selected from as it is; real gradients are selected from with error
    feedback, a residual for each estimator, if not told otherwise.

    Parameters
    ----------
    settings : Settings
        What to measure.
    note : callable
        Told what is going on.

    Returns
    -------
    list of dict
        The rows; docs/benchmarks.md says what is in them.
    """
    rows = []
    for place, name in enumerate([*settings.data, *settings.recorded]):
        note(f"{name}: {WARM + settings.steps} steps")
        if name in settings.recorded:
            gradients = iter(settings.recorded[name])
        elif name in _DISTRIBUTIONS:
            gradients = _drawn(name, settings.numel, place)
        else:
            gradients = _training(name)
        drawn = name in _DISTRIBUTIONS and name not in settings.recorded
        rows += _reached(name, gradients, settings.feedback and not drawn, settings)
    return rows


@dataclass
class _Estimator:
    """An estimator at one ratio, and how many elements it selected."""

    name: str
    ratio: float
    selecting: Selecting
    bucket: Bucket
    counts: list[int] = field(default_factory=list)


def _reached(
    data: str, gradients: Iterator[NDArray[np.floating]], feedback: bool, settings: Settings
) -> list[dict[str, Any]]:
    gradient = np.ascontiguousarray(next(gradients), np.float32)
    numel = gradient.size
    running: list[_Estimator] = []
    shared: Bucket | None = None
    for ratio in settings.ratios:
        for name, compressor in estimators(ratio).items():
            if feedback or shared is None:
                shared = make_bucket(numel, compressor, feedback and compressor.feedback)
            running.append(_Estimator(name, ratio, Selecting(compressor, numel), shared))
    for step in range(WARM + settings.steps):
        for entry in running:
            count = entry.selecting.step(entry.bucket, gradient, message=False)
            if step >= WARM:
                entry.counts.append(count)
        if step + 1 < WARM + settings.steps:
            gradient = np.ascontiguousarray(next(gradients), np.float32)
    return [_row(entry, data, numel) for entry in sorted(running, key=lambda entry: (entry.name, -entry.ratio))]


def _row(entry: _Estimator, data: str, numel: int) -> dict[str, Any]:
    shares = np.array(entry.counts) / kept(entry.ratio, numel)
    return {
        "name": entry.name,
        "data": data,
        "numel": numel,
        "ratio": entry.ratio,
        "feedback": entry.bucket.feedback,
        "steps": len(entry.counts),
        "mean": float(shares.mean()),
        "min": float(shares.min()),
        "max": float(shares.max()),
        "config": entry.selecting.compressor.get_config(),
    }


def _drawn(name: str, numel: int, seed: int) -> Iterator[NDArray[np.floating]]:
    random = np.random.default_rng(seed)
    while True:
        yield _DISTRIBUTIONS[name](random, numel)


def _training(name: str) -> Iterator[NDArray[np.floating]]:
    from mpicomp.bench.tasks.gradients import gradients_of  # loads torch

    return gradients_of(_task(name))


def _task(name: str) -> Any:
    try:
        return get_task(name, 0)
    except ImportError as error:
        raise ConfigurationError(
            f"bench estimators: {error}; install what it needs with pip install 'mpicomp[torch,bench]'"
        ) from error
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"bench estimators: {error}") from error
