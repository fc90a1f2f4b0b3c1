"""SIDCo and its paper: how near estimates come, and time to a quality: ``python studies/papers/sidco_tables.py``."""

import itertools
import math
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import paper_runs
from mpicomp.bench.measure.feedback import Selecting, make_bucket
from mpicomp.bench.tasks import get_task
from numpy.typing import NDArray
from study_rows import Rows, SharedModel, Study, show

from mpicomp.compressors import Sparsifier, get_compressor
from mpicomp.compressors.base_compressor import num_kept
from mpicomp.setting_checks import check_ratio

_RATIOS = (0.01, 0.001)
_NUMEL = 1_000_000  # elements that are drawn
_SHARE = 0.94  # of a dense step of the paper's LSTM on PTB that is communication
_PROBE = 6  # steps from which computing is known
_WARM = 25  # steps in which estimators adapt and nothing is counted
_SIDCO = [f"sidco.{name}{form}" for name in ("exponential", "gamma", "pareto") for form in (".published", "")]
_PARAMETERS = {"sidco": "distribution", "redsync": "search"}  # that the forms of an estimator set

OTHERS = ("dgc", "gaussiank", "redsync.binary", "redsync.trimmed")
PRINTED = {
    "sidco published": "near 1", "sidco here": "near 1", "dgc": "near 1", "gaussiank": "off by orders of magnitude",
    "redsync.binary": "off by orders of magnitude", "redsync.trimmed": "",
}  # fmt: skip
"""The paper's results at a ratio of 0.001; its figures are curves."""
_SPEEDUPS = {"dense": 41.7, "topk": 7.6, "dgc": 1.9}  # the paper's largest: SIDCo over these
_FORMS = ("published", "here")


def arms(ratio: float) -> dict[str, paper_runs.Arm]:
    """Return the exchanges by name."""
    sparse: dict[str, dict[str, Any]] = {
        "topk": {"id": "topk"},
        "dgc": {"id": "dgc"},
        "sidco published": {"id": "sidco", "as_published": True},
        "sidco here": {"id": "sidco"},
    }
    found = {name: paper_runs.Arm({**config, "ratio": ratio}, "allgather") for name, config in sparse.items()}
    return {"dense": paper_runs.DENSE, **found}


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
    config: dict[str, Any] = {"id": name, "ratio": ratio} | ({_PARAMETERS[name]: form[0]} if form else {})
    compressor = get_compressor(config | ({"as_published": True} if label.endswith(".published") else {}))
    assert isinstance(compressor, Sparsifier)
    return compressor


def select(
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
            counts += [count] if step >= _WARM else []
    found = []
    for label, ratio, _, _, counts in running:
        shares = np.array(counts) / num_kept(ratio, gradient.size)
        ends = {"mean": float(shares.mean()), "min": float(shares.min()), "max": float(shares.max())}
        found.append({"name": label, "ratio": ratio} | ends)
    return found


def estimate(data: str, steps: int) -> dict[str, Any]:
    """Select from data with all estimators in all their forms; return the row."""
    import paper_tasks  # noqa: F401, registers tasks

    is_drawn = data in DISTRIBUTIONS
    gradients = drawn(data, _NUMEL) if is_drawn else trained(data)
    return {"found": select(gradients, not is_drawn, _RATIOS, steps, [*_SIDCO, *OTHERS])}


def probe(task: str, ranks: int) -> dict[str, Any]:
    """Find how long a step computes; return the row."""
    row = paper_runs.train(paper_runs.DENSE, task, _PROBE, ranks)
    return {key: row[key] for key in ("compute_s", "numel")}


def train(
    task: str, arm: str, ratio: float, seed: int, probe: Mapping[str, Any], ranks: int, steps: int
) -> dict[str, Any]:
    """Train on a network on which dense spends the paper's share of a step in communication."""
    compute_s = probe["compute_s"]
    bits = paper_runs.bits_for(_SHARE, compute_s, probe["numel"], ranks)
    simulated = paper_runs.Simulated(lambda step: paper_runs.Link(0.0, bits), compute_s)
    row = paper_runs.train(arms(ratio)[arm], task, steps, ranks, seed, simulated)
    seconds = [seconds for seconds, *_ in row.pop("plans")]
    return row | {"step_s": fmean(seconds[2:]), "bits": bits}


def _show_estimates(made: Sequence[Mapping[str, Any]]) -> None:
    estimates = [row for row in made if row["table"] == "estimates" and row["found"]]
    means: dict[tuple[str, str, float], dict[str, float]] = {}
    for row in estimates:
        for found in row["found"]:
            name, dot, _ = found["name"].partition(".published")
            form = "published" if dot else "here" if name.startswith("sidco.") else ""
            means.setdefault((name, form, found["ratio"]), {})[row["data"]] = found["mean"]
    lines = []
    for name, form, ratio in sorted(means, key=lambda key: (-key[2], *key[:2])):
        of_data = means[name, form, ratio]
        shares = [abs(math.log(max(mean, 1e-3))) for mean in of_data.values()]
        lines.append({
            "name": name, "form": form, "ratio|g": ratio,
            **{f"{row['data']}|.2f": of_data.get(row["data"]) for row in estimates},
            "off|.2f": math.exp(fmean(shares)), "worst|.2f": math.exp(max(shares)),
            "paper": PRINTED[f"sidco {form}" if form else name] if ratio == 0.001 else "",
        })  # fmt: skip
    show("Selected elements over those asked for", lines, [
        "off: factor from 1, geometric mean over data, worst: the largest; published: the switch of that name",
        "the paper's figures are curves over training; its data: ResNet-20, VGG-16, LSTMs, with error feedback",
        "gaussiank and redsync are bounded by 4 k + 1024 elements here, and sidco by an exact top-k where it fails; "
        "published, an estimate that fails is sent uncorrected",
    ])  # fmt: skip


def _show_times(made: Sequence[Mapping[str, Any]]) -> None:
    trained, lines = paper_runs.grouped([row for row in made if row["table"] == "train"], "data", "seed"), []
    tasks = dict.fromkeys((task, row["ratio"]) for (task, _), rows in trained.items() for row in rows)
    for task, ratio in tasks:
        seeds = [same for (other, _), same in trained.items() if other == task]
        by_seed = [
            _times([row for row in same if row["ratio"] in (ratio, 1.0)], task)
            for same in seeds
            if any(row["ratio"] == ratio for row in same)
        ]
        for arm in arms(ratio) if ratio < 1 else ():
            found = [times[arm] for times in by_seed if arm in times]
            if not found:
                continue
            over = {name: [each[name] for each in found if each[name] is not None] for name in ("seconds", *_FORMS)}
            lines.append({
                "task": task, "ratio|g": ratio, "arm": arm, "seeds|d": len(found),
                "quality": paper_runs.of_seeds([each["quality"] for each in found], ".3f"),
                "steps": ", ".join(str(each["steps"]) for each in found),
                "step_s|.3f": fmean(each["step_s"] for each in found),
                "seconds": paper_runs.of_seeds(over["seconds"], ".2f"), "bits|.3g": found[0]["bits"],
                **{form: paper_runs.of_seeds(over[form], ".2f") for form in _FORMS},
                "paper|.1f": _SPEEDUPS.get(arm),
            })  # fmt: skip
    show("Time to a quality that all reach", lines, [
        "published, here: seconds of this arm over those of SIDCo in each form; paper: its largest such speed-up",
        f"bits: in a second, where dense spends {_SHARE:.0%} of a step in communication, as the paper's LSTM on PTB",
        "means over seeds, with the range; the quality is the worst that an exchange ends with, of each seed",
        "the network is simulated, and ranks' own work is in processor time; the paper: 8 V100, all on GPUs",
    ])  # fmt: skip


def _times(rows: Sequence[Mapping[str, Any]], task: str) -> dict[str, dict[str, Any]]:
    lower = task.startswith("text")
    worst = (max if lower else min)(row["curve"][-1][1] for row in rows)
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        steps = paper_runs.steps_to(row, worst, lower)
        seconds = None if steps is None else steps * row["step_s"]
        line = {name: row[name] for name in ("quality", "step_s", "bits")}
        lines[row["name"]] = line | {"steps": steps, "seconds": seconds}
    for line in lines.values():
        for form in _FORMS:
            ours = lines.get(f"sidco {form}", {}).get("seconds")
            line[form] = line["seconds"] / ours if ours and line["seconds"] else None
    return lines


def rows(measured: Rows, arguments: Namespace) -> Iterator[tuple[Any, ...]]:
    ratio = check_ratio("sidco_tables: --ratio", arguments.ratio)
    for data in arguments.data:
        yield ("estimates", data, "all", 0.0, 0), estimate, data, arguments.estimates
    for task in arguments.tasks:
        yield ("probe", task, "dense", 0.0, 0), probe, task, arguments.ranks
        probed = measured.find("probe", task, "dense", 0.0, 0)
        for seed, arm in itertools.product(arguments.seeds, arms(ratio)) if probed is not None else ():
            key = task, arm, 1.0 if arm == "dense" else ratio, seed
            yield ("train", *key), train, *key, probed, arguments.ranks, arguments.steps


def tables(measured: Rows, _: Namespace) -> None:
    _show_estimates(measured.made)
    _show_times(measured.made)


_DATA = ",".join([*DISTRIBUTIONS, "resnet20", "vgg", "text-lstm"])
STUDY = Study(
    "papers/sidco_tables", "Show SIDCo's estimates and its time to a quality next to its paper's.",
    ("table", "data", "name", "ratio", "seed"), rows, tables,
    paper_runs.options("text-lstm", 150, 4) | {
        "--data": (_DATA, "D[,..]", "selected from"), "--estimates": (20, "S", "steps that are counted"),
        "--ratio": (0.01, "R", "of a training"),
    },
    {"steps": 1, "ranks": 1, "estimates": 1},
)  # fmt: skip

if __name__ == "__main__":
    STUDY.main()
