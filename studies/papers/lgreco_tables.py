"""Bytes of L-GreCo at equal quality, for three families: ``python studies/papers/lgreco_tables.py``."""

import itertools
from argparse import Namespace
from statistics import fmean
from typing import Any

import paper_runs
from study_rows import Rows

from mpicomp.cli.options import read_list

FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "top-k": ({"id": "topk", "ratio": 0.01}, "allgather"),
    "PowerSGD": ({"id": "powersgd", "rank": 4}, "auto"),
    "QSGD": ({"id": "qsgd", "bits": 4, "rounding": "nearest"}, "two-phase"),
}
"""The uniform setting of each, and its collective."""
ALPHAS = (0.5, 1.0, 2.0, 4.0)


def arms(steps: int) -> dict[str, dict[str, Any]]:
    """Return the policies by name; adjustments come as often as in the paper's runs."""
    every = max(12, steps // 10)
    base = {"id": "lgreco", "first": every, "every": every}
    found: dict[str, dict[str, Any]] = {"uniform": base | {"span": 1.0}}
    found |= {f"here, alpha {alpha:g}": base | {"alpha": alpha} for alpha in ALPHAS}
    return found | {
        "here, span 2": base | {"span": 2.0},
        "as published": base | {"as_published": True, "span": 2.0},
        "as published, span 8": base | {"as_published": True, "span": 8.0},
    }


def train(task: str, family: str, arm: str, seed: int, ranks: int, steps: int) -> dict[str, Any]:
    exchange = paper_runs.DENSE
    if family != "dense":
        compressor, collective = FAMILIES[family]
        exchange = paper_runs.Arm(compressor, collective, arms(steps)[arm])
    row = paper_runs.train(exchange, task, steps, ranks, seed)
    row.pop("plans")
    return row


def measure(rows: Rows, arguments: Namespace) -> None:
    families = ("dense", *read_list(arguments.families))
    for seed, task, family in itertools.product(arguments.seeds, arguments.tasks, families):
        for arm in [""] if family == "dense" else arguments.arms:
            key = (task, family, arm, seed)
            rows.measure(key, train, *key, arguments.ranks, arguments.steps)


def show(rows: Rows, arguments: Namespace) -> None:
    lines: list[dict[str, Any]] = []
    for task, of_task in paper_runs.grouped(rows.made, "task").items():
        families, lower = paper_runs.grouped(of_task, "family"), task.startswith("text")
        dense = families.get("dense", [])
        dense_bytes, best = (fmean(row[name] for row in dense or [{name: 0}]) for name in ("late_bytes", "quality"))
        for family in FAMILIES:
            by_arm = paper_runs.grouped(families.get(family, []), "arm")
            for arm, same in by_arm.items():
                quality, late = (fmean(row[name] for row in same) for name in ("quality", "late_bytes"))
                uniform = by_arm.get("uniform")
                equal = quality <= 1.01 * best if lower else quality >= best - 0.01
                lines.append({
                    "task": task, "family": family, "arm": arm, "quality": quality, "KB": late / 1e3,
                    "of dense": dense_bytes / late if dense else None,
                    "uniform over": fmean(row["late_bytes"] for row in uniform) / late if uniform else None,
                    "equal": ("yes" if equal else "no") if dense else "",
                })  # fmt: skip
        if dense:
            lines.append({"task": task, "family": "dense", "arm": "", "quality": best, "KB": dense_bytes / 1e3,
                          "of dense": 1.0, "uniform over": None, "equal": ""})  # fmt: skip
    paper_runs.show("Bytes that a rank hands to the transport in a step, and quality", lines, {
        "task": "", "family": "", "arm": "", "quality": ".4f", "KB": ".1f", "of dense": ".1f", "uniform over": ".2f",
        "equal": "",
    }, [
        "the paper: up to 5 times fewer bytes than uniform with full accuracy; figures of models were not to be had",
        f"here: {arguments.ranks} ranks, mean over seeds; bytes are of the last third of the steps",
        "uniform over: bytes of the uniform setting over these; equal: within 0.01 of dense in accuracy, 1 % in loss",
        "as published: the switch of that name, with settings from half to twice the uniform one and adjustments as "
        "often as in the other arms; here: from an eighth to eight times for top-k",
        "uniform: the same setting for each layer, which top-k selects from by itself",
    ])  # fmt: skip


STUDY = paper_runs.Study(
    "lgreco_tables", "Show L-GreCo's bytes next to those of uniform settings.", ("task", "family", "arm", "seed"),
    measure, show, "resnet20", 160, 4, 24, arms=arms,
    options={"--families": (",".join(FAMILIES), "F[,..]", "of compressors")},
)  # fmt: skip

if __name__ == "__main__":
    STUDY.main()
