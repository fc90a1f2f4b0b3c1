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

_STUDY = "sidco"
_KEY = ("table", "data", "name")
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

ARMS = {
    "dense": beside.DENSE,
    "topk": beside.Arm({"id": "topk", "ratio": 0.01}, "allgather"),
    "dgc": beside.Arm({"id": "dgc", "ratio": 0.01}, "allgather"),
    "sidco published": beside.Arm({"id": "sidco", "ratio": 0.01, "published": True}, "allgather"),
    "sidco here": beside.Arm({"id": "sidco", "ratio": 0.01}, "allgather"),
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
    row = beside.train(ARMS["dense"], task, _PROBE, ranks)
    return {key: row[key] for key in ("compute_s", "numel")}


def train(task: str, arm: str, probe: Mapping[str, Any], ranks: int, steps: int) -> dict[str, Any]:
    """Train on a network on which dense spends the paper's share of a step in communication."""
    compute_s = probe["compute_s"]
    bits = beside.bits_for(_SHARE, compute_s, probe["numel"], ranks)
    simulated = beside.Simulated(lambda step: beside.Link(0.0, bits), compute_s)
    row = beside.train(ARMS[arm], task, steps, ranks, simulated=simulated)
    seconds = [seconds for seconds, *_ in row.pop("plans")]
    return row | {"step_s": fmean(seconds[2:]), "bits": bits}


def _tables(rows: Sequence[Mapping[str, Any]]) -> None:
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

    found = []
    for task in dict.fromkeys(row["data"] for row in rows if row["table"] == "train"):
        trained = {row["name"]: row for row in rows if row["table"] == "train" and row["data"] == task}
        lower = task.startswith("text")
        worst = (max if lower else min)(row["curve"][-1][1] for row in trained.values())
        own = []
        for arm, row in trained.items():
            steps = beside.steps_to(row, worst, lower)
            own.append({"task": task, "arm": arm, "quality": row["quality"], "steps": steps, "step_s": row["step_s"],
                        "seconds": None if steps is None else steps * row["step_s"], "bits": row["bits"]})  # fmt: skip
        for line in own:
            for form in ("published", "here"):
                ours = next((row["seconds"] for row in own if row["arm"] == f"sidco {form}"), None)
                line[form] = line["seconds"] / ours if ours and line["seconds"] else None
            line["paper"] = _SPEEDUPS.get(line["arm"])
        found += own
    beside.show("Time to a quality that all reach", found, {
        "task": "", "arm": "", "quality": ".4f", "steps": "d", "step_s": ".3f", "seconds": ".1f", "bits": ".3g",
        "published": ".2f", "here": ".2f", "paper": ".1f",
    }, [
        "published, here: seconds of this arm over those of SIDCo in each form; paper: its largest such speed-up",
        f"bits: in a second, where dense spends {_SHARE:.0%} of a step in communication, as the paper's LSTM on PTB",
        "ratio 0.01, where the paper's largest is at 0.001, at which these few steps learn nothing",
        "the network is simulated, and ranks' own work is in processor time; the paper: 8 V100, all on GPUs",
    ])  # fmt: skip


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
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="(%(default)s)")
    beside.add_arguments(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Measure what is not there yet, and print the tables."""
    for name in ("estimates", "steps", "ranks"):
        check_least(_STUDY, f"--{name}", getattr(arguments, name))
    rows = beside.begin(_STUDY, arguments, _KEY)
    tasks, ranks = read_list(arguments.tasks), arguments.ranks
    for data in read_list(arguments.data):
        rows.complete(("estimates", data, "all"), estimate, data, arguments.estimates)
    for task in tasks:
        rows.complete(("probe", task, "dense"), probe, task, ranks)
        probed = rows.find("probe", task, "dense")
        for arm in ARMS if probed is not None else ():
            rows.complete(("train", task, arm), train, task, arm, probed, ranks, arguments.steps)
    _tables(rows.made)
    beside.late(rows)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
