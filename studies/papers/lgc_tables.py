"""Bytes and quality of LGC at 0.001 with 2 to 8 ranks: ``python studies/papers/lgc_tables.py``."""

import itertools
from argparse import Namespace
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

import paper_runs
from study_rows import Rows, Study, show

_RATIO = 0.001
_DENSE_PART, _TRAINING_PART = 9, 6  # of a training; the paper's 200 and 300 are 11 % of its shortest, both phases
PRINTED = {  # CIFAR10, ResNet-50 on 2 nodes and ResNet-101 on 4: accuracy, dense bytes over those of a step
    2: {"dense": (91.88, 1), "top-k": (91.82, 1000), "DGC": (93.2, 1000), "ring": (91.4, 3193),
        "server": (93.27, 5709)},
    4: {"dense": (93.75, 1), "top-k": (92.75, 1000), "DGC": (93.87, 1000), "ring": (93.07, 2297),
        "server": (93.57, 8095)},
    8: {"dense": (75.98, 1), "top-k": (75.54, 277), "DGC": (76.01, 277), "ring": (75.91, 202), "server": (75.88, 386)},
}  # fmt: skip
"""8: ResNet-50 on ImageNet, top-1."""

_PAPER = {"id": "lgc", "as_published": True}
_HERE = {"id": "lgc", "ratio": _RATIO}


def arms(steps: int) -> dict[str, paper_runs.Arm]:
    """Return every exchange by name."""

    def learned(base: Mapping[str, Any], **settings: Any) -> paper_runs.Arm:
        return paper_runs.Arm({**base, **phases, **settings}, "learned")

    phases = {"dense_steps": max(2, steps // _DENSE_PART), "training_steps": max(4, steps // _TRAINING_PART)}
    topk = {"id": "topk", "ratio": _RATIO}
    return {
        "dense": paper_runs.DENSE,
        "top-k": paper_runs.Arm(topk, "allgather"),
        "top-k, dense first": paper_runs.Arm(topk, "allgather", warmup=phases["dense_steps"]),
        "DGC": paper_runs.Arm({"id": "dgc", "ratio": _RATIO}, "allgather"),
        "ring as published": learned(_PAPER),
        "ring here": learned(_HERE),
        "server as published": learned(_PAPER, instance="server"),
        "server here": learned(_HERE, instance="server"),
    }


def train(task: str, ranks: int, arm: str, seed: int, steps: int) -> dict[str, Any]:
    row = paper_runs.train(arms(steps)[arm], task, steps, ranks, seed)
    row.pop("plans")
    return row


def rows(_: Rows, arguments: Namespace) -> Iterator[tuple[Any, ...]]:
    for seed, *key in itertools.product(arguments.seeds, arguments.tasks, arguments.ranks, arguments.arms):
        yield (*key, seed), train, *key, seed, arguments.steps


def tables(measured: Rows, _: Namespace) -> None:
    lines = []
    for (task, ranks), same_ranks in sorted(paper_runs.grouped(measured.made, "task", "ranks").items()):
        by_arm = {
            arm: {row["seed"]: row for row in same} for arm, same in paper_runs.grouped(same_ranks, "arm").items()
        }
        dense, topk = by_arm.get("dense", {}), by_arm.get("top-k", {})
        for arm, same in by_arm.items():
            accuracy, fewer = PRINTED.get(ranks, {}).get(_name(arm), (None, None))
            off = [row["quality"] - dense[seed]["quality"] for seed, row in same.items() if seed in dense]
            over = [topk[seed]["late_bytes"] / row["late_bytes"] for seed, row in same.items() if seed in topk]
            lines.append({
                "task": task, "ranks|d": ranks, "exchange": arm, "seeds|d": len(same), "paper|.2f": accuracy,
                "quality": paper_runs.of_seeds([row["quality"] for row in same.values()]),
                "of dense|+.4f": fmean(off) if off else None, "paper's fewer|.4g": fewer,
                "fewer|.0f": fmean(row["dense_bytes"] / row["late_bytes"] for row in same.values()),
                "of top-k|.2f": fmean(over) if over else None,
                "code's error|.2f": fmean(row["code_error"] for row in same.values()) or None,
                "wire|.2f": fmean(row["late_wire_bytes"] for row in same.values()) / 1e3,
                "once|.2f": fmean(row["learned_once_bytes"] for row in same.values()) / 1e6,
            })  # fmt: skip
    show("LGC at a ratio of 0.001", lines, [
        "paper: ResNet-50 (2) and ResNet-101 (4) on CIFAR10, ResNet-50 on ImageNet (8); here resnet20 on 5,000 images "
        "of MNIST, where a code stands for some 270 values",
        "fewer: bytes of dense over those that rank 0 hands to the transport in a step, in the last third of them, "
        "when codes travel; of top-k: over those of top-k. The paper does not count a server's answers",
        "wire: KB that leave rank 0 in such a step; once: MB that leave it once",
        "code's error: when it has learned, as a share of the energy that it codes, of all ranks' mean with the ring",
        "means over seeds, of accuracy with the range; of dense, of top-k: of the same seeds",
    ])  # fmt: skip


def _name(arm: str) -> str:
    return arm.removesuffix(" as published").removesuffix(" here")


STUDY = Study(
    "papers/lgc_tables", "Show LGC's bytes and quality at 0.001 and its paper's.", ("task", "ranks", "arm", "seed"),
    rows, tables, paper_runs.options("resnet20", 240, "4,2,8") | paper_runs.ARMS, {"steps": 18},
    {"arms": lambda arguments: arms(arguments.steps)},
)  # fmt: skip

if __name__ == "__main__":
    STUDY.main()
