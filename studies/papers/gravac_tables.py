"""Table 2 of GraVAC and ours: ``python studies/papers/gravac_tables.py``."""

import itertools
from argparse import Namespace
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

import paper_runs
from paper_runs import of_seeds
from study_rows import Rows, Study, show

_BASE = "top-k 10x"  # the paper's speed-ups are relative to it
_RATIO = 3.02  # the paper's speed-up of top-k 1000x over 10x on ResNet-101, from which the bandwidth follows
_PROBE = 8  # steps from which computing is known
_TIMED = 12  # steps of a static exchange; the first two are left out

_STATIC = {"top-k": "topk", "DGC": "dgc", "RedSync": "redsync", "random-k": "randomk"}
_LIMITS = {"least": 0.001, "most": 0.1, "epsilon": 0.7}


def arms(steps: int) -> dict[str, paper_runs.Arm]:
    """Return the exchanges by name, with windows as large a part of the training as the paper's."""
    window = max(2, steps // 32)
    published = {"id": "gravac", "as_published": True, **_LIMITS, "window": window}
    dgc = ({"id": "dgc"}, "allgather")
    static = {
        f"{name} {factor}x": paper_runs.Arm(
            {"id": config, "ratio": 1 / factor}, "allreduce" if config == "randomk" else "allgather"
        )
        for name, config in _STATIC.items()
        for factor in (10, 1000)
    }
    return {
        "dense": paper_runs.DENSE,
        **static,
        "GraVAC as published": paper_runs.Arm(*dgc, published),
        "GraVAC as published, 0.9": paper_runs.Arm(*dgc, published | {"epsilon": 0.9}),
        "GraVAC as published, 0.5": paper_runs.Arm(*dgc, published | {"epsilon": 0.5}),
        "GraVAC as published, any gain": paper_runs.Arm(*dgc, published | {"epsilon": 1e-6}),
        "GraVAC here": paper_runs.Arm(policy={"id": "gravac", **_LIMITS, "window": window}),
        "Accordion": paper_runs.Arm(*dgc, {"id": "accordion", "least": 0.01, "most": 0.1, "every": window}),
    }


_PRINTED_GRAVAC = ((80.2, 4.32), (90.48, 1.95), (21.25, 6.67))
PRINTED_2: dict[str, Any] = {  # ResNet-101, VGG-16, LSTM: quality, speed-up
    "top-k 10x": ((80.14, 1), (91.2, 1), (22.0, 1)),
    "top-k 1000x": ((76.4, 3.02), (90.68, 3.22), (26.78, 3.36)),
    "DGC 10x": ((80.4, 1.23), (90.8, 0.935), (21.67, 1.23)),
    "DGC 1000x": ((78.6, 5.19), (90.4, 3.35), (25.14, 6.25)),
    "RedSync 10x": ((79.4, 1.2), (90.45, 0.99), (21.65, 1.17)),
    "RedSync 1000x": ((77.4, 6.94), (90.3, 3.6), (24.24, 6.9)),
    "random-k 10x": (("fails", None), (87.8, 0.7), (24.15, 1.3)),
    "random-k 1000x": (("fails", None), ("fails", None), ("fails", None)),
    **dict.fromkeys(("GraVAC as published", "GraVAC as published, any gain", "GraVAC here"), _PRINTED_GRAVAC),
}
PRINTED_VOLUME = {
    "GraVAC as published": (163, 80, 289), "GraVAC as published, any gain": (163, 80, 289),
    "GraVAC as published, 0.9": (19, 13.5, 279),
}  # fmt: skip
"""Floats of dense over those sent."""
PAPER_OF = {"resnet20": 0, "vgg": 1, "text-lstm": 2}


def probe(task: str, ranks: int) -> dict[str, Any]:
    row = paper_runs.train(arms(_PROBE)[_BASE], task, _PROBE, ranks)
    return {key: row[key] for key in ("compute_s", "late_wire_bytes")}


def train(
    task: str, arm: str, seed: int, ranks: int, steps: int, probed: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Train, on a simulated network with the probed links or, where results do not depend on it, without one."""
    network = {}
    simulated = None
    if probed is not None:
        compute_s = probed["compute_s"]
        link = paper_runs.Link(0.0, 8 * probed["late_wire_bytes"] / ((_RATIO - 1) * compute_s))
        simulated = paper_runs.Simulated(lambda step: link, compute_s)
        network = {"bits": link.bits, "simulated_compute_s": compute_s}
    row = paper_runs.train(arms(steps)[arm], task, steps, ranks, seed, simulated)
    plans = row.pop("plans")
    thirds = [plans[len(plans) * part // 3 : len(plans) * (part + 1) // 3] for part in range(3)]
    row["mean_s"] = fmean(seconds for seconds, *_ in plans[2:])
    row["ratios"] = [fmean(kept for _, kept, *_ in third) for third in thirds]
    row["dense_steps"] = sum(kept == 1.0 for _, kept, *_ in plans)
    return row | network


def rows(measured: Rows, arguments: Namespace) -> Iterator[tuple[Any, ...]]:
    ranks, steps = arguments.ranks, arguments.steps
    for seed, task in itertools.product(arguments.seeds, arguments.tasks):
        yield ("probe", task, _BASE, 0), probe, task, ranks
        probed = measured.find("probe", task, _BASE, 0)
        for arm in arguments.arms if probed is not None else ():
            trained = (task, arm, seed)
            if arm.startswith("GraVAC"):
                yield ("train", *trained), train, *trained, ranks, steps, probed
                continue
            yield ("train", *trained), train, *trained, ranks, steps
            if seed == arguments.seeds[0]:  # steps of Accordion are not all the same
                timed = steps if arm == "Accordion" else _TIMED
                yield ("step", *trained), train, *trained, ranks, timed, probed


def tables(measured: Rows, arguments: Namespace) -> None:
    lines, made = [], measured.made
    for task in dict.fromkeys(row["task"] for row in made if row["table"] == "train"):
        of_task = [row for row in made if row["task"] == task]
        trained = paper_runs.grouped([row for row in of_task if row["table"] == "train"], "name")
        seconds = {
            name: fmean(row["mean_s"] for row in same) for name, same in trained.items() if name.startswith("GraVAC")
        }
        seconds |= {row["name"]: row["mean_s"] for row in of_task if row["table"] == "step"}
        place = PAPER_OF.get(task, 0)
        for name, same in trained.items():
            thirds = zip(*(row["ratios"] for row in same), strict=True)
            quality, speedup = PRINTED_2.get(name, (("", None),) * 3)[place]
            over = {base: seconds[base] / seconds[name] for base in (_BASE, "dense") if {base, name} <= seconds.keys()}
            lines.append({
                "task": task, "exchange": name, "seeds|d": len(same),
                "paper": quality if isinstance(quality, str) else f"{quality:g}",
                "quality": of_seeds([row["quality"] for row in same]), "paper's speed-up|.3g": speedup,
                "speed-up|.2f": over.get(_BASE), "over dense|.2f": over.get("dense"),
                "paper's fewer|.3g": PRINTED_VOLUME.get(name, (None,) * 3)[place],
                "fewer": of_seeds([1 / row["kept"] for row in same], ".3g"),
                "ratios": ", ".join(f"{fmean(third):.3g}" for third in thirds),
                "dense steps": ", ".join(str(row["dense_steps"]) for row in same),
            })  # fmt: skip
    networks = {(row["task"], row["bits"], row["simulated_compute_s"]) for row in made if row["table"] == "step"}
    show("Table 2: quality and speed-up over top-k 10x, and floats of dense over those sent", lines, [
        "paper: ResNet-101 on CIFAR10, VGG-16 on CIFAR100 (top-5), LSTM on PTB (perplexity), 32 V100; here resnet20 "
        "on 5,000 images of MNIST, vgg on digits (accuracy) and text-lstm (nats a token)",
        f"here: {arguments.ranks} ranks on a simulated network, where top-k 1000x would be {_RATIO} times as fast as "
        "10x if its messages were all that there is besides computing, as the paper's is; ranks' own work is in "
        "processor time",
        *(f"{task}: {bits / 1e6:.3g} Mbit/s, {1e3 * compute_s:.3g} ms of computing"
          for task, bits, compute_s in sorted(networks)),
        "speed-up: of seconds of as many steps; means over seeds, with the range; equal steps are timed once",
        "any gain: every factor is taken, as by the gain of the paper's code, which is above 1 at all of them",
        "ratios: mean of each third of the training; windows are a 32nd of it",
    ])  # fmt: skip


STUDY = Study(
    "papers/gravac_tables", "Measure table 2 of GraVAC and show it next to its paper's.",
    ("table", "task", "name", "seed"), rows, tables, paper_runs.options("resnet20", 320, 4) | paper_runs.ARMS,
    {"steps": _TIMED, "ranks": 2}, {"arms": lambda arguments: arms(arguments.steps)},
)  # fmt: skip

if __name__ == "__main__":
    STUDY.main()
