"""SIDCo and its paper: how near estimates come, and time to a quality: ``python studies/papers/sidco_tables.py``."""

import itertools
import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import paper_runs
import sidco_estimates
from study_rows import Rows

from mpicomp.cli.options import read_list
from mpicomp.setting_checks import check_least, check_ratio

_NAME = "sidco_tables"
_RATIOS = (0.01, 0.001)
_NUMEL = 1_000_000  # elements that are drawn
_SHARE = 0.94  # of a dense step of the paper's LSTM on PTB that is communication
_PROBE = 6  # steps from which computing is known

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


def estimate(data: str, steps: int) -> dict[str, Any]:
    """Select from data with one estimator in all its forms; return its rows."""
    import paper_tasks  # noqa: F401, registers tasks

    is_drawn = data in sidco_estimates.DISTRIBUTIONS
    gradients = sidco_estimates.drawn(data, _NUMEL) if is_drawn else sidco_estimates.trained(data)
    labels = [f"{name}{form}" for name in sidco_estimates.SIDCO for form in (".published", "")]
    return {"found": sidco_estimates.measure(gradients, not is_drawn, _RATIOS, steps, [*labels, *OTHERS])}


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


def _show_estimates(rows: Sequence[Mapping[str, Any]]) -> None:
    lines: dict[tuple[str, str, float], dict[str, Any]] = {}
    estimates = [row for row in rows if row["table"] == "estimates"]
    data = list(dict.fromkeys(row["data"] for row in estimates if row["found"]))
    for row in estimates:
        for found in row["found"]:
            label, form = found["name"], ""
            if label.startswith("sidco."):
                form = "published" if label.endswith(".published") else "here"
                label = label.removesuffix(".published")
            key = label, form, found["ratio"]
            lines.setdefault(key, dict(zip(("name", "form", "ratio"), key, strict=True)))[row["data"]] = found["mean"]
    for line in lines.values():
        shares = [math.log(max(line[name], 1e-3)) for name in data if name in line]
        line["off"] = math.exp(sum(map(abs, shares)) / len(shares))
        line["worst"] = math.exp(max(map(abs, shares)))
        printed = PRINTED[f"sidco {line['form']}" if line["form"] else line["name"]]
        line["paper"] = printed if line["ratio"] == 0.001 else ""
    shown = sorted(lines.values(), key=lambda line: (-line["ratio"], line["name"], line["form"]))
    blank = dict.fromkeys(data)
    paper_runs.show("Selected elements over those asked for", [blank | line for line in shown], {
        "name": "", "form": "", "ratio": "g", **dict.fromkeys(data, ".2f"), "off": ".2f", "worst": ".2f", "paper": "",
    }, [
        "off: factor from 1, geometric mean over data, worst: the largest; published: the switch of that name",
        "the paper's figures are curves over training; its data: ResNet-20, VGG-16, LSTMs, with error feedback",
        "gaussiank and redsync are bounded by 4 k + 1024 elements here, and sidco by an exact top-k where it fails; "
        "published, an estimate that fails is sent uncorrected",
    ])  # fmt: skip


def _show_times(rows: Sequence[Mapping[str, Any]]) -> None:
    lines = []
    trained = [row for row in rows if row["table"] == "train"]
    for task, ratio in dict.fromkeys((row["data"], row["ratio"]) for row in trained):
        by_seed = []
        for seed in dict.fromkeys(row["seed"] for row in trained):
            same = [row for row in trained if (row["data"], row["seed"]) == (task, seed)]
            if any(row["ratio"] == ratio for row in same):
                by_seed.append(_times([row for row in same if row["ratio"] in (ratio, 1.0)], task))
        for arm in arms(ratio) if ratio < 1 else ():
            found = [times[arm] for times in by_seed if arm in times]
            if not found:
                continue
            line: dict[str, Any] = {"task": task, "ratio": ratio, "arm": arm, "seeds": len(found)}
            line["quality"] = paper_runs.of_seeds([times["quality"] for times in found], ".3f")
            line["steps"] = ", ".join(str(times["steps"]) for times in found)
            line["step_s"] = fmean(times["step_s"] for times in found)
            for name in ("seconds", *_FORMS):
                values = [times[name] for times in found if times[name] is not None]
                line[name] = paper_runs.of_seeds(values, ".2f") if values else ""
            lines.append(line | {"bits": found[0]["bits"], "paper": _SPEEDUPS.get(arm)})
    paper_runs.show("Time to a quality that all reach", lines, {
        "task": "", "ratio": "g", "arm": "", "seeds": "d", "quality": "", "steps": "", "step_s": ".3f", "seconds": "",
        "bits": ".3g", "published": "", "here": "", "paper": ".1f",
    }, [
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


def measure(rows: Rows, arguments: Namespace) -> None:
    check_least(_NAME, "--estimates", arguments.estimates)
    check_ratio(f"{_NAME}: --ratio", arguments.ratio)
    ranks, ratio = arguments.ranks, arguments.ratio
    for data in read_list(arguments.data):
        rows.measure(("estimates", data, "all", 0.0, 0), estimate, data, arguments.estimates)
    for task in arguments.tasks:
        rows.measure(("probe", task, "dense", 0.0, 0), probe, task, ranks)
        probed = rows.find("probe", task, "dense", 0.0, 0)
        for seed, arm in itertools.product(arguments.seeds, arms(ratio)) if probed is not None else ():
            key = task, arm, 1.0 if arm == "dense" else ratio, seed
            rows.measure(("train", *key), train, *key, probed, ranks, arguments.steps)


def show(rows: Rows, arguments: Namespace) -> None:
    _show_estimates(rows.made)
    _show_times(rows.made)


_DATA = ",".join([*sidco_estimates.DISTRIBUTIONS, "resnet20", "vgg", "text-lstm"])
STUDY = paper_runs.Study(
    _NAME, "Show SIDCo's estimates and its time to a quality next to its paper's.",
    ("table", "data", "name", "ratio", "seed"), measure, show, "text-lstm", 150, 4,
    options={"--data": (_DATA, "D[,..]", "selected from"), "--estimates": (20, "S", "steps that are counted"),
             "--ratio": (0.01, "R", "of a training")},
)  # fmt: skip

if __name__ == "__main__":
    STUDY.main()
