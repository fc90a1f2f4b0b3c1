"""Bytes of L-GreCo at equal quality, for three families: ``python studies/papers/lgreco_tables.py``."""

import itertools
from argparse import Namespace
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import paper_runs
from study_rows import Rows, Study, show

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
    return {
        "uniform": base | {"span": 1.0},
        **{f"here, alpha {alpha:g}": base | {"alpha": alpha} for alpha in ALPHAS},
        "here, span 2": base | {"span": 2.0},
        "as published": base | {"as_published": True, "span": 2.0},
        "as published, span 8": base | {"as_published": True, "span": 8.0},
    }


def train(task: str, family: str, arm: str, seed: int, ranks: int, steps: int) -> dict[str, Any]:
    exchange = paper_runs.DENSE
    if family != "dense":
        exchange = paper_runs.Arm(*FAMILIES[family], arms(steps)[arm])
    row = paper_runs.train(exchange, task, steps, ranks, seed)
    row.pop("plans")
    return row


def rows(_: Rows, arguments: Namespace) -> Iterator[tuple[Any, ...]]:
    for seed, task, family in itertools.product(arguments.seeds, arguments.tasks, ("dense", *arguments.families)):
        for arm in [""] if family == "dense" else arguments.arms:
            key = (task, family, arm, seed)
            yield key, train, *key, arguments.ranks, arguments.steps


def tables(measured: Rows, arguments: Namespace) -> None:
    lines: list[dict[str, Any]] = []
    for task, of_task in paper_runs.grouped(measured.made, "task").items():
        means = {
            family_arm: {name: fmean(row[name] for row in same) for name in ("quality", "late_bytes")}
            for family_arm, same in paper_runs.grouped(of_task, "family", "arm").items()
        }
        dense, lower = means.get(("dense", "")), task.startswith("text")
        for family, arm in sorted(means, key=lambda key: [*FAMILIES, "dense"].index(key[0])):
            mean, uniform = means[family, arm], means.get((family, "uniform"))
            equal = ""
            if dense is not None and family != "dense":
                off = mean["quality"] - dense["quality"]
                equal = "yes" if (off <= 0.01 * dense["quality"] if lower else off >= -0.01) else "no"
            lines.append({
                "task": task, "family": family, "arm": arm, "quality|.4f": mean["quality"],
                "KB|.1f": mean["late_bytes"] / 1e3,
                "of dense|.1f": dense and dense["late_bytes"] / mean["late_bytes"],
                "uniform over|.2f": uniform and uniform["late_bytes"] / mean["late_bytes"], "equal": equal,
            })  # fmt: skip
    show("Bytes that a rank hands to the transport in a step, and quality", lines, [
        "the paper: up to 5 times fewer bytes than uniform with full accuracy; figures of models were not to be had",
        f"here: {arguments.ranks} ranks, mean over seeds; bytes are of the last third of the steps",
        "uniform over: bytes of the uniform setting over these; equal: within 0.01 of dense in accuracy, 1 % in loss",
        "as published: the switch of that name, with settings from half to twice the uniform one and adjustments as "
        "often as in the other arms; here: from an eighth to eight times for top-k",
        "uniform: the same setting for each layer, which top-k selects from by itself",
    ])  # fmt: skip


STUDY = Study(
    "papers/lgreco_tables", "Show L-GreCo's bytes next to those of uniform settings.",
    ("task", "family", "arm", "seed"), rows, tables,
    paper_runs.options("resnet20", 160, 4) | paper_runs.ARMS
    | {"--families": (",".join(FAMILIES), "F[,..]", "of compressors")},
    {"steps": 24, "ranks": 1}, {"arms": lambda arguments: arms(arguments.steps), "families": lambda _: FAMILIES},
)  # fmt: skip

if __name__ == "__main__":
    STUDY.main()
