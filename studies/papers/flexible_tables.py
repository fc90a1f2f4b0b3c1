"""The schedules of Flexible Communication: ``python studies/papers/flexible_tables.py``."""

import itertools
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))  # where the other studies are

import numpy as np
import paper_runs
from study_rows import Rows, Study, show

_FAR, _NEAR = 50, 1  # milliseconds
SCHEDULES: dict[str, list[tuple[int, float, float]]] = {
    "C1": [(12, _NEAR, 25), (12, _NEAR, 1), (12, _FAR, 1), (14, _FAR, 25)],
    "C2": [(12, _NEAR, 25), (8, 25, 13), (8, _FAR, 1), (8, 25, 13), (14, _NEAR, 25)],
}
"""Phases: epochs, milliseconds and Gbit/s; moderate ones are not printed, and here between the two."""
_PRINTED_TOP1 = {"dense": 90.8, "C1": 89.88, "C2": 90.1}  # ResNet18 on CIFAR100
_SCALE = 43  # parameters of ResNet-18 over those of ResNet-20
_COMPUTE_S = 0.01  # a dense step of the paper's ResNet-18, less the ring's formula


def arms(steps: int) -> dict[str, paper_runs.Arm]:
    """Return the exchanges of schedules; as five of the paper's fifty epochs, a tenth of the steps is a ramp."""
    published = {"ramp": steps // 10}
    return {
        "dense": paper_runs.DENSE,
        **{f"top-k {ratio:g} by allgather": paper_runs.Arm({"id": "topk", "ratio": ratio}, "allgather")
           for ratio in (0.01, 0.033)},
        **{f"ramp, then 0.011 by {name}": paper_runs.Arm({"id": "topk"}, name, {
            "id": "schedule", "begin": 1.0, "end": 0.011, "steps": steps // 10, "shape": "linear",
        }) for name in ("allgather", "star-topk:ring")},
        "as published": paper_runs.Arm(search=published),
        "as published, averages left": paper_runs.Arm(search=published, buffers=False),
        "here": paper_runs.Arm(policy={"id": "flexible", "every": 50}),
    }  # fmt: skip


def phases(schedule: str, steps: int) -> list[tuple[str, paper_runs.Link]]:
    """Return the network of each step, with a name.

    >>> [name for name, _ in phases("C1", 4)]
    ['1 ms, 25 Gbit/s', '1 ms, 1 Gbit/s', '50 ms, 1 Gbit/s', '50 ms, 25 Gbit/s']
    """
    of_epoch = []
    for epochs, latency_ms, gbps in SCHEDULES[schedule]:
        link = paper_runs.Link(latency_ms / 1e3, gbps * 1e9 / _SCALE)
        of_epoch += [(f"{latency_ms:g} ms, {gbps:g} Gbit/s", link)] * epochs
    return [of_epoch[step * len(of_epoch) // steps] for step in range(steps)]


def train(schedule: str, arm: str, steps: int, ranks: int, seed: int = 0) -> dict[str, Any]:
    """Train ResNet-20 on a simulated network that changes; return the row."""
    networks = phases(schedule, steps)
    simulated = paper_runs.Simulated(lambda step: networks[step][1], _COMPUTE_S)
    row = paper_runs.train(arms(steps)[arm], "resnet20", steps, ranks, seed, simulated)
    found: dict[str, dict[str, Any]] = {}
    done = 0
    for seconds, kept, collective, reason in row.pop("plans"):
        name, _ = networks[done]
        phase = found.setdefault(name, {"trials": 0, "seconds": 0.0, "ratios": [], "ran": Counter[str]()})
        phase["seconds"] += seconds
        if paper_runs.TRIAL in reason:
            phase["trials"] += 1
        else:
            done += 1
            phase["ratios"].append(kept)
            phase["ran"][collective] += 1
    for phase in found.values():
        ratios = phase.pop("ratios")
        phase["ratio"] = float(np.median(ratios)) if ratios else None
    return row | {"phases": found, "ranks": ranks}


def rows(_: Rows, arguments: Namespace) -> Iterator[tuple[Any, ...]]:
    for seed, schedule, arm in itertools.product(arguments.seeds, arguments.schedules, arguments.arms):
        yield (schedule, arm, seed), train, schedule, arm, arguments.steps, arguments.ranks, seed


def tables(measured: Rows, _: Namespace) -> None:
    lines, parts = [], []
    by_arm = paper_runs.grouped(measured.made, "schedule", "arm")
    for (schedule, arm), same in by_arm.items():
        dense = {row["seed"]: _whole(row) for row in by_arm.get((schedule, "dense"), ())}
        over = [dense[row["seed"]] / _whole(row) for row in same if row["seed"] in dense]
        printed = {"dense": _PRINTED_TOP1["dense"], "as published": _PRINTED_TOP1[schedule]}
        lines.append({
            "schedule": schedule, "arm": arm, "seeds|d": len(same), "paper|.2f": printed.get(arm),
            "accuracy": paper_runs.of_seeds([100 * row["quality"] for row in same], ".1f"),
            "seconds|.1f": fmean(map(_whole, same)), "over dense|.2f": fmean(over) if over else None,
            "trials": ", ".join(str(sum(phase["trials"] for phase in row["phases"].values())) for row in same),
        })  # fmt: skip
        for name in same[0]["phases"]:
            of_seeds = [row["phases"][name] for row in same]
            ran = sum((Counter[str](phase["ran"]) for phase in of_seeds), Counter[str]())
            trials, steps = sum(phase["trials"] for phase in of_seeds), ran.total()
            parts.append({
                "schedule": schedule, "arm": arm, "network": name,
                "step|.0f": 1e3 * sum(phase["seconds"] for phase in of_seeds) / (trials + steps),
                "ratio": paper_runs.of_seeds([phase["ratio"] for phase in of_seeds], ".3g"),
                "steps|d": steps, "trials|d": trials,
                "by": ", ".join(f"{other} {count}" for other, count in ran.most_common()),
            })  # fmt: skip
    show("Schedules C1 and C2, means over seeds, with the range", lines, [
        "paper: ResNet18 on CIFAR100, 8 GPUs; here: ResNet-20 on 5,000 images of MNIST on a simulated network, whose "
        f"bandwidths are {_SCALE} times lower, as the model is smaller",
        f"seconds: of rounds, by formulas, and {1e3 * _COMPUTE_S:g} ms of computing in each step; trials: steps of "
        "searches, which are undone and come besides, of each seed",
    ])  # fmt: skip
    show("Schedules C1 and C2 by network: mean milliseconds of a step, median ratio, collectives", parts)


def _whole(row: Mapping[str, Any]) -> float:
    return float(sum(phase["seconds"] for phase in row["phases"].values()))


STUDY = Study(
    "papers/flexible_tables", "Simulate the schedules of Flexible Communication.", ("schedule", "arm", "seed"), rows,
    tables,
    paper_runs.options("", 400, 4, "a scheduled training") | paper_runs.ARMS
    | {"--schedules": ("C1,C2", "C[,..]", "trained on")},
    {"steps": 50, "ranks": 1},
    {"arms": lambda arguments: arms(arguments.steps), "schedules": lambda _: SCHEDULES},
)  # fmt: skip

if __name__ == "__main__":
    STUDY.main()
