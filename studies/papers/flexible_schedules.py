"""The schedules C1 and C2 of Flexible Communication: ResNet-20 is trained on a simulated network that changes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import beside
import numpy as np

_FAR, _NEAR = 50, 1  # milliseconds
SCHEDULES: dict[str, list[tuple[int, float, float]]] = {
    "C1": [(12, _NEAR, 25), (12, _NEAR, 1), (12, _FAR, 1), (14, _FAR, 25)],
    "C2": [(12, _NEAR, 25), (8, 25, 13), (8, _FAR, 1), (8, 25, 13), (14, _NEAR, 25)],
}
"""Phases: epochs, milliseconds and Gbit/s; what is moderate is not printed, and here between the two."""
_COMPUTE_S = 0.01
"""What the ring's formula leaves of a dense step of the paper's ResNet-18."""


def arms(steps: int) -> dict[str, beside.Arm]:
    """Return the exchanges of schedules; as five of the paper's fifty epochs, a tenth of the steps is a ramp."""
    return {
        "dense": beside.DENSE,
        "top-k 0.01 by allgather": beside.Arm({"id": "topk", "ratio": 0.01}, "allgather"),
        "as published": beside.Arm(policy={"id": "flexible", "published": True, "ramp": steps // 10}),
        "here": beside.Arm(policy={"id": "flexible", "every": 50}),
    }


_PRINTED_TOP1 = {"dense": 90.8, "C1": 89.88, "C2": 90.1}  # ResNet18 on CIFAR100
_SCALE = 43  # ResNet-18 has so many times the parameters of ResNet-20


def phases(schedule: str, steps: int) -> list[tuple[str, beside.Link]]:
    """Return the network of each step, with a name.

    Examples
    --------
    >>> [name for name, _ in phases("C1", 4)]
    ['1 ms, 25 Gbit/s', '1 ms, 1 Gbit/s', '50 ms, 1 Gbit/s', '50 ms, 25 Gbit/s']
    """
    of_epoch = []
    for epochs, latency_ms, gbps in SCHEDULES[schedule]:
        link = beside.Link(latency_ms / 1e3, gbps * 1e9 / _SCALE)
        of_epoch += [(f"{latency_ms:g} ms, {gbps:g} Gbit/s", link)] * epochs
    return [of_epoch[step * len(of_epoch) // steps] for step in range(steps)]


def train(schedule: str, arm: str, steps: int, ranks: int) -> dict[str, Any]:
    """Train ResNet-20 on a simulated network that changes; return the row."""
    networks = phases(schedule, steps)
    simulated = beside.Simulated(lambda step: networks[step][1], _COMPUTE_S)
    row = beside.train(arms(steps)[arm], "resnet20", steps, ranks, simulated=simulated)
    told: dict[str, dict[str, Any]] = {}
    done = 0
    for seconds, kept, collective, reason in row.pop("plans"):
        name, _ = networks[done]
        phase = told.setdefault(name, {"trials": 0, "seconds": 0.0, "ratios": [], "ran": Counter[str]()})
        phase["seconds"] += seconds
        if beside.TRIAL in reason:
            phase["trials"] += 1
        else:
            done += 1
            phase["ratios"].append(kept)
            phase["ran"][collective] += 1
    for phase in told.values():
        ratios = phase.pop("ratios")
        phase["ratio"] = float(np.median(ratios)) if ratios else None
    return row | {"phases": told, "ranks": ranks}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the tables of those rows that are of schedules."""
    found, parts = [], []
    for row in rows:
        if row["table"] != "schedule":
            continue
        of_dense = next((own for own in rows if own["model"] == row["model"] and own["ratio"] == "dense"), None)
        told, own_arm = row["phases"], {"schedule": row["model"], "arm": row["ratio"]}
        whole = _whole(row)
        found.append(own_arm | {
            "accuracy": 100 * row["quality"], "seconds": whole, "trials": sum(own["trials"] for own in told.values()),
            "paper": _PRINTED_TOP1[row["ratio"] if row["ratio"] == "dense" else row["model"]] if row["ratio"] in
            ("dense", "as published") else None,
            "over dense": None if of_dense is None else _whole(of_dense) / whole,
        })  # fmt: skip
        for name, own in told.items():
            ran = own["ran"]
            parts.append(own_arm | {
                "network": name, "step": 1e3 * own["seconds"] / (own["trials"] + sum(ran.values())),
                "ratio": own["ratio"], "steps": sum(ran.values()), "trials": own["trials"],
                "by": ", ".join(f"{other} {ran[other]}" for other in sorted(ran, key=lambda other: -ran[other])),
            })  # fmt: skip
    beside.show("Schedules C1 and C2", found, {
        "schedule": "", "arm": "", "paper": ".2f", "accuracy": ".2f", "seconds": ".1f", "over dense": ".2f",
        "trials": "d",
    }, [
        "paper: ResNet18 on CIFAR100, 8 GPUs; here: ResNet-20 on 5,000 images of MNIST on a simulated network, whose "
        f"bandwidths are {_SCALE} times lower, as the model is smaller",
        f"seconds: of rounds, by formulas, and {1e3 * _COMPUTE_S:g} ms of computing in each step; trials: steps of "
        "searches, which are undone and come besides",
    ])  # fmt: skip
    beside.show("Schedules C1 and C2 by network: mean milliseconds of a step, median ratio, collectives", parts, {
        "schedule": "", "arm": "", "network": "", "step": ".0f", "ratio": ".3g", "steps": "d", "trials": "d", "by": "",
    })  # fmt: skip


def _whole(row: Mapping[str, Any]) -> float:
    return float(sum(own["seconds"] for own in row["phases"].values()))
