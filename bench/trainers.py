"""Trainings with one exchange each: mpicomp's, another library's, or none."""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from mpicomp.bench import demo
from mpicomp.bench.gloo import process_group
from mpicomp.bench.measure.exchanges import name_of
from mpicomp.bench.plain_topk import PlainTopK, over_gloo, over_mpi
from mpicomp.bench.replay import Replay
from mpicomp.bench.replica_group import replica_group
from mpicomp.bench.tasks import Task
from mpicomp.bench.tasks.updating import Updater, plain
from mpicomp.bench.train import CPU, finish, threads_of_rank
from mpicomp.bench.training import (
    BACKWARD,
    COMPRESS,
    DDP_BF16,
    DDP_FP16,
    DDP_POWERSGD,
    DDP_POWERSGD_1BUCKET,
    DECODE,
    FIELDS,
    FORWARD,
    NONE,
    PLAIN_TOPK,
    PLAIN_TOPK_MPI,
    PROCESSOR,
    SECONDS,
    TORCHFT_DDP,
    TORCHFT_DILOCO,
    WIRE,
    Exchange,
    Settings,
    Trained,
    train_in_turn,
)
from numpy.typing import NDArray
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from mpicomp.errors import ConfigurationError
from mpicomp.reducer.agreement import together
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
        self._phases_s: Sequence[float] = (np.nan,) * 3  # of the last exchange, where it tells them
        self._model = task.model().to(device)
        self._parameters = list(self._model.parameters())
        self._network = self._model
        self._optimizer: Any = task.optimizer(self._model)
        if exchange.name == demo.NAME:
            self._optimizer = plain(self._optimizer)
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
        begin, used = time.perf_counter(), time.process_time()
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
            end, used_now = time.perf_counter(), time.process_time()
            own[[SECONDS, FORWARD, BACKWARD]] = end - begin, forward - begin, backward - forward
            own[WIRE], own[PROCESSOR] = self._wire_bytes(), used_now - used
            own[COMPRESS : DECODE + 1] = self._phases_s
            self._step += 1
            begin, used = end, used_now
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
            words |= demo.SETTINGS if exchange.name == demo.NAME else {}
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
            self._phases_s = (0.0,) * 3
            return 0.0
        record = self._optimizer.reducer.last_step
        self._phases_s = [record.phases_s[name] for name in ("compress", "exchange", "decode")]
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
        self._bytes = dense_ring_bytes(self.numel, self._ranks)
        whole = self.numel // 250_000 + 1  # megabytes in which all gradients have room
        self._network = DistributedDataParallel(
            self._model, bucket_cap_mb=whole if exchange.name == DDP_POWERSGD_1BUCKET else None
        )
        self._powersgd: PowerSGDState | None = None
        if exchange.name in (DDP_FP16, DDP_BF16):
            hook = fp16_compress_hook if exchange.name == DDP_FP16 else bf16_compress_hook
            together(lambda: self._register(hook), transport, exchange.name)
            self._bytes /= 2
        elif exchange.name in (DDP_POWERSGD, DDP_POWERSGD_1BUCKET):
            # It cannot begin earlier.
            self._powersgd = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            self._network.register_comm_hook(self._powersgd, powerSGD_hook)

    @property
    def overlaps(self) -> bool:
        """See `mpicomp.bench.training.Trainer`."""
        return True

    def _register(self, hook: Any) -> None:
        """Register a hook that needs no state."""
        network: Any = self._network
        try:
            network.register_comm_hook(None, hook)
        except TypeError as error:  # that for bfloat16 is for NCCL alone
            raise ConfigurationError(f"{self.exchange.name}: PyTorch refuses this hook over gloo: {error}") from error

    def _wire_bytes(self) -> float:
        """Return the bytes of a ring, which gloo uses: gloo itself does not count."""
        state = self._powersgd
        if state is None or state.total_numel_before_compression == 0:
            return self._bytes
        return float(self._bytes * state.total_numel_after_compression / state.total_numel_before_compression)


class ByHand(Alone):
    """Trains with a top-k that is written by hand, over gloo or over the transport.

    Parameters
    ----------
    exchange, task, transport, device, steps
        See `Alone`; the exchange's compressor has the ratio.
    """

    def __init__(
        self,
        exchange: Exchange,
        task: Task,
        transport: Transport,
        device: torch.device = CPU,
        steps: int | None = None,
    ) -> None:
        super().__init__(exchange, task, transport, device, steps)
        broadcast_parameters(self._model, comm=transport)
        ratio = getattr(exchange.compressor, "ratio", 0.01)
        self._plain = PlainTopK(ratio, over_gloo if exchange.name == PLAIN_TOPK else over_mpi(transport))

    def _synchronize(self) -> None:
        self._plain.average(self._parameters)
        self._phases_s = self._plain.phases_s.tolist()

    def _wire_bytes(self) -> float:
        """Return what a rank's payload takes to all others, one by one or around a ring."""
        return float((self._ranks - 1) * self._plain.sent_bytes)


class TorchftsDDP(Alone):
    """Trains with torchft's DistributedDataParallel: all ranks agree on who takes part, and on each step.

    Parameters
    ----------
    exchange, task, transport, device, steps
        See `Alone`.
    manager : torchft.Manager
        Of this rank.
    """

    def __init__(
        self,
        exchange: Exchange,
        task: Task,
        transport: Transport,
        manager: Any,
        device: torch.device = CPU,
        steps: int | None = None,
    ) -> None:
        import torchft

        super().__init__(exchange, task, transport, device, steps)
        broadcast_parameters(self._model, comm=transport)
        self._manager = manager
        self._network = torchft.DistributedDataParallel(manager, self._model)
        # Clearing gradients asks for a quorum; the step itself is the updater's, behind `_synchronize`.
        self._optimizer = torchft.Optimizer(manager, self._optimizer)

    def _synchronize(self) -> None:
        if not self._manager.should_commit():
            raise RuntimeError("torchft-ddp: torchft gave a step up, as a rank or an exchange had failed")

    def _wire_bytes(self) -> float:
        """Return the bytes of a ring, which gloo uses: gloo itself does not count."""
        return float(dense_ring_bytes(self.numel, self._ranks))


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
            elif exchange.name in (PLAIN_TOPK, PLAIN_TOPK_MPI):
                trainers.append(ByHand(exchange, task, transport, device, settings.total))
            elif exchange.name == TORCHFT_DDP:
                manager = stack.enter_context(replica_group(transport, exchange.name))
                trainers.append(TorchftsDDP(exchange, task, transport, manager, device, settings.total))
            elif exchange.name == TORCHFT_DILOCO:
                manager = stack.enter_context(replica_group(transport, exchange.name))
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
