"""A replica of a task's model on one rank: its exchange, its timed steps, and whether other ranks have the same."""

import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mpicomp.bench.measure.timings import gather
from mpicomp.bench.tasks import Task
from mpicomp.bench.tasks.updating import Updater, inner_optimizer

from mpicomp.rounds import Group
from mpicomp.torch import DistributedOptimizer, UpdateOptimizer
from mpicomp.torch.shards import local_of
from mpicomp.transport import Transport

CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepTimes:
    """Loss of a step, and when its parts ended, by ``time.perf_counter``."""

    loss: float  # on this rank's batch
    start: float
    forward: float
    backward: float
    synchronized: float
    end: float


class Replica:
    """Model, optimizer and data of one rank; of the ranks of a ``mesh`` each holds a shard of the model."""

    def __init__(
        self,
        task: Task,
        group: Group,
        steps: int,
        device: torch.device = CPU,
        *,
        inner: str = "task",
        lr_scale: float = 1.0,
        mesh: Any = None,
    ) -> None:
        self.task = task
        self.group = group
        self.device = device
        self.model = task.model().to(device)
        self._shard = 0 if mesh is None else mesh.get_local_rank()
        if mesh is not None:
            shard(self.model, mesh)
        self.parameters = list(self.model.parameters())
        self.network = self.model
        self.optimizer: Any = inner_optimizer(task, self.model, inner)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] *= lr_scale
        self._total_steps = steps
        self.updater = Updater(task, self.optimizer, steps)

    def exchange_by(self, transport: Transport, updates: Mapping[str, Any] | None, **settings: Any) -> None:
        """Have steps exchange gradients or, with its settings, updates. Collective."""
        settings |= {"named_parameters": self.model.named_parameters(), "comm": transport}
        if updates is None:
            self.optimizer = DistributedOptimizer(self.optimizer, **settings)
        else:
            of_updates = {name: value for name, value in updates.items() if name != "inner"}
            self.optimizer = UpdateOptimizer(self.optimizer, **settings, **of_updates)
        self.updater = Updater(self.task, self.optimizer, self._total_steps)

    @property
    def numel(self) -> int:
        """Number of elements that this rank holds, and exchanges."""
        return sum(local_of(parameter).numel() for parameter in self.parameters)

    def step(
        self,
        step: int,
        synchronize: Callable[[], None],
        *,
        set_to_none: bool = True,
        wait_for_forward: bool = True,
    ) -> StepTimes:
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=set_to_none)
        loss = self.task.loss(self.network, self.task.batch(step, self.group.rank, self.group.size))
        if wait_for_forward:
            self.finish()
        forward = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        self.finish()
        backward = time.perf_counter()
        synchronize()
        self.finish()
        synchronized = time.perf_counter()
        self.updater.update()
        value = float(loss.detach())
        self.finish()
        return StepTimes(value, start, forward, backward, synchronized, time.perf_counter())

    def differing_ranks(self, transport: Transport) -> list[int]:
        """Return the ranks whose parameters have other bits than those of the first rank of their shard. Collective."""
        digest = hashlib.blake2b(digest_size=8)
        for parameter in self.parameters:
            digest.update(local_of(parameter).detach().cpu().contiguous().numpy().data)
        first: dict[float, Any] = {}
        rows = gather(np.array([self._shard, *digest.digest()], np.float64), transport).tolist()
        return [rank for rank, (shard, *found) in enumerate(rows) if first.setdefault(shard, found) != found]

    def finish(self) -> None:
        """Wait for the work of a GPU, so that seconds are those of the work in them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def shard(model: torch.nn.Module, mesh: Any, **settings: Any) -> None:
    """Shard each layer of a model's sequences as a group of its own, and then what is left."""
    from torch.distributed.fsdp import fully_shard  # long to import

    sequences = (torch.nn.Sequential, torch.nn.ModuleList)
    inside_out = [module for module in reversed(list(model.modules())) if isinstance(module, sequences)]
    layers = [layer for sequence in inside_out for layer in sequence if any(True for _ in layer.parameters())]
    for layer in dict.fromkeys((*layers, model)):
        fully_shard(layer, mesh=mesh, **settings)


def threads_of_rank(cores: float) -> int:
    """Return the number of threads of a rank: the user's setting, else its share of this host's cores."""
    if os.environ.get("OMP_NUM_THREADS"):
        return torch.get_num_threads()
    # Slurm's limit of a task binds no process where its plugin for binding is off.
    slurm = os.environ.get("SLURM_CPUS_PER_TASK", "")
    task = int(slurm) if slurm.isascii() and slurm.isdigit() else math.inf
    return max(1, int(min(cores, task, len(os.sched_getaffinity(0)))))
