"""Tables 2, 3 and 4 of GraVAC beside ours: ``python studies/papers/gravac.py``."""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import beside
import gravac_gains
import numpy as np
from mpicomp.bench.measure.feedback import Selecting, make_bucket
from mpicomp.bench.measure.gradients import Gradients

from mpicomp.cli import run_program
from mpicomp.cli.options import check_least, read_list
from mpicomp.compressors import SharedSparsifier, Sparsifier, get_compressor
from mpicomp.policies.surveys import SpectrumSurvey

_STUDY = "gravac"
_KEY = ("table", "task", "name", "seed")
_BASE = "top-k 10x"  # what the paper's speed-ups are over
_RATIO = 3.02  # the paper's speed-up of top-k 1000x over 10x on ResNet-101, from which the bandwidth follows
_PROBE = 8  # steps from which computing is known
_TIMED = 12  # steps of what is the same in all steps; the first two are left out
_STRIDE = 16  # of GraVAC's spectra

_STATIC = {"top-k": "topk", "DGC": "dgc", "RedSync": "redsync", "random-k": "randomk"}


def _static(name: str, factor: int) -> beside.Arm:
    collective = "allreduce" if name == "randomk" else "allgather"
    return beside.Arm({"id": name, "ratio": 1 / factor}, collective)


_LIMITS = {"least": 0.001, "most": 0.1, "epsilon": 0.7}


def arms(steps: int) -> dict[str, beside.Arm]:
    """Return the exchanges of tables 2 and 4 by name.

    Windows are as large a part of the training as the paper's 500 are of its 16,000 steps, or there would be no search.
    """
    window = max(2, steps // 32)
    published = {"id": "gravac", "published": True, **_LIMITS, "window": window}
    dgc = ({"id": "dgc"}, "allgather")
    return {
        "dense": beside.DENSE,
        **{f"{name} {factor}x": _static(own, factor) for name, own in _STATIC.items() for factor in (10, 1000)},
        "GraVAC as published": beside.Arm(*dgc, published),
        "GraVAC as published, 0.9": beside.Arm(*dgc, published | {"epsilon": 0.9}),
        "GraVAC as published, 0.5": beside.Arm(*dgc, published | {"epsilon": 0.5}),
        "GraVAC as published, any gain": beside.Arm(*dgc, published | {"epsilon": 1e-6}),
        "GraVAC here": beside.Arm(policy={"id": "gravac", **_LIMITS, "window": window}),
        "Accordion": beside.Arm(*dgc, {"id": "accordion", "least": 0.01, "most": 0.1, "every": window}),
    }  # fmt: skip


PRINTED_2 = {  # ResNet-101, VGG-16, LSTM: quality, speed-up
    "top-k 10x": ((80.14, 1), (91.2, 1), (22.0, 1)),
    "top-k 1000x": ((76.4, 3.02), (90.68, 3.22), (26.78, 3.36)),
    "DGC 10x": ((80.4, 1.23), (90.8, 0.935), (21.67, 1.23)),
    "DGC 1000x": ((78.6, 5.19), (90.4, 3.35), (25.14, 6.25)),
    "RedSync 10x": ((79.4, 1.2), (90.45, 0.99), (21.65, 1.17)),
    "RedSync 1000x": ((77.4, 6.94), (90.3, 3.6), (24.24, 6.9)),
    "random-k 10x": (("fails", None), (87.8, 0.7), (24.15, 1.3)),
    "random-k 1000x": (("fails", None), ("fails", None), ("fails", None)),
    "GraVAC as published": ((80.2, 4.32), (90.48, 1.95), (21.25, 6.67)),
    "GraVAC as published, any gain": ((80.2, 4.32), (90.48, 1.95), (21.25, 6.67)),
    "GraVAC here": ((80.2, 4.32), (90.48, 1.95), (21.25, 6.67)),
}
PRINTED_VOLUME = {
    "GraVAC as published": (163, 80, 289), "GraVAC as published, any gain": (163, 80, 289),
    "GraVAC as published, 0.9": (19, 13.5, 279),
}  # fmt: skip
"""Floats of dense over those sent."""
PRINTED_3 = {
    "top-k": (1.83, 1.49, 1.59), "DGC": (1.52, 1.27, 1.4), "RedSync": (1.1, 1.16, 1.5), "random-k": (1.64, 1.34, 1.5),
}  # fmt: skip
PRINTED_4 = ((44.5, 1.94), (22.4, 5.63), (104.2, 2.06))
"""Floats and time of Accordion over those of GraVAC."""
PAPER_OF = {"resnet20": 0, "vgg": 1, "text-lstm": 2}
NUMELS = {"ResNet-101": 42_500_000, "VGG-16": 132_000_000, "LSTM": 63_000_000}
"""Parameters of the paper's models, from their megabytes."""
_SCALE = 10  # so many times fewer are compressed here


def train(task: str, arm: str, seed: int, ranks: int, steps: int) -> dict[str, Any]:
    """Train with what does not look at the network, without one."""
    return _kept(beside.train(arms(steps)[arm], task, steps, ranks, seed))


def train_timed(task: str, arm: str, seed: int, ranks: int, steps: int, simulated: beside.Simulated) -> dict[str, Any]:
    """Train on a simulated network."""
    row = _kept(beside.train(arms(steps)[arm], task, steps, ranks, seed, simulated))
    return row | {"bits": simulated.link(0).bits, "simulated_compute_s": simulated.compute_s}


def time_steps(task: str, arm: str, seed: int, ranks: int, steps: int, simulated: beside.Simulated) -> dict[str, Any]:
    """Time the steps of an arm that does not look at the network; those of Accordion are not all the same."""
    return train_timed(task, arm, seed, ranks, steps if arm == "Accordion" else _TIMED, simulated)


def _kept(row: dict[str, Any]) -> dict[str, Any]:
    plans = row.pop("plans")
    thirds = [plans[len(plans) * part // 3 : len(plans) * (part + 1) // 3] for part in range(3)]
    return row | {
        "mean_s": fmean(seconds for seconds, *_ in plans[2:]),
        "ratios": [fmean(kept for _, kept, *_ in part) for part in thirds],
        "dense_steps": sum(kept == 1.0 for _, kept, *_ in plans),
    }


def compress(model: str, name: str) -> dict[str, Any]:
    """Time table 3: 10x and 1000x of the dense array, 10x and then 100x of what that has left, and a spectrum."""
    numel = NUMELS[model] // _SCALE
    gradient = Gradients(numel, seed=0).fresh()
    part = np.ascontiguousarray(gradient[: numel // 10])
    found: dict[str, list[float]] = {key: [] for key in ("least", "most", "second", "spectrum")}
    pairs = [("least", gradient, 0.1), ("most", gradient, 0.001), ("second", part, 0.01)]
    running = []
    for key, array, ratio in pairs:
        compressor = get_compressor({"id": _STATIC[name], "ratio": ratio})
        assert isinstance(compressor, Sparsifier | SharedSparsifier)
        running.append((key, array, Selecting(compressor, array.size), make_bucket(array.size, compressor, False)))
    survey = SpectrumSurvey(_STRIDE)
    for turn in range(9):
        for key, array, selecting, bucket in running:
            start = time.thread_time()
            selecting.step(bucket, array, message=False)
            found[key].append(time.thread_time() - start)
        start = time.thread_time()
        survey.measure(gradient, None, (numel,), turn)
        found["spectrum"].append(time.thread_time() - start)
    return {key: 1e3 * median(own[3:]) for key, own in found.items()}


def _tables(rows: Sequence[Mapping[str, Any]], ranks: int) -> None:
    two, four = [], []
    for task in dict.fromkeys(row["task"] for row in rows if row["table"] == "train"):
        own = [row for row in rows if row["task"] == task]
        trained: dict[str, list[Mapping[str, Any]]] = {}
        for row in own:
            if row["table"] == "train":
                trained.setdefault(row["name"], []).append(row)
        seconds = {
            name: fmean(row["mean_s"] for row in same) for name, same in trained.items() if name.startswith("GraVAC")
        }
        seconds |= {row["name"]: row["mean_s"] for row in own if row["table"] == "step"}
        place = PAPER_OF.get(task)
        for name, same in trained.items():
            printed = PRINTED_2.get(name, ((None, None),) * 3)[place or 0]
            volume = PRINTED_VOLUME.get(name, (None,) * 3)[place or 0]
            own_s = seconds.get(name)
            two.append({
                "task": task, "exchange": name, "seeds": len(same),
                "paper": "" if printed[0] is None else f"{printed[0]:g}" if not
                isinstance(printed[0], str) else printed[0],
                "quality": beside.of_seeds([row["quality"] for row in same]), "paper's speed-up": printed[1],
                "speed-up": seconds[_BASE] / own_s if own_s and _BASE in seconds else None,
                "over dense": seconds["dense"] / own_s if own_s and "dense" in seconds else None,
                "paper's fewer": volume, "fewer": beside.of_seeds([1 / row["kept"] for row in same], ".3g"),
                "ratios": ", ".join(f"{fmean(own):.3g}" for own in zip(*(row["ratios"] for row in same), strict=True)),
                "dense steps": ", ".join(str(row["dense_steps"]) for row in same),
            })  # fmt: skip
        accordion = {row["seed"]: row for row in trained.get("Accordion", ())}
        for name in ("GraVAC as published", "GraVAC here"):
            pairs = [(accordion[row["seed"]], row) for row in trained.get(name, ()) if row["seed"] in accordion]
            if pairs and "Accordion" in seconds:
                four.append({
                    "task": task, "exchange": name, "seeds": len(pairs), "paper's fewer": PRINTED_4[place or 0][0],
                    "fewer": beside.of_seeds([theirs["kept"] / row["kept"] for theirs, row in pairs], ".2g"),
                    "paper's speed-up": PRINTED_4[place or 0][1], "speed-up": seconds["Accordion"] / seconds[name],
                    "quality": beside.of_seeds([row["quality"] for _, row in pairs]),
                    "Accordion's": beside.of_seeds([theirs["quality"] for theirs, _ in pairs]),
                })  # fmt: skip
    networks = {(row["task"], row["bits"], row["simulated_compute_s"]) for row in rows if row["table"] == "step"}
    beside.show("Table 2: quality and speed-up over top-k 10x, and floats of dense over those sent", two, {
        "task": "", "exchange": "", "seeds": "d", "paper": "", "quality": "", "paper's speed-up": ".3g",
        "speed-up": ".2f", "over dense": ".2f", "paper's fewer": ".3g", "fewer": "", "ratios": "", "dense steps": "",
    }, [
        "paper: ResNet-101 on CIFAR10, VGG-16 on CIFAR100 (top-5), LSTM on PTB (perplexity), 32 V100; here resnet20 "
        "on 5,000 images of MNIST, vgg on digits (accuracy) and text-lstm (nats a token)",
        f"here: {ranks} ranks on a simulated network, where top-k 1000x would be {_RATIO} times as fast as 10x if its "
        "messages were all that there is beside computing, as the paper's is; ranks' own work is in processor time",
        *(f"{task}: {bits / 1e6:.3g} Mbit/s, {1e3 * own:.3g} ms of computing" for task, bits, own in sorted(networks)),
        "speed-up: of seconds of as many steps; means over seeds, with the range; steps that are alike are timed once",
        "any gain: every factor is taken, as by the gain of the paper's code, which is above 1 at all of them (below)",
        "ratios: mean of each third of the training; windows are a 32nd of it",
    ])  # fmt: skip
    three = []
    for row in rows:
        if row["table"] == "compress":
            place = list(NUMELS).index(row["task"])
            twice, levels = row["least"] + row["most"], row["least"] + row["second"]
            three.append({
                "model": row["task"], "compressor": row["name"], "twice": twice, "levels": levels,
                "paper": PRINTED_3[row["name"]][place], "speed-up": twice / levels, "spectrum": row["spectrum"],
                "with spectrum": twice / (row["least"] + row["spectrum"]),
            })  # fmt: skip
    beside.show("Table 3: milliseconds of compressing at two factors", three, {
        "model": "", "compressor": "", "twice": ".1f", "levels": ".1f", "paper": ".2f", "speed-up": ".2f",
        "spectrum": ".2f", "with spectrum": ".2f",
    }, [
        f"elements are {_SCALE} times fewer than in the paper's models, one array; the paper: by layers, on a V100",
        "spectrum: what GraVAC measures here in place of the second compression, at one step in four",
    ])  # fmt: skip
    beside.show("Table 4: Accordion over GraVAC", four, {
        "task": "", "exchange": "", "seeds": "d", "paper's fewer": ".3g", "fewer": "", "paper's speed-up": ".2f",
        "speed-up": ".2f", "quality": "", "Accordion's": "",
    }, ["Accordion: PowerSGD of rank 1 and 4 in the paper, DGC at 0.01 and 0.1 here"])  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        prog="studies/papers/gravac.py",
        description="Measure tables 2, 3 and 4 of GraVAC and show them beside its paper's.",
    )
    parser.add_argument("--tasks", default="resnet20", metavar="T[,..]", help="resnet20, vgg, text-lstm (%(default)s)")
    parser.add_argument("--steps", type=int, default=320, metavar="S", help="of a training (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--gains", default="resnet20", metavar="T[,..]", help="tasks in which three readings of the gain are told"
    )
    parser.add_argument("--models", default=",".join(NUMELS), metavar="M[,..]", help="of table 3 (%(default)s)")
    parser.add_argument("--seeds", default="0", metavar="K[,..]", help="of trainings (%(default)s)")
    beside.add_arms(parser)
    beside.add_arguments(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Measure what is not there yet, and print the tables."""
    check_least(_STUDY, "--steps", arguments.steps, _TIMED)
    ranks, steps = check_least(_STUDY, "--ranks", arguments.ranks, 2), arguments.steps
    names = beside.read_arms(_STUDY, arguments.arms, arms(steps))
    rows = beside.begin(_STUDY, arguments, _KEY)
    seeds = list(map(int, read_list(arguments.seeds)))
    for model in read_list(arguments.models):
        for name in _STATIC:
            rows.complete(("compress", model, name, 0), compress, model, name)
    for seed in seeds:
        for task in read_list(arguments.gains):
            for factor in gravac_gains.FACTORS:
                key = ("gains", task, f"{factor}x", seed)
                rows.complete(key, gravac_gains.train, task, factor, ranks, steps, seed)
    for seed in seeds:
        for task in read_list(arguments.tasks):
            rows.complete(("probe", task, _BASE, 0), _probe, task, _BASE, ranks)
            probe = rows.find("probe", task, _BASE, 0)
            if probe is None:
                continue
            for arm in names:
                own = task, arm, seed, ranks, steps
                if arm.startswith("GraVAC"):
                    rows.complete(("train", *own[:3]), train_timed, *own, _network(probe))
                    continue
                rows.complete(("train", *own[:3]), train, *own)
                if seed == seeds[0]:
                    rows.complete(("step", *own[:3]), time_steps, *own, _network(probe))
    _tables(rows.made, ranks)
    gravac_gains.show(rows.made)
    beside.late(rows)
    return 0


def _network(probe: Mapping[str, Any]) -> beside.Simulated:
    """Return that on which the messages of the probe take as long as they do in the paper."""
    link = beside.Link(0.0, 8 * probe["late_wire_bytes"] / ((_RATIO - 1) * probe["compute_s"]))
    return beside.Simulated(lambda step: link, probe["compute_s"])


def _probe(task: str, arm: str, ranks: int) -> dict[str, Any]:
    row = beside.train(arms(_PROBE)[arm], task, _PROBE, ranks)
    return {key: row[key] for key in ("compute_s", "late_wire_bytes")}


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
