"""Exchanges of gradients and of updates at the same learning rates: ``python studies/update_exchanges.py``.

Ranks are simulated in this process, with the library's exchange among them.
"""

import itertools
import json
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from mpicomp.bench import devices
from mpicomp.bench.tasks import Task, list_tasks
from mpicomp.bench.tasks.gpt import TextGPT
from mpicomp.bench.tasks.task import TASKS
from study_rows import Rows, Study, show

import mpicomp
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.rounds import dense_ring_bytes
from mpicomp.torch import UpdateOptimizer
from mpicomp.torch.muon import muon_and_adamw, settings_of_changes

_STUDY = "update_exchanges"
_TOPK = {"id": "topk", "ratio": 0.01, "wire": "q4"}
_COLUMNS = {
    "task": "", "steps": "d", "arm": "", "rate": "g", "quality": ".4f", "above": "+.2f",
    "sent_less": ".0f", "wire_less": ".0f", "seeds": "d",
}  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """An exchange, and the optimizers around it."""

    compressor: Any
    updates: bool = True  # exchange the changes of ranks' optimizers, not gradients
    settings: Mapping[str, Any] = field(default_factory=dict)  # of `mpicomp.torch.UpdateOptimizer`
    inner: str = "task"  # the task's optimizer, or "muon"


ARMS = {
    "gradients": Arm("dense", updates=False),
    "gradients-topk": Arm(_TOPK, updates=False),
    "dense": Arm("dense"),
    "topk": Arm(_TOPK),
    "topk-every-4": Arm(_TOPK | {"ratio": 0.04}, settings={"sync_every": 4}),
    "onebit": Arm("onebit"),
    "onebit-every-4": Arm("onebit", settings={"sync_every": 4}),
    "sparseloco": Arm(
        {"id": "topk", "ratio": 64 / 4096, "wire": "q2"},
        settings={"sync_every": 15, "outer": {"lr": 1.0}, "feedback_decay": 0.95},
    ),
    "diloco": Arm("dense", settings={"sync_every": 10, "outer": {"lr": 0.7, "momentum": 0.9, "nesterov": True}}),
    "gradients-muon": Arm("dense", updates=False, inner="muon"),
    **{  # with LocalMuon's settings
        f"muon-{compressor}-every-{every}": Arm(compressor, inner="muon", settings={"sync_every": every})
        for compressor in ("dense", "onebit")
        for every in (1, 2, 5, 10, 20, 40, 160)
    },
}  # fmt: skip
"""The arms to compare, by name."""


class NanoGPT(TextGPT):
    """A GPT of nanoGPT's shape, on the bytes of the standard library's sources: 3.2 million parameters."""

    name = "nano-gpt"
    steps, batch_size, vocabulary, width, layers = 1000, 8, 256, 256, 4


def kind_of(task: str) -> Any:
    """Return the class of a task."""
    return NanoGPT if task == NanoGPT.name else TASKS.cls(task)


def inner_of(task: Task, model: torch.nn.Module, arm: Arm, rate: float, muon: Mapping[str, Any]) -> Any:
    """Return a rank's optimizer, with a multiple of its rates; ``muon`` are settings of `muon_and_adamw`."""
    named = list(model.named_parameters())
    optimizer: Any = muon_and_adamw(named, model, **muon) if arm.inner == "muon" else task.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] *= rate
    return optimizer


def train(
    task_name: str, arm_name: str, rate: float, seed: int, steps: int, device: str, ranks: int, samples: int | None,
    changed: str,
) -> dict[str, Any]:  # fmt: skip
    """Train a task with simulated ranks, all of them on torch's device; return the row."""
    arm, world, muon = ARMS[arm_name], LocalWorld(ranks), json.loads(changed)
    kind = kind_of(task_name)
    task: Task = type(kind.__name__, (kind,), {"batch_size": samples or kind.batch_size})(seed)
    settings: dict[str, Any] = {"warmup": 0, "seed": seed} | dict(arm.settings)
    of_changes = settings_of_changes(ranks, arm.compressor)
    of_changes |= {name: muon.pop(name) for name in ("outer", "feedback_decay") if name in muon}
    if arm.inner == "muon" and arm.updates:
        settings |= of_changes
    models = [task.model().to(device) for _ in range(ranks if arm.updates else 1)]
    inner = [inner_of(task, model, arm, rate, muon) for model in models]
    schedules = [task.schedule(optimizer, steps) for optimizer in inner]
    if arm.updates:
        optimizers = [
            UpdateOptimizer(optimizer, model.named_parameters(), compressor=arm.compressor, comm=end, **settings)
            for optimizer, model, end in zip(inner, models, world.transports, strict=True)
        ]
        reducer = optimizers[0].reducer
    else:
        policy = {"warmup": settings.pop("warmup")}
        of_ranks = [mpicomp.Reducer(arm.compressor, policy=policy, comm=end, **settings) for end in world.transports]
        reducer = of_ranks[0]
    numel = sum(parameter.numel() for parameter in models[0].parameters())
    sent, wire, counted = 0.0, 0.0, -1
    for step in range(steps):
        gradients = []
        for rank in range(ranks):
            model = models[rank % len(models)]
            model.zero_grad()
            loss = task.loss(model, task.batch(step, rank, ranks))
            loss.backward()  # type: ignore[no-untyped-call]
            if not arm.updates:
                grads = ((name, parameter.grad) for name, parameter in model.named_parameters())
                gradients.append({name: grad.clone() for name, grad in grads if grad is not None})
        if arm.updates:
            for model in models:
                clip(task, model)
            world.run([optimizer.rounds() for optimizer in optimizers])
            if step + 1 == steps and steps % int(settings.get("sync_every", 1)):
                world.run([optimizer.synchronizing() for optimizer in optimizers])
        else:
            means = world.run([end.rounds(arrays) for end, arrays in zip(of_ranks, gradients, strict=True)])
            for name, parameter in models[0].named_parameters():
                if parameter.grad is not None:
                    parameter.grad.copy_(means[0][name])
            clip(task, models[0])
            inner[0].step()
        for schedule in schedules:
            if schedule is not None:
                schedule.step()
        record = reducer.last_step
        if record is not None and record.step != counted:
            counted, sent, wire = record.step, sent + record.sent_bytes, wire + record.wire_bytes
    return {
        "quality": task.evaluate(models[0]), "sent_less": 4 * numel * steps / sent,
        "wire_less": dense_ring_bytes(numel, ranks) * steps / wire,
    }  # fmt: skip


def clip(task: Task, model: torch.nn.Module) -> None:
    """Clip a model's gradients as its task wants it."""
    if task.clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)


def table(made: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each task, number of steps and arm, the rate that is best on the average over seeds.

    ``above`` is in percent of the quality of dense gradients, those of Muon for its arms, at their best rate.
    """
    by_rate: dict[tuple[str, int, str, float], list[Mapping[str, Any]]] = {}
    for row in made:
        by_rate.setdefault((row["task"], row["steps"], row["arm"], row["rate"]), []).append(row)
    means: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for (task, steps, arm, rate), rows in by_rate.items():
        mean = {name: float(np.mean([row[name] for row in rows])) for name in ("quality", "sent_less", "wire_less")}
        entry = {"task": task, "arm": arm, "steps": steps, "rate": rate, "seeds": len(rows)}
        means.setdefault((task, steps, arm), []).append(entry | mean)
    best = {}
    for key, entries in means.items():
        most = max(entry["seeds"] for entry in entries)
        sign = 1 if kind_of(key[0]).better == "lower" else -1
        best[key] = min((entry for entry in entries if entry["seeds"] == most), key=lambda e: sign * e["quality"])
    for (task, steps, arm), entry in best.items():
        base = best.get((task, steps, "gradients-muon" if arm.startswith("muon") else "gradients"))
        entry["above"] = 100 * (entry["quality"] / base["quality"] - 1) if base is not None else float("nan")
    return list(best.values())


def rows(_: Rows, arguments: Namespace) -> Iterator[tuple[Any, ...]]:
    device = devices.torch_device(_STUDY, devices.find()).type if arguments.device == "gpu" else "cpu"
    torch.set_num_threads(1)  # rows of different machines are to have the same bits
    for task, seed, arm, rate in itertools.product(
        arguments.task, arguments.seeds, arguments.arms, map(float, arguments.rates)
    ):
        steps = arguments.steps or kind_of(task).steps
        key = task, arm, rate, seed, steps, device, arguments.ranks, arguments.samples, arguments.muon
        yield key, train, *key


def tables(measured: Rows, arguments: Namespace) -> None:
    device = {"cpu": "cpu", "gpu": "cuda"}[arguments.device]
    kind = {"device": device, "ranks": arguments.ranks, "samples": arguments.samples, "muon": arguments.muon}
    made = [row for row in measured.made if kind.items() <= row.items()]
    show("Quality at the best rate, and bytes of dense gradients over those sent", table(made), (), _COLUMNS)


STUDY = Study(
    _STUDY,
    "Train with exchanges of gradients and of updates, each at the same learning rates, and print for each the quality "
    "at its best rate, and how many times fewer bytes it sends than dense gradients.",
    ("task", "arm", "rate", "seed", "steps", "device", "ranks", "samples", "muon"),
    rows,
    tables,
    {
        "--arms": (",".join(ARMS), "A[,..]", "exchanges"),
        "--rates": ("1,1.5,2", "X[,..]", "times the task's rate"),
        "--ranks": (4, "N", "simulated ones"),
        "--samples": (None, "S", "of a rank in a step (those of the task)"),
        "--muon": ("{}", "JSON", "settings of LocalMuon that are not its defaults, such as lr and outer"),
        "--device": ("cpu", "cpu|gpu", "where all ranks train; a row of the other kind has other bits"),
        "--task": ("text-gpt", "T[,..]", ", ".join([*list_tasks(), NanoGPT.name])),
        "--seeds": ("0", "K[,..]", "of trainings"),
        "--steps": (None, "S", "of a training (those of the task)"),
    },
    {"steps": 1, "ranks": 1, "samples": 1},
    {"arms": lambda _: ARMS},
)

if __name__ == "__main__":
    STUDY.main()
