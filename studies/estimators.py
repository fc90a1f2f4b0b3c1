"""The ratio that estimated thresholds reach against the ratio asked for: ``python studies/estimators.py``."""

import argparse
import importlib.util
import itertools
import pickle
import sys
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from comparison import Fields
from in_process import SharedModel
from mpicomp.bench.measure import results
from mpicomp.bench.measure.feedback import Selecting, make_bucket
from mpicomp.bench.tasks import Task, get_task, list_tasks
from numpy.typing import NDArray

from mpicomp.cli import run_program
from mpicomp.cli.options import check_writable, read_list, read_ratios
from mpicomp.compressors import Sparsifier, compressor_class, get_compressor, list_compressors
from mpicomp.compressors.base_compressor import num_kept
from mpicomp.errors import ConfigurationError, UnknownNameError
from mpicomp.reducer.bucket import Bucket
from mpicomp.setting_checks import check_least

_STUDY = "estimators"
_COLUMNS = {"name": "", "data": "", "ratio": "g", "mean": ".3f", "min": ".3f", "max": ".3f"}

WARM = 25  # steps in which estimators adapt and nothing is counted

VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sidco": ("distribution", ("exponential", "gamma", "pareto")),
    "redsync": ("search", ("trimmed", "binary")),
}
"""Parameters that make another estimator of a compressor."""


ROW: Fields = {
    "name": ("string", "the compressor, with its variant behind a dot"),
    "data": ("string", "what it selected from"),
    "numel": ("integer", "length of the array"),
    "ratio": ("number", "kept fraction that was asked for"),
    "feedback": ("boolean", "whether with error feedback"),
    "steps": ("integer", "that are counted"),
    "mean": ("number", "selected elements over those asked for, averaged over steps"),
    "min": ("number", "the least in a step"),
    "max": ("number", "the most in a step"),
    "config": ("object", "the compressor's configuration"),
}


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


@dataclass(frozen=True)
class Data:
    """Gradients of one length that estimators select from, one for every step: drawn, or those of a training."""

    gradients: Iterator[NDArray[np.floating]]
    feedback: bool


def drawn(name: str, numel: int, seed: int) -> Data:
    """Return gradients drawn from a distribution, without error feedback."""
    random = np.random.default_rng(seed)
    return Data((DISTRIBUTIONS[name](random, numel) for _ in itertools.count()), False)


def trained(name: str, feedback: bool) -> Data:
    """Return the gradients of a task's training."""
    if name not in list_tasks():
        raise UnknownNameError(f"{_STUDY}: --data", name, [*DISTRIBUTIONS, *list_tasks()])
    try:
        return Data(gradients_of(get_task(name, 0)), feedback)
    except ImportError as error:
        raise ConfigurationError(
            f"{_STUDY}: {error}; install what it needs with pip install 'mpicomp[torch,bench]'"
        ) from error
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"{_STUDY}: {error}") from error


def gradients_of(task: Task) -> Iterator[NDArray[np.float32]]:
    """Train a task without compression, and yield each step's gradients in an array that the next step overwrites."""
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
        shared.updater.update()


def load_gradients(path: str, steps: int) -> dict[str, NDArray[np.floating]]:
    """Read gradients of a user's: an ``.npz`` file with arrays of shape (steps, elements), of ``steps`` at least."""
    expected = "an .npz file with arrays of shape (steps, elements) is needed"
    try:
        with open(path, "rb") as file:
            archive = np.load(file)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("one array without a name")
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigurationError(f"{_STUDY}: cannot read '{path}' ({reason}); {expected}") from error
    if not arrays:
        raise ConfigurationError(f"{_STUDY}: '{path}' holds nothing; {expected}")
    for name, array in arrays.items():
        if array.ndim != 2 or array.dtype.kind != "f" or not array.shape[1]:
            raise ConfigurationError(
                f"{_STUDY}: '{name}' in '{path}' is {array.dtype} of shape {array.shape}; {expected}"
            )
        if len(array) < steps:
            raise ConfigurationError(
                f"{_STUDY}: '{name}' in '{path}' has {len(array)} steps, at least {steps} are needed; "
                "choose fewer --steps"
            )
        if not np.isfinite(array).all():
            raise ConfigurationError(f"{_STUDY}: '{name}' in '{path}' holds NaN or infinity")
    return arrays


def estimators(ratio: float) -> dict[str, Sparsifier]:
    """Return every compressor that selects about as many elements as it is asked to, by name.

    >>> estimators(0.1)["topk"]
    TopK(ratio=0.1)
    """
    found: dict[str, Sparsifier] = {}
    for name in list_compressors():
        cls = compressor_class(name)
        parameters = {entry.name for entry in fields(cls)}
        if not issubclass(cls, Sparsifier) or "ratio" not in parameters:
            continue
        variant, values = VARIANTS.get(name, ("", ()))
        if variant not in parameters:
            configs: dict[str, dict[str, Any]] = {name: {}}
        else:
            configs = {f"{name}.{value}": {variant: value} for value in values}
        if "published" in parameters:
            configs |= {f"{label}.published": config | {"as_published": True} for label, config in configs.items()}
        for label, config in configs.items():
            compressor = get_compressor({"id": name, "ratio": ratio} | config)
            assert isinstance(compressor, Sparsifier)
            found[label] = compressor
    return found


@dataclass
class _Estimator:
    name: str
    ratio: float
    selecting: Selecting
    bucket: Bucket
    counts: list[int] = field(default_factory=list)


def measure(
    name: str, data: Data, ratios: Sequence[float], steps: int, only: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Select with all estimators, or ``only`` these, from the same data, with a residual each if there is feedback."""
    gradient = np.ascontiguousarray(next(data.gradients), np.float32)
    running: list[_Estimator] = []
    shared: Bucket | None = None
    for ratio in ratios:
        for label, compressor in estimators(ratio).items():
            if only is not None and label not in only:
                continue
            if data.feedback or shared is None:
                shared = make_bucket(gradient.size, compressor, data.feedback and compressor.feedback)
            running.append(_Estimator(label, ratio, Selecting(compressor, gradient.size), shared))
    for step in range(WARM + steps):
        if step > 0:
            gradient = np.ascontiguousarray(next(data.gradients), np.float32)
        for entry in running:
            count = entry.selecting.step(entry.bucket, gradient, message=False)
            if step >= WARM:
                entry.counts.append(count)
    running.sort(key=lambda entry: (entry.name, -entry.ratio))
    return [_row(entry, name, gradient.size) for entry in running]


def _row(entry: _Estimator, data: str, numel: int) -> dict[str, Any]:
    shares = np.array(entry.counts) / num_kept(entry.ratio, numel)
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


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="studies/estimators.py",
        description="Show how near every threshold estimator comes to the ratio it was asked for.",
    )
    parser.add_argument("--numel", type=int, default=2_000_000, metavar="N", help="elements drawn (%(default)s)")
    parser.add_argument("--ratio", default="0.1,0.01,0.001", metavar="R[,..]", help="kept fractions (%(default)s)")
    parser.add_argument("--steps", type=int, default=50, metavar="S", help="that are counted (%(default)s)")
    parser.add_argument(
        "--data",
        metavar="D[,..]",
        help="laplace, gamma, normal, student; a task of mpicomp train for the gradients of its training (all)",
    )
    parser.add_argument(
        "--gradients", metavar="F.npz", help="gradients of your own, in place of --data: arrays of (steps, elements)"
    )
    parser.add_argument(
        "--no-feedback", action="store_true", help="select from real gradients as they are, without error feedback"
    )
    parser.add_argument("--json", metavar="F", help="write the rows to F as one JSON object")
    parser.set_defaults(alone=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print a table."""
    check_least(_STUDY, "--numel", arguments.numel)
    check_least(_STUDY, "--steps", arguments.steps)
    ratios = read_ratios(_STUDY, arguments.ratio)
    if arguments.json is not None:
        check_writable(_STUDY, arguments.json)
    feedback = not arguments.no_feedback
    names: list[str] = []
    if arguments.data is not None:
        names = list(dict.fromkeys(read_list(arguments.data)))
    elif arguments.gradients is None:
        names, tasks = list(DISTRIBUTIONS), list(list_tasks())
        if all(importlib.util.find_spec(name) is not None for name in ("torch", "sklearn")):
            names += tasks
        else:
            print(f"left out: {', '.join(tasks)}; they need pip install 'mpicomp[torch,bench]'")
    data = {
        name: drawn(name, arguments.numel, seed) if name in DISTRIBUTIONS else trained(name, feedback)
        for seed, name in enumerate(names)
    }
    if arguments.gradients is not None:
        arrays = load_gradients(arguments.gradients, WARM + arguments.steps)
        data |= {name: Data(iter(array), feedback) for name, array in arrays.items()}
    found = []
    for name, source in data.items():
        print(f"{name}: {WARM + arguments.steps} steps", flush=True)
        found += measure(name, source, ratios, arguments.steps)
    results.show(found, _COLUMNS)
    if arguments.json is not None:
        results.write(arguments.json, found, 1)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
