"""SIDCo beside its paper: how near estimates come, and time to a quality: ``python studies/papers/sidco.py``."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import beside
import estimators

from mpicomp.cli import run_program
from mpicomp.cli.options import check_least, read_list
from mpicomp.compressors.base import check_ratio

_STUDY = "sidco"
_KEY = ("table", "data", "name", "ratio", "seed")
_RATIOS = (0.01, 0.001)
_NUMEL = 1_000_000  # elements that are drawn
_SHARE = 0.94  # of a dense step of the paper's LSTM on PTB that is communication
_PROBE = 6  # steps from which computing is known

DISTRIBUTIONS = ("exponential", "gamma", "pareto")
OTHERS = ("dgc", "gaussiank", "redsync.binary", "redsync.trimmed")
SAID = {
    "sidco published": "near 1", "sidco here": "near 1", "dgc": "near 1", "gaussiank": "off by orders of magnitude",
    "redsync.binary": "off by orders of magnitude", "redsync.trimmed": "",
}  # fmt: skip
"""What the paper shows at a ratio of 0.001; its figures are curves."""


def arms(ratio: float) -> dict[str, beside.Arm]:
    """Return the exchanges by name."""
    sparse: dict[str, dict[str, Any]] = {
        "topk": {"id": "topk"},
        "dgc": {"id": "dgc"},
        "sidco published": {"id": "sidco", "published": True},
        "sidco here": {"id": "sidco"},
    }
    return {
        "dense": beside.DENSE,
        **{name: beside.Arm({**own, "ratio": ratio}, "allgather") for name, own in sparse.items()},
    }


_SPEEDUPS = {"dense": 41.7, "topk": 7.6, "dgc": 1.9}
"""The paper's largest: SIDCo over these."""


def estimate(data: str, steps: int) -> dict[str, Any]:
    """Let one estimator, in all its forms, select from data; return its rows."""
    import resnet  # noqa: F401, registers its task

    drawn = data in estimators._DISTRIBUTIONS
    seed = sorted(estimators._DISTRIBUTIONS).index(data) if drawn else 0
    source = estimators.drawn(data, _NUMEL, seed) if drawn else estimators.trained(data, True)
    sidco = [f"sidco.{own}{form}" for own in DISTRIBUTIONS for form in (".published", "")]
    found = estimators.measure(data, source, _RATIOS, steps, [*sidco, *OTHERS])
    return {"found": [{key: row[key] for key in ("name", "ratio", "mean", "min", "max")} for row in found]}


def probe(task: str, ranks: int) -> dict[str, Any]:
    """Find how long a step computes; return the row."""
    row = beside.train(beside.DENSE, task, _PROBE, ranks)
    return {key: row[key] for key in ("compute_s", "numel")}


def train(
    task: str, arm: str, ratio: float, seed: int, probe: Mapping[str, Any], ranks: int, steps: int
) -> dict[str, Any]:
    """Train on a network on which dense spends the paper's share of a step in communication."""
    compute_s = probe["compute_s"]
    bits = beside.bits_for(_SHARE, compute_s, probe["numel"], ranks)
    simulated = beside.Simulated(lambda step: beside.Link(0.0, bits), compute_s)
    row = beside.train(arms(ratio)[arm], task, steps, ranks, seed, simulated)
    seconds = [seconds for seconds, *_ in row.pop("plans")]
    return row | {"step_s": fmean(seconds[2:]), "bits": bits}


def _estimates(rows: Sequence[Mapping[str, Any]]) -> None:
    lines: dict[tuple[str, str, float], dict[str, Any]] = {}
    every: list[str] = []
    for row in rows:
        if row["table"] != "estimates":
            continue
        for own in row["found"]:
            every.append(row["data"])
            label, form = own["name"], ""
            if label.startswith("sidco."):
                form = "published" if label.endswith(".published") else "here"
                label = label.removesuffix(".published")
            line = lines.setdefault((label, form, own["ratio"]), {"name": label, "form": form, "ratio": own["ratio"]})
            line[row["data"]] = own["mean"]
    data = list(dict.fromkeys(every))
    for line in lines.values():
        shares = [math.log(max(line[name], 1e-3)) for name in data if name in line]
        line["off"] = math.exp(sum(map(abs, shares)) / len(shares))
        line["worst"] = math.exp(max(map(abs, shares)))
        said = SAID[f"sidco {line['form']}"] if line["form"] else SAID[line["name"]]
        line["paper"] = said if line["ratio"] == 0.001 else ""
    shown = sorted(lines.values(), key=lambda line: (-line["ratio"], line["name"], line["form"]))
    blank = dict.fromkeys(data)
    beside.show("Selected elements over those asked for", [blank | line for line in shown], {
        "name": "", "form": "", "ratio": "g", **dict.fromkeys(data, ".2f"), "off": ".2f", "worst": ".2f", "paper": "",
    }, [
        "off: factor from 1, geometric mean over data, worst: the largest; published: the switch of that name",
        "the paper's figures are curves over training; its data: ResNet-20, VGG-16, LSTMs, with error feedback",
        "gaussiank and redsync are bounded by 4 k + 1024 elements here, and sidco by an exact top-k where it fails; "
        "published, an estimate that fails is sent as it is",
    ])  # fmt: skip


def _times_to_quality(rows: Sequence[Mapping[str, Any]]) -> None:
    found = []
    trained = [row for row in rows if row["table"] == "train"]
    for task, ratio in dict.fromkeys((row["data"], row["ratio"]) for row in trained):
        by_seed = {}
        for seed in dict.fromkeys(row["seed"] for row in trained):
            own = [
                row for row in trained if (row["data"], row["seed"]) == (task, seed) and row["ratio"] in (ratio, 1.0)
            ]
            if any(row["ratio"] == ratio for row in own):
                by_seed[seed] = _times(own, task)
        for arm in arms(ratio) if ratio < 1 else ():
            same = [lines[arm] for lines in by_seed.values() if arm in lines]
            if not same:
                continue
            line: dict[str, Any] = {"task": task, "ratio": ratio, "arm": arm, "seeds": len(same)}
            line["quality"] = beside.of_seeds([own["quality"] for own in same], ".3f")
            line["steps"] = ", ".join(str(own["steps"]) for own in same)
            line["step_s"] = fmean(own["step_s"] for own in same)
            for name in ("seconds", *_FORMS):
                values = [own[name] for own in same if own[name] is not None]
                line[name] = beside.of_seeds(values, ".2f") if values else ""
            found.append(line | {"bits": same[0]["bits"], "paper": _SPEEDUPS.get(arm)})
    beside.show("Time to a quality that all reach", found, {
        "task": "", "ratio": "g", "arm": "", "seeds": "d", "quality": "", "steps": "", "step_s": ".3f", "seconds": "",
        "bits": ".3g", "published": "", "here": "", "paper": ".1f",
    }, [
        "published, here: seconds of this arm over those of SIDCo in each form; paper: its largest such speed-up",
        f"bits: in a second, where dense spends {_SHARE:.0%} of a step in communication, as the paper's LSTM on PTB",
        "means over seeds, with the range; the quality is the worst that an exchange ends with, of each seed",
        "the network is simulated, and ranks' own work is in processor time; the paper: 8 V100, all on GPUs",
    ])  # fmt: skip


_FORMS = ("published", "here")


def _times(rows: Sequence[Mapping[str, Any]], task: str) -> dict[str, dict[str, Any]]:
    """Return the time to the worst last quality of all exchanges, which are of one seed, by exchange."""
    lower = task.startswith("text")
    worst = (max if lower else min)(row["curve"][-1][1] for row in rows)
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        steps = beside.steps_to(row, worst, lower)
        seconds = None if steps is None else steps * row["step_s"]
        lines[row["name"]] = {
            "quality": row["quality"], "steps": steps, "step_s": row["step_s"], "seconds": seconds, "bits": row["bits"],
        }  # fmt: skip
    for line in lines.values():
        for form in _FORMS:
            ours = lines.get(f"sidco {form}", {}).get("seconds")
            line[form] = line["seconds"] / ours if ours and line["seconds"] else None
    return lines


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        prog="studies/papers/sidco.py",
        description="Show SIDCo's estimates and its time to a quality beside its paper's.",
    )
    data = ",".join([*estimators._DISTRIBUTIONS, "resnet20", "vgg", "text-lstm"])
    parser.add_argument("--data", default=data, metavar="D[,..]", help="selected from (%(default)s)")
    parser.add_argument("--tasks", default="text-lstm", metavar="T[,..]", help="trained (%(default)s)")
    parser.add_argument("--estimates", type=int, default=20, metavar="S", help="steps that are counted (%(default)s)")
    parser.add_argument("--steps", type=int, default=150, metavar="S", help="of a training (%(default)s)")
    parser.add_argument("--ratio", type=float, default=0.01, metavar="R", help="of a training (%(default)s)")
    parser.add_argument("--seeds", default="0", metavar="K[,..]", help="of trainings (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="(%(default)s)")
    beside.add_arguments(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Measure what is not there yet, and print the tables."""
    for name in ("estimates", "steps", "ranks"):
        check_least(_STUDY, f"--{name}", getattr(arguments, name))
    rows = beside.begin(_STUDY, arguments, _KEY)
    check_ratio(f"{_STUDY}: --ratio", arguments.ratio)
    tasks, ranks, ratio = read_list(arguments.tasks), arguments.ranks, arguments.ratio
    for data in read_list(arguments.data):
        rows.complete(("estimates", data, "all", 0.0, 0), estimate, data, arguments.estimates)
    for task in tasks:
        rows.complete(("probe", task, "dense", 0.0, 0), probe, task, ranks)
        probed = rows.find("probe", task, "dense", 0.0, 0)
        for seed in map(int, read_list(arguments.seeds)) if probed is not None else ():
            for arm in arms(ratio):
                key = task, arm, 1.0 if arm == "dense" else ratio, seed
                rows.complete(("train", *key), train, *key, probed, ranks, arguments.steps)
    _estimates(rows.made)
    _times_to_quality(rows.made)
    beside.late(rows)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
