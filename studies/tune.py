"""Compare optimizer settings on a task: ``python studies/tune.py --task text-lstm``.

Ranks are simulated in this process. With ``--ratio`` below 1 every rank keeps a residual and sends the largest elements
of the whole model. The library's exchange is not used: the baseline must not depend on what is compared with it.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from mpicomp.bench.tasks import Task, get_task, list_tasks
from mpicomp.bench.tasks.updating import Updater
from numpy.typing import NDArray

from mpicomp.cli import run_program
from mpicomp.cli.options import read_list
from mpicomp.errors import UnknownNameError

Factory = Callable[[Task, torch.nn.Module], torch.optim.Optimizer]  # makes the optimizer of a task's model


def _settings() -> dict[str, Factory]:
    optim = torch.optim
    settings: dict[str, Factory] = {"task": _task_optimizer}
    for lr in (1e-3, 2e-3, 3e-3, 4e-3):
        settings[f"task lr={lr:g}"] = partial(_task_optimizer, lr=lr)
        settings[f"task99 lr={lr:g}"] = partial(_task_optimizer, lr=lr, betas=(0.9, 0.99))
    for lr in (0.1, 0.3, 1.0, 3.0):
        settings[f"sgd lr={lr:g}"] = partial(_other_optimizer, optim.SGD, lr=lr)
    for lr in (0.03, 0.1, 0.3, 1.0, 2.0):
        settings[f"momentum lr={lr:g}"] = partial(_other_optimizer, optim.SGD, lr=lr, momentum=0.9)
        settings[f"nesterov lr={lr:g}"] = partial(_other_optimizer, optim.SGD, lr=lr, momentum=0.9, nesterov=True)
    for lr in (1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3, 8e-3, 16e-3):
        settings[f"adam lr={lr:g}"] = partial(_other_optimizer, optim.Adam, lr=lr)
        settings[f"adamw lr={lr:g}"] = partial(_other_optimizer, optim.AdamW, lr=lr, weight_decay=0.1)
        # A shorter memory of magnitudes suits runs of a few hundred steps.
        settings[f"adam99 lr={lr:g}"] = partial(_other_optimizer, optim.Adam, lr=lr, betas=(0.9, 0.99))
    return settings


def _task_optimizer(task: Task, model: torch.nn.Module, **changed: Any) -> torch.optim.Optimizer:
    """Return the task's optimizer, with other settings in every group of parameters."""
    optimizer = task.optimizer(model)
    for group in optimizer.param_groups:
        group.update(changed)
    return optimizer


def _other_optimizer(
    optimizer: Callable[..., torch.optim.Optimizer], task: Task, model: torch.nn.Module, **settings: Any
) -> torch.optim.Optimizer:
    """Return an optimizer that is not the task's, with the same settings for all parameters."""
    return optimizer(model.parameters(), **settings)


def train(task: Task, factory: Factory, ranks: int, steps: int, ratio: float = 1.0) -> tuple[float, float]:
    """Train a task with simulated ranks."""
    model = task.model()
    parameters = list(model.parameters())
    optimizer = factory(task, model)
    updater = Updater(task, optimizer, steps)
    numel = sum(parameter.numel() for parameter in parameters)
    residuals = np.zeros((ranks if ratio < 1 else 0, numel), np.float32)
    keep = max(1, round(ratio * numel))
    seconds = []
    for step in range(steps):
        optimizer.zero_grad()
        mean = np.zeros(numel if ratio < 1 else 0, np.float32)
        for rank in range(ranks):
            start = time.perf_counter()
            # Backward adds to what earlier ranks left: the sum over ranks that dense exchange delivers.
            torch.autograd.backward(task.loss(model, task.batch(step, rank, ranks)) / ranks)
            seconds.append(time.perf_counter() - start)
            if ratio < 1:
                accumulated = residuals[rank]
                accumulated += _flat(parameters)
                kept = _largest(np.abs(accumulated), keep)
                mean[kept] += accumulated[kept]
                accumulated[kept] = 0
                optimizer.zero_grad()
        if ratio < 1:
            _deliver(mean, parameters)
        updater.update()
    return task.evaluate(model), float(np.median(seconds))


def _flat(parameters: list[torch.nn.Parameter]) -> NDArray[np.float32]:
    gradients = [parameter.grad for parameter in parameters]
    return np.concatenate([gradient.numpy().ravel() for gradient in gradients if gradient is not None])


def _deliver(mean: NDArray[np.float32], parameters: list[torch.nn.Parameter]) -> None:
    start = 0
    for parameter in parameters:
        end = start + parameter.numel()
        parameter.grad = torch.from_numpy(mean[start:end]).view_as(parameter)
        start = end


def _largest(magnitudes: NDArray[np.float32], keep: int) -> NDArray[np.intp]:
    """Return the places of the `keep` largest values."""
    # A threshold from every 64th value that surely lets `keep` pass leaves few to sort.
    sample = np.sort(magnitudes[::64])[::-1]
    threshold = sample[min(len(sample) - 1, 2 * keep // 64 + 16)]
    candidates = np.flatnonzero(magnitudes >= threshold)
    if len(candidates) < keep:
        return np.argpartition(magnitudes, -keep)[-keep:]
    return candidates[np.argpartition(magnitudes[candidates], -keep)[-keep:]]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="studies/tune.py", description=__doc__)
    parser.add_argument("--task", choices=list_tasks(), default="text-lstm")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, help="default: the task's")
    parser.add_argument("--seeds", default="0", metavar="K[,..]")
    parser.add_argument("--ratio", type=float, default=1.0, help="kept fraction; 1 is dense")
    parser.add_argument("--setting", action="append", help="a name as printed; default: all that are not the task's")
    parser.set_defaults(alone=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print one row for each setting and seed."""
    settings = _settings()
    chosen = arguments.setting or [name for name in settings if not name.startswith("task")]
    for name in chosen:
        if name not in settings:
            raise UnknownNameError("tune: --setting", name, list(settings))
    torch.set_num_threads(1)  # rows of different machines differ in their seconds only
    for name in chosen:
        for seed in map(int, read_list(arguments.seeds)):
            task = get_task(arguments.task, seed)
            steps = arguments.steps or task.steps
            quality, median_s = train(task, settings[name], arguments.ranks, steps, arguments.ratio)
            row = {"task": task.name, "setting": name, "seed": seed, "ratio": arguments.ratio, "steps": steps}
            print(json.dumps({**row, "quality": round(quality, 4), "median_s": round(median_s, 4)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
