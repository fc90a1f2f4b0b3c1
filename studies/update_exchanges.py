"""Exchanges of gradients and of updates at the same learning rates: ``python studies/update_exchanges.py``.

Ranks are simulated in this process, with the library's exchange among them, and every exchange is tried at the same
learning rates.
"""

import itertools
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from mpicomp.bench import devices
from mpicomp.bench.tasks import Task, get_task, list_tasks
from numpy.typing import NDArray
from study_rows import Rows, Study, show

import mpicomp
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.rounds import dense_ring_bytes
from mpicomp.torch import UpdateOptimizer
from mpicomp.torch.muon import muon_and_adamw

_STUDY = "update_exchanges"
_SPAN = (0.6, 0.9)  # shares of a run: the steps whose losses are compared
_TINY = 1e-12  # least loss whose logarithm is taken
_LONG_ENOUGH = 20  # steps of a run whose losses can be compared
_TOPK = {"id": "topk", "ratio": 0.01, "wire": "q4"}
_OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
_COLUMNS = {
    "task": "", "steps": "d", "arm": "", "rate": "g", "quality": ".4f", "above": "+.2f", "behind": ".2f",
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
    "diloco": Arm("dense", settings={"sync_every": 10, "outer": _OUTER}),
    "gradients-muon": Arm("dense", updates=False, inner="muon"),
    **{
        f"muon-every-{every}": Arm("onebit", settings={"sync_every": every}, inner="muon")
        for every in (1, 5, 10, 20, 40, 160)
    },
    **{  # as many bytes as one bit every 5 steps
        f"muon-{bits}-bits-every-{5 * bits}": Arm(
            {"id": "onebit", "bits": bits}, settings={"sync_every": 5 * bits}, inner="muon"
        )
        for bits in (2, 4)
    },
    # The majority of signs moves the parameters by a rate, as in signSGD, and nothing is kept for later.
    "muon-majority-every-10": Arm(
        "signsgd", settings={"sync_every": 10, "outer": {"sign": True, "lr": 3.0}}, inner="muon"
    ),
}  # fmt: skip
"""The arms to compare, by name."""


def inner_of(task: Task, model: torch.nn.Module, arm: Arm, rate: float) -> torch.optim.Optimizer:
    """Return a rank's optimizer, with a multiple of its rates."""
    muon = arm.inner == "muon"
    optimizer = muon_and_adamw(list(model.named_parameters()), model) if muon else task.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] *= rate
    return optimizer


def train(task_name: str, arm_name: str, rate: float, seed: int, steps: int, device: str, ranks: int) -> dict[str, Any]:
    """Train a task with simulated ranks, all of them on torch's device; return the row."""
    arm, task, world = ARMS[arm_name], get_task(task_name, seed), LocalWorld(ranks)
    models = [task.model().to(device) for _ in range(ranks if arm.updates else 1)]
    inner = [inner_of(task, model, arm, rate) for model in models]
    schedules = [task.schedule(optimizer, steps) for optimizer in inner]
    settings: dict[str, Any] = {"warmup": 0, "seed": seed} | dict(arm.settings)
    if arm.updates:
        optimizers = [
            UpdateOptimizer(optimizer, model.named_parameters(), compressor=arm.compressor, comm=end, **settings)
            for optimizer, model, end in zip(inner, models, world.transports, strict=True)
        ]
        reducers = [optimizers[0].reducer]
    else:
        policy = {"warmup": settings.pop("warmup")}
        of_ranks = [mpicomp.Reducer(arm.compressor, policy=policy, comm=end, **settings) for end in world.transports]
        reducers = of_ranks[:1]
    numel = sum(parameter.numel() for parameter in models[0].parameters())
    sent = wire = 0.0
    losses, counted = [], [-1] * len(reducers)
    for step in range(steps):
        gradients, of_step = [], []
        for rank in range(ranks):
            model = models[rank % len(models)]
            model.zero_grad()
            loss = task.loss(model, task.batch(step, rank, ranks))
            loss.backward()  # type: ignore[no-untyped-call]
            of_step.append(float(loss.detach()))
            if not arm.updates:
                grads = ((name, parameter.grad) for name, parameter in model.named_parameters())
                gradients.append({name: grad.clone() for name, grad in grads if grad is not None})
        losses.append(float(np.mean(of_step)))
        if arm.updates:
            for model in models:
                clip(task, model)
            world.run([optimizer.rounds() for optimizer in optimizers])
            if step + 1 == steps and steps % int(settings.get("sync_every", 1)):
                world.run([optimizer.synchronizing() for optimizer in optimizers])
        else:
            means = world.run([reducer.rounds(arrays) for reducer, arrays in zip(of_ranks, gradients, strict=True)])
            for name, parameter in models[0].named_parameters():
                if parameter.grad is not None:
                    parameter.grad.copy_(means[0][name])
            clip(task, models[0])
            inner[0].step()
        for schedule in schedules:
            if schedule is not None:
                schedule.step()
        for place, reducer in enumerate(reducers):
            record = reducer.last_step
            if record is not None and record.step != counted[place]:
                counted[place] = record.step
                sent, wire = sent + record.sent_bytes, wire + record.wire_bytes
    quality = task.evaluate(models[0])
    return {
        "quality": quality, "sent_less": 4 * numel * steps / sent,
        "wire_less": dense_ring_bytes(numel, ranks) * steps / wire, "losses": losses,
    }  # fmt: skip


def clip(task: Task, model: torch.nn.Module) -> None:
    """Clip a model's gradients as its task wants it."""
    if task.clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)


def steps_behind(dense: NDArray[np.floating], late: NDArray[np.floating]) -> float:
    """Return the share of its steps by which the losses of ``late`` run after those of ``dense``, of the same batches.

    Their ratio is averaged over the steps that are compared, since batches differ more than steps do; a cubic through
    the logarithms of ``dense`` shows how many steps before the middle they were as much higher.
    """
    first, last = (int(share * len(dense)) for share in _SPAN)
    middle = (first + last) // 2
    dense, late = np.log(np.maximum(dense, _TINY)), np.log(np.maximum(late, _TINY))
    steps = np.arange(middle // 5, len(dense))
    curve = np.polynomial.Polynomial.fit(steps, dense[steps], 3)
    loss = curve(middle) + (late - dense)[first : last + 1].mean()
    before = np.arange(1, middle + 1)
    return float(middle - before[np.abs(np.maximum.accumulate(curve(before)[::-1])[::-1] - loss).argmin()]) / middle


def table(made: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each task, number of steps and arm, the rate that is best on the average over seeds.

    ``above`` is in percent of the quality of dense gradients at their best rate, with the same seeds. ``behind`` is
    the share of its steps by which the training loss runs after that of dense updates at the same rate.
    """
    dense = {
        (row["task"], row["steps"], row["seed"], row["rate"]): row["losses"] for row in made if row["arm"] == "dense"
    }

    def nats_behind(row: Mapping[str, Any]) -> float:
        base = dense.get((row["task"], row["steps"], row["seed"], row["rate"]))
        if base is None or row["steps"] < _LONG_ENOUGH:
            return float("nan")
        return 0.0 if base is row["losses"] else steps_behind(np.array(base), np.array(row["losses"]))

    by_rate: dict[tuple[str, int, str, float], list[Mapping[str, Any]]] = {}
    for row in made:
        by_rate.setdefault((row["task"], row["steps"], row["arm"], row["rate"]), []).append(row)
    means: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for (task, steps, arm, rate), rows in by_rate.items():
        mean = {name: float(np.mean([row[name] for row in rows])) for name in ("quality", "sent_less", "wire_less")}
        mean["behind"] = float(np.mean([nats_behind(row) for row in rows]))
        entry = {"task": task, "arm": arm, "steps": steps, "rate": rate, "seeds": len(rows)}
        means.setdefault((task, steps, arm), []).append(entry | mean)
    best = {}
    for key, entries in means.items():
        most = max(entry["seeds"] for entry in entries)
        sign = 1 if get_task(key[0]).better == "lower" else -1
        best[key] = min((entry for entry in entries if entry["seeds"] == most), key=lambda e: sign * e["quality"])
    for (task, steps, _), entry in best.items():
        base = best.get((task, steps, "gradients"))
        entry["above"] = 100 * (entry["quality"] / base["quality"] - 1) if base is not None else float("nan")
    return list(best.values())


def rows(_: Rows, arguments: Namespace) -> Iterator[tuple[Any, ...]]:
    device = "cpu"
    if arguments.device == "gpu":
        device = devices.torch_device(_STUDY, devices.find()).type
    torch.set_num_threads(1)  # rows of different machines are to have the same bits
    for task, seed, arm, rate in itertools.product(
        arguments.task, arguments.seeds, arguments.arms, map(float, arguments.rates)
    ):
        key = task, arm, rate, seed, arguments.steps or get_task(task).steps, device, arguments.ranks
        yield key, train, *key


def tables(measured: Rows, arguments: Namespace) -> None:
    kind = {"cpu": "cpu", "gpu": "cuda"}[arguments.device], arguments.ranks
    made = [row for row in measured.made if (row["device"], row["ranks"]) == kind]
    show("Quality at the best rate, and bytes of dense gradients over those sent", table(made), (), _COLUMNS)


STUDY = Study(
    _STUDY,
    "Train with exchanges of gradients and of updates, each at the same learning rates, and print for each the quality "
    "at its best rate, and how many times fewer bytes it sends than dense gradients.",
    ("task", "arm", "rate", "seed", "steps", "device", "ranks"),
    rows,
    tables,
    {
        "--arms": (",".join(ARMS), "A[,..]", "exchanges"),
        "--rates": ("1,1.5,2", "X[,..]", "times the task's rate"),
        "--ranks": (4, "N", "simulated ones"),
        "--device": ("cpu", "cpu|gpu", "where all ranks train; a row of the other kind has other bits"),
        "--task": ("text-gpt", "T[,..]", ", ".join(list_tasks())),
        "--seeds": ("0", "K[,..]", "of trainings"),
        "--steps": (None, "S", "of a training (those of the task)"),
    },
    {"steps": 1, "ranks": 1},
    {"arms": lambda _: ARMS},
)

if __name__ == "__main__":
    STUDY.main()
