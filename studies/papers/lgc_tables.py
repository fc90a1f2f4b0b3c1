"""Bytes and quality of LGC at 0.001 with 2 to 8 ranks: ``python studies/papers/lgc_tables.py``."""

import itertools
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import paper_runs
from study_rows import Rows, Study, show

from mpicomp.arrays import ArraySpec
from mpicomp.collectives import bind
from mpicomp.compressors import get_compressor
from mpicomp.mpi.rounds import Group
from mpicomp.reducer.bucket import cut
from mpicomp.reducer.layout import LARGE_BUCKET

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
_NUM_STEPS = 40  # of a model, whose bytes are averaged
MODELS = {"ResNet-50": ((3, 4, 6, 3), 1000), "ResNet-101": ((3, 4, 23, 3), 10)}
"""Blocks and classes of models that are too large to be trained here; the printed megabytes imply these classes."""
PRINTED_MB = {
    ("ResNet-50", 2): {"top-k": 0.102, "ring": 0.032, "server": 0.017},
    ("ResNet-101", 4): {"top-k": 0.17, "ring": 0.074, "server": 0.021},
}
"""MB of a step by model and ranks, table IV; of the server those of the rank that sends the common code."""

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
    _show_trained(measured.made)
    _show_models()


def _show_trained(made: Sequence[Mapping[str, Any]]) -> None:
    lines = []
    for (task, ranks), same_ranks in sorted(paper_runs.grouped(made, "task", "ranks").items()):
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


def parameters(model: str) -> list[tuple[str, int]]:
    """Return names and sizes of a ResNet's parameters, in the order of the network.

    >>> sum(size for _, size in parameters("ResNet-50"))  # as everyone counts them
    25557032
    """
    blocks, classes = MODELS[model]
    found: list[tuple[str, int]] = []

    def add(layer: str, norm: str, numel: int, width: int) -> None:
        found.extend([(f"{layer}.weight", numel), (f"{norm}.weight", width), (f"{norm}.bias", width)])

    add("conv1", "bn1", 3 * 64 * 49, 64)
    before = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            shapes = (before, width, 1), (width, width, 3), (width, 4 * width, 1)
            for place, (inner, outer, side) in enumerate(shapes, 1):
                add(f"{name}.conv{place}", f"{name}.bn{place}", inner * outer * side**2, outer)
            if block == 0:
                add(f"{name}.downsample.0", f"{name}.downsample.1", before * 4 * width, 4 * width)
            before = 4 * width
    return [*found, ("fc.weight", before * classes), ("fc.bias", classes)]


def step_bytes(model: str, config: Mapping[str, Any], collective: str, ranks: int, step: int) -> tuple[float, float]:
    """Return the bytes that a rank hands to the transport in a step: mean over ranks and steps, and of the least rank.

    Buckets are those of training: parameters in the order of backward, 32 MB each.
    """
    members = [ArraySpec(name, "float32", (size,)) for name, size in reversed(parameters(model))]
    whole = {member.name: member.numel for member in members}
    sent = np.zeros((_NUM_STEPS, ranks))
    for bucket in cut(members, LARGE_BUCKET):
        names, sizes = [member.name for member in bucket], [member.numel for member in bucket]
        scheme = bind(get_compressor(config).bind(names, sizes, model=whole), collective)
        for turn in range(len(sent)):
            for rank in range(ranks):
                group = Group(rank, ranks)
                tasks = scheme.rounds(sum(sizes), np.dtype(np.float32), group, step + turn)
                sent[turn, rank] += sum(task.sent_bytes(group) for task in tasks if not task.once)
    return float(sent.mean()), float(sent.min())


def _show_models() -> None:
    learned, lines = 18, []
    for (model, ranks), printed in PRINTED_MB.items():
        dense, topk = 4 * sum(size for _, size in parameters(model)), 0.0
        for name, arm in arms(learned).items():
            if arm.compressor is None or arm.warmup or name == "dense":
                continue
            mean, least = step_bytes(model, arm.compressor, arm.collective, ranks, learned + 1)
            topk, paper = topk or mean, printed.get(_name(name))
            lines.append({
                "model": model, "ranks|d": ranks, "exchange": name,
                "paper's MB|.3f": paper, "MB|.3f": mean / 1e6, "least|.3f": least / 1e6,
                "paper's fewer|.0f": paper and dense / 1e6 / paper, "fewer|.0f": dense / mean,
                "paper's of top-k|.2f": paper and printed["top-k"] / paper, "of top-k|.2f": topk / mean,
            })  # fmt: skip
    show("Bytes in the paper's models", lines, [
        "not trained: the bytes of the rounds that are announced for these shapes are those that are run",
        "MB: handed to the transport in a step, mean over ranks and steps; least: of the rank that has least",
        "the paper's top-k counts no indices, ours does; its server's row is of the rank that sends the common code",
    ])  # fmt: skip


STUDY = Study(
    "papers/lgc_tables", "Show LGC's bytes and quality at 0.001 and its paper's.", ("task", "ranks", "arm", "seed"),
    rows, tables, paper_runs.options("resnet20", 240, "4,2,8") | paper_runs.ARMS, {"steps": 18},
    {"arms": lambda arguments: arms(arguments.steps)},
)  # fmt: skip

if __name__ == "__main__":
    STUDY.main()
