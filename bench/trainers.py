"""Trainings with one exchange each: mpicomp's, PyTorch's, or none."""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from mpicomp.bench.gloo import process_group
from mpicomp.bench.measure.exchanges import name_of
from mpicomp.bench.replay import Replay
from mpicomp.bench.replica_group import replica_group
from mpicomp.bench.tasks import Task
from mpicomp.bench.tasks.updating import Updater
from mpicomp.bench.train import CPU, finish, threads_of_rank
from mpicomp.bench.training import (
    BACKWARD,
    DDP_FP16,
    DDP_POWERSGD,
    FIELDS,
    FORWARD,
    NONE,
    SECONDS,
    TORCHFT_DILOCO,
    WIRE,
    Exchange,
    Settings,
    Trained,
    train_in_turn,
)
from numpy.typing import NDArray
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from mpicomp.rounds import dense_ring_bytes
from mpicomp.torch import DistributedOptimizer, UpdateOptimizer, broadcast_parameters
from mpicomp.transport import Transport


class Alone:
    """Trains a task without any exchange, every rank on its own share of the data.

    Parameters
    ----------
    exchange : Exchange
        The exchange, as it stands in the row.
    task : Task
        What is trained.
    transport : Transport
        Among the ranks.
    device : torch.device
        Where the model is.
    steps : int, optional
        Number of steps of the whole training, for a task whose rate follows it. None stands for as many as the task is
        tuned for.
    """

    def __init__(
        self,
        exchange: Exchange,
        task: Task,
        transport: Transport,
        device: torch.device = CPU,
        steps: int | None = None,
    ) -> None:
        self.exchange = exchange
        self._device = device
        self._task = task
        self._rank, self._ranks = transport.group.rank, transport.group.size
        self._step = 0
        self._every = 1  # steps from one exchange to the next
        self._model = task.model().to(device)
        self._parameters = list(self._model.parameters())
        self._network = self._model
        self._optimizer: Any = task.optimizer(self._model)
        self._updater = Updater(task, self._optimizer, steps or task.steps)

    @property
    def overlaps(self) -> bool:
        """See `mpicomp.bench.training.Trainer`."""
        return False

    @property
    def numel(self) -> int:
        """Number of parameters of the model."""
        return sum(parameter.numel() for parameter in self._parameters)

    def block(self, steps: int) -> NDArray[np.float64]:
        """See `mpicomp.bench.training.Trainer`; numbers are means over the steps from one exchange to the next."""
        told = np.empty((steps, FIELDS))
        begin = time.perf_counter()
        for own in told:
            self._optimizer.zero_grad()
            loss = self._task.loss(self._network, self._task.batch(self._step, self._rank, self._ranks))
            finish(self._device)
            forward = time.perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
            finish(self._device)
            backward = time.perf_counter()
            self._synchronize()
            self._updater.update()
            finish(self._device)
            end = time.perf_counter()
            own[[SECONDS, FORWARD, BACKWARD]] = end - begin, forward - begin, backward - forward
            own[WIRE] = self._wire_bytes()
            self._step += 1
            begin = end
        means: NDArray[np.float64] = told.reshape(-1, self._every, FIELDS).mean(axis=1)
        return means.repeat(self._every, axis=0)

    def ran(self) -> str | None:
        """See `mpicomp.bench.training.Trainer`."""
        return None

    def digest(self) -> bytes:
        """See `mpicomp.bench.training.Trainer`."""
        digest = hashlib.blake2b(digest_size=8)
        for parameter in self._parameters:
            digest.update(parameter.detach().cpu().contiguous().numpy().data)
        return digest.digest()

    def evaluate(self) -> float:
        """See `mpicomp.bench.training.Trainer`."""
        return self._task.evaluate(self._model)

    def close(self) -> None:
        """Release its MPI resources."""

    def _synchronize(self) -> None:
        """Wait until the gradients are their mean."""

    def _wire_bytes(self) -> float:
        """Return the bytes that left this rank in the last step."""
        return 0.0


class Ours(Alone):
    """Trains with mpicomp's exchange."""

    def __init__(
        self,
        exchange: Exchange,
        task: Task,
        transport: Transport,
        seed: int,
        settings: Settings | None = None,
        device: torch.device = CPU,
    ) -> None:
        super().__init__(exchange, task, transport, device, None if settings is None else settings.total)
        broadcast_parameters(self._model, comm=transport)
        words: dict[str, Any] = {
            "named_parameters": self._model.named_parameters(),
            "compressor": exchange.compressor,
            "collective": exchange.collective,
            "comm": transport,
            "seed": seed,
            "warmup": 0,  # what is named is what is timed
        }
        self._every = settings.every if exchange.updates and settings is not None else 1
        if exchange.updates:
            self._optimizer = UpdateOptimizer(self._optimizer, every=self._every, **words)
        else:
            replay = _replay(exchange, settings)
            self._optimizer = DistributedOptimizer(
                self._optimizer,
                policy=replay,
                overlap=False if exchange.in_line else None,
                bucket_bytes=None if replay is None else replay.bucket_bytes,
                **words,
            )
        self._plans: Counter[str] = Counter()

    @property
    def overlaps(self) -> bool:
        """See `mpicomp.bench.training.Trainer`."""
        return bool(self._optimizer.overlaps)

    def ran(self) -> str | None:
        """See `mpicomp.bench.training.Trainer`."""
        return self._plans.most_common(1)[0][0]

    def close(self) -> None:
        """Release its MPI resources."""
        self._optimizer.close()

    def _synchronize(self) -> None:
        if not self.exchange.updates:
            self._optimizer.synchronize()

    def _wire_bytes(self) -> float:
        if (self._step + 1) % self._every:
            return 0.0
        record = self._optimizer.reducer.last_step
        self._plans.update(name_of(bucket.compressor["id"], bucket.collective) for bucket in record.buckets)
        return float(record.wire_bytes)


def _replay(exchange: Exchange, settings: Settings | None) -> Replay | None:
    """Return the policy that runs an exchange's recorded plans in the steps that count; None where it has none."""
    if exchange.trace is None:
        return None
    if settings is None:
        return Replay(exchange.trace)
    return Replay(exchange.trace, settings.steps * settings.blocks, settings.warm_up)


class PyTorchs(Alone):
    """Trains with DistributedDataParallel over torch.distributed's default group."""

    def __init__(
        self,
        exchange: Exchange,
        task: Task,
        transport: Transport,
        device: torch.device = CPU,
        steps: int | None = None,
    ) -> None:
        super().__init__(exchange, task, transport, device, steps)
        self._network = DistributedDataParallel(self._model)
        self._bytes = dense_ring_bytes(self.numel, self._ranks)
        self._powersgd: PowerSGDState | None = None
        if exchange.name == DDP_FP16:
            self._network.register_comm_hook(None, fp16_compress_hook)
            self._bytes /= 2
        elif exchange.name == DDP_POWERSGD:
            # It cannot begin earlier.
            self._powersgd = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            self._network.register_comm_hook(self._powersgd, powerSGD_hook)

    @property
    def overlaps(self) -> bool:
        """See `mpicomp.bench.training.Trainer`."""
        return True

    def _wire_bytes(self) -> float:
        """Return the bytes of a ring, which gloo uses: gloo itself does not count."""
        state = self._powersgd
        if state is None or state.total_numel_before_compression == 0:
            return self._bytes
        return float(self._bytes * state.total_numel_after_compression / state.total_numel_before_compression)


class Torchfts(Alone):
    """Trains with torchft's DiLoCo, with the outer optimizer of DiLoCo's paper.

    Parameters
    ----------
    exchange, task, transport, device, steps
        See `Alone`.
    manager : torchft.Manager
        Of this rank.
    every : int
        Steps from one exchange to the next.
    """

    def __init__(
        self,
        exchange: Exchange,
        task: Task,
        transport: Transport,
        manager: Any,
        every: int,
        device: torch.device = CPU,
        steps: int | None = None,
    ) -> None:
        from torchft.local_sgd import DiLoCo

        super().__init__(exchange, task, transport, device, steps)
        broadcast_parameters(self._model, comm=transport)
        self._every = every
        outer = torch.optim.SGD(self._parameters, lr=0.7, momentum=0.9, nesterov=True)
        self._exchanging = DiLoCo(manager, [self._model], self._optimizer, outer, sync_every=every)
        self._exchanging.__enter__()

    def close(self) -> None:
        """Take its hooks out of the optimizer."""
        self._exchanging.__exit__(None, None, None)

    def _wire_bytes(self) -> float:
        """Return the bytes of a ring, which gloo uses: gloo itself does not count."""
        return 0.0 if (self._step + 1) % self._every else float(dense_ring_bytes(self.numel, self._ranks))


def train_all(
    exchanges: Sequence[Exchange],
    task: Task,
    settings: Settings,
    seed: int,
    transport: Transport,
    say: Callable[[str], None],
    device: torch.device = CPU,
) -> tuple[list[Trained], int, int]:
    """Train a task with every exchange, each with a model and an optimizer of its own. Collective.

    Parameters
    ----------
    exchanges : sequence of Exchange
        The exchanges.
    task : Task
        What is trained.
    settings : Settings
        The same on all ranks.
    seed : int
        For schemes that draw random numbers.
    transport : Transport
        Among the ranks.
    say : callable
        Is told what goes on.
    device : torch.device
        Where this rank's models are: on all ranks the CPU, or on all of them a GPU.

    Returns
    -------
    trained : list of Trained
        In the order of the exchanges.
    numel : int
        Parameters of the model.
    threads : int
        That a rank computed with.
    """
    torch.set_num_threads(threads_of_rank(transport.cores))
    with ExitStack() as stack:
        if any(not exchange.ours and exchange.name != NONE for exchange in exchanges):
            stack.enter_context(process_group(transport))
        trainers: list[Alone] = []
        for exchange in exchanges:
            if exchange.name == NONE:
                trainers.append(Alone(exchange, task, transport, device, settings.total))
            elif exchange.name == TORCHFT_DILOCO:
                manager = stack.enter_context(replica_group(transport))
                trainers.append(Torchfts(exchange, task, transport, manager, settings.every, device, settings.total))
            elif exchange.ours:
                trainers.append(Ours(exchange, task, transport, seed, settings, device))
            else:
                trainers.append(PyTorchs(exchange, task, transport, device, settings.total))
        trained = train_in_turn(trainers, settings, transport, say)
        numel = trainers[0].numel
        while trainers:  # none is left when the process group goes
            trainers.pop().close()
    return trained, numel, torch.get_num_threads()
