"""The loop that trains a task, and the replicas of its model that it trains: without an exchange, and by mpicomp."""

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mpicomp.bench.measure.timings import gather
from mpicomp.bench.tasks import Task

from mpicomp.mpi import Transport
from mpicomp.mpi.connect import connect
from mpicomp.mpi.rounds import Group
from mpicomp.mpi.transport import RoundLog
from mpicomp.reducer import StepRecord
from mpicomp.torch import DistributedOptimizer, UpdateOptimizer, broadcast_parameters, replicas
from mpicomp.torch.muon import muon_and_adamw, settings_of_changes
from mpicomp.torch.shards import local_of

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

    @property
    def seconds(self) -> float:
        return self.end - self.start


def train(
    task: Task, replica: "Replica", steps: Iterable[int], on_step: Callable[[int, StepTimes], bool | None]
) -> None:
    """Train a replica for some steps; ``on_step`` returns True where the training is to end after a step."""
    group = replica.group
    for step in steps:
        start = time.perf_counter()
        loss = task.loss(replica.network, task.batch(step, group.rank, group.size))
        replica.finish()
        forward = time.perf_counter()
        if on_step(step, StepTimes(float(loss.detach()), start, forward, *replica.step(loss))):
            return


def update(task: Task, optimizer: Any, schedule: torch.optim.lr_scheduler.LRScheduler | None) -> None:
    """Clip the gradients, which must be the mean over ranks by now, do the step, and set the rate of the next."""
    if task.clip is not None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, task.clip)
    optimizer.step()
    if schedule is not None:
        schedule.step()


class Replica:
    """Model and optimizer of one rank, which steps without an exchange; of a ``mesh`` each rank holds a shard."""

    overlaps = False  # whether an exchange begins during backward
    record: StepRecord | None = None  # mpicomp's of the last step, empty where nothing was exchanged
    wire_bytes = 0.0  # that left this rank in the last step
    phases_s: Mapping[str, float] | None = None  # seconds of the last step's exchange, where they are known

    def __init__(
        self,
        task: Task,
        group: Group,
        steps: int,
        device: torch.device = CPU,
        *,
        muon: bool = False,
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
        self.numel = sum(local_of(parameter).numel() for parameter in self.parameters)  # that this rank exchanges
        self.network = self.model
        self.optimizer: Any = (
            muon_and_adamw(list(self.model.named_parameters()), self.model) if muon else task.optimizer(self.model)
        )
        for parameters in self.optimizer.param_groups:
            parameters["lr"] *= lr_scale
        self.schedule = task.schedule(self.optimizer, steps)

    def step(self, loss: torch.Tensor) -> tuple[float, float, float]:
        """Go backward, exchange and update; return when each ended."""
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.finish()
        backward = time.perf_counter()
        self.synchronize()
        self.finish()
        synchronized = time.perf_counter()
        update(self.task, self.optimizer, self.schedule)
        self.finish()
        return backward, synchronized, time.perf_counter()

    def synchronize(self) -> None:
        """Wait until the gradients are their mean."""

    def finish(self) -> None:
        """Wait for the work of a GPU, so that seconds are those of the work in them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Release its resources."""

    def differing_ranks(self, transport: Transport) -> list[int]:
        """Return the ranks whose parameters have other bits than those of the first rank of their shard. Collective."""
        digest = hashlib.blake2b(digest_size=8)
        for parameter in self.parameters:
            digest.update(local_of(parameter).detach().cpu().contiguous().numpy().data)
        first: dict[float, Any] = {}
        rows = gather(np.array([self._shard, *digest.digest()], np.float64), transport).tolist()
        return [rank for rank, (shard, *found) in enumerate(rows) if first.setdefault(shard, found) != found]


class MpicompReplica(Replica):
    """A replica whose gradients, or updates, mpicomp exchanges.

    ``updates`` are settings of `mpicomp.torch.UpdateOptimizer`, and ``"inner": "muon"`` for Muon and AdamW as ranks'
    own optimizers; others are those of the wrapping optimizer. Collective over the transport's ranks.
    """

    def __init__(
        self,
        task: Task,
        transport: Transport,
        steps: int,
        device: torch.device = CPU,
        *,
        updates: Mapping[str, Any] | None = None,
        lr_scale: float = 1.0,
        mesh: Any = None,
        **settings: Any,
    ) -> None:
        of_updates = dict(updates or {})
        muon = of_updates.pop("inner", None) == "muon"
        super().__init__(task, transport.group, steps, device, muon=muon, lr_scale=lr_scale, mesh=mesh)
        self.exchanges_updates = updates is not None
        self.between = transport if mesh is None else connect(replicas(self.model))  # ranks with the same shard
        self._owns_transport = mesh is not None
        broadcast: list[RoundLog] = []
        self.between.log = broadcast
        broadcast_parameters(self.model, comm=self.between)
        self.once_bytes = round(sum(entry.wire_bytes for entry in broadcast))
        settings |= {"named_parameters": self.model.named_parameters(), "comm": self.between}
        wrap: Any = DistributedOptimizer if updates is None else UpdateOptimizer
        if muon:
            of_updates = settings_of_changes(self.between.group.size, settings.get("compressor")) | of_updates
        self.optimizer = wrap(self.optimizer, **settings, **of_updates)
        self.schedule = task.schedule(self.optimizer, steps)
        self.record: StepRecord = StepRecord(0)

    def step(self, loss: torch.Tensor) -> tuple[float, float, float]:
        before = self.optimizer.reducer.last_step
        ends = super().step(loss)
        last = self.optimizer.reducer.last_step
        self.record = record = StepRecord(0) if last is before else last
        self.wire_bytes, self.phases_s = float(record.wire_bytes), record.phases_s
        self.overlaps = bool(getattr(self.optimizer, "overlaps", False))  # not in trial steps; none for updates
        return ends

    def synchronize(self) -> None:
        if not self.exchanges_updates:
            self.optimizer.synchronize()

    def close(self) -> None:
        self.optimizer.close()
        if self._owns_transport:
            self.between.close()


def shard(model: torch.nn.Module, mesh: Any, **settings: Any) -> None:
    """Shard each layer of a model's sequences as a group of its own, and then the rest."""
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
