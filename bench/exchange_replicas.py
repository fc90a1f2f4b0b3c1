"""Replicas with one exchange each: mpicomp's, another library's, or none."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mpicomp.bench.measure.exchanges import name_of
from mpicomp.bench.peer_exchanges import PlainTopK, over_gloo, over_mpi, process_group, replica_group
from mpicomp.bench.replica import CPU, Replica, threads_of_rank
from mpicomp.bench.tasks import Task
from mpicomp.bench.training_rows import (
    BACKWARD,
    COMPRESS,
    DDP,
    DECODE,
    FIELDS,
    FORWARD,
    NONE,
    PLAIN_TOPK,
    PLAIN_TOPK_MPI,
    PRESETS,
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
from mpicomp.reducer.agreement import run_collectively
from mpicomp.rounds import dense_ring_bytes
from mpicomp.torch import broadcast_parameters
from mpicomp.transport import Transport


@dataclass(frozen=True)
class Job:
    """The training that all exchanges do."""

    task: Task
    settings: Settings
    seed: int  # of schemes that draw random numbers
    transport: Transport
    device: torch.device = CPU  # device of this rank's models: on all ranks the CPU, or on all of them a GPU


class NoExchange(Replica):
    """Trains without an exchange, every rank on its share of the data; the base of the others."""

    def __init__(self, exchange: Exchange, job: Job) -> None:
        _, self._preset = PRESETS.get(exchange.name, ({}, {}))
        inner = self._preset.get("inner", "task")
        super().__init__(job.task, job.transport.group, job.settings.total, job.device, inner=inner)
        self.exchange = exchange
        self._steps = 0
        self._every = job.settings.every if exchange.updates else 1  # steps from one exchange to the next
        self._phases_s: Sequence[float] = (np.nan,) * 3  # of the last exchange, where it reports them

    def block(self, steps: int) -> NDArray[np.float64]:
        """Do some steps; return their numbers, as means over the steps from one exchange to the next."""
        numbers = np.empty((steps, FIELDS))
        begin, used = time.perf_counter(), time.process_time()
        for row in numbers:
            times = self.step(self._steps, self._synchronize)
            used_now = time.process_time()
            row[[SECONDS, FORWARD, BACKWARD]] = times.end - begin, times.forward - begin, times.backward - times.forward
            row[WIRE], row[PROCESSOR] = self._wire_bytes(), used_now - used
            row[COMPRESS : DECODE + 1] = self._phases_s
            self._steps += 1
            begin, used = times.end, used_now
        means: NDArray[np.float64] = numbers.reshape(-1, self._every, FIELDS).mean(axis=1)
        return means.repeat(self._every, axis=0)

    @property
    def overlaps(self) -> bool:
        return False

    def ran(self) -> str | None:
        """Return the plan that most steps ran; None where plans are not mpicomp's."""
        return None

    def evaluate(self) -> float:
        return self.task.evaluate(self.model)

    def close(self) -> None:
        """Release its resources."""

    @property
    def _exchanged(self) -> bool:
        return (self._steps + 1) % self._every == 0

    def _synchronize(self) -> None:
        """Wait until the gradients are their mean."""

    def _wire_bytes(self) -> float:
        return 0.0

    def _ring_bytes(self) -> float:
        """Return the bytes of a ring, which gloo uses and does not count."""
        return float(dense_ring_bytes(self.numel, self.group.size))


class _Mpicomp(NoExchange):
    def __init__(self, exchange: Exchange, job: Job) -> None:
        super().__init__(exchange, job)
        broadcast_parameters(self.model, comm=job.transport)
        updates, words = None, dict[str, Any]()
        if exchange.updates:
            updates = self._preset | {"sync_every": self._every}
        else:
            words["overlap"] = False if exchange.in_line else None
        self.exchange_by(
            job.transport,
            updates,
            compressor=exchange.compressor,
            collective=exchange.collective,
            seed=job.seed,
            warmup=0,  # what is named is what is timed
            **words,
        )
        self._plans: Counter[str] = Counter()

    @property
    def overlaps(self) -> bool:
        return bool(self.optimizer.overlaps)

    def ran(self) -> str | None:
        return self._plans.most_common(1)[0][0]

    def close(self) -> None:
        self.optimizer.close()

    def _synchronize(self) -> None:
        if not self.exchange.updates:
            self.optimizer.synchronize()

    def _wire_bytes(self) -> float:
        if not self._exchanged:
            self._phases_s = (0.0,) * 3
            return 0.0
        record = self.optimizer.reducer.last_step
        self._phases_s = [record.phases_s[name] for name in ("compress", "exchange", "decode")]
        self._plans.update(name_of(bucket.compressor["id"], bucket.collective) for bucket in record.buckets)
        return float(record.wire_bytes)


_SIXTEEN_BITS = {"ddp-fp16": fp16_compress_hook, "ddp-bf16": bf16_compress_hook}


class _PyTorch(NoExchange):
    """Trains with DistributedDataParallel over torch.distributed's default group."""

    @property
    def overlaps(self) -> bool:
        return True

    def __init__(self, exchange: Exchange, job: Job) -> None:
        super().__init__(exchange, job)
        megabytes = self.numel // 250_000 + 1 if exchange.name.endswith("1bucket") else None
        self.network = DistributedDataParallel(self.model, bucket_cap_mb=megabytes)
        self._wire_fraction = 1.0  # of a dense ring
        self._powersgd: PowerSGDState | None = None
        hook = _SIXTEEN_BITS.get(exchange.name)
        if hook is not None:
            run_collectively(lambda: self._register(hook), job.transport, exchange.name)
            self._wire_fraction = 0.5
        elif exchange.name.startswith("ddp-powersgd"):
            # It cannot begin earlier.
            self._powersgd = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            self.network.register_comm_hook(self._powersgd, powerSGD_hook)

    def _register(self, hook: Any) -> None:
        network: Any = self.network
        try:
            network.register_comm_hook(None, hook)
        except TypeError as error:  # that for bfloat16 needs NCCL
            raise ConfigurationError(f"{self.exchange.name}: PyTorch refuses this hook over gloo: {error}") from error

    def _wire_bytes(self) -> float:
        state, fraction = self._powersgd, self._wire_fraction
        if state is not None and state.total_numel_before_compression:
            fraction = state.total_numel_after_compression / state.total_numel_before_compression
        return self._ring_bytes() * fraction


class _PlainTopK(NoExchange):
    """Trains with a top-k that is written by hand, over gloo or over the transport."""

    def __init__(self, exchange: Exchange, job: Job) -> None:
        super().__init__(exchange, job)
        broadcast_parameters(self.model, comm=job.transport)
        ratio = getattr(exchange.compressor, "ratio", 0.01)
        self._plain = PlainTopK(ratio, over_gloo if exchange.name == PLAIN_TOPK else over_mpi(job.transport))

    def _synchronize(self) -> None:
        self._plain.average(self.parameters)
        self._phases_s = self._plain.phases_s.tolist()

    def _wire_bytes(self) -> float:
        return float((self.group.size - 1) * self._plain.sent_bytes)


class _TorchftDDP(NoExchange):
    """Trains with torchft's DistributedDataParallel: all ranks agree on who takes part, and on each step."""

    def __init__(self, exchange: Exchange, job: Job, manager: Any) -> None:
        import torchft

        super().__init__(exchange, job)
        broadcast_parameters(self.model, comm=job.transport)
        self._manager = manager
        self.network = torchft.DistributedDataParallel(manager, self.model)
        # Clearing gradients asks for a quorum; the step itself is the updater's, behind `_synchronize`.
        self.optimizer = torchft.Optimizer(manager, self.optimizer)

    def _synchronize(self) -> None:
        if not self._manager.should_commit():
            raise RuntimeError("torchft-ddp: torchft gave a step up, as a rank or an exchange had failed")

    def _wire_bytes(self) -> float:
        return self._ring_bytes()


class _TorchftDiLoCo(NoExchange):
    """Trains with torchft's DiLoCo, with the outer optimizer of DiLoCo's paper."""

    def __init__(self, exchange: Exchange, job: Job, manager: Any) -> None:
        from torchft.local_sgd import DiLoCo

        super().__init__(exchange, job)
        broadcast_parameters(self.model, comm=job.transport)
        outer = torch.optim.SGD(self.parameters, lr=0.7, momentum=0.9, nesterov=True)
        self._hooks = DiLoCo(manager, [self.model], self.optimizer, outer, sync_every=self._every)
        self._hooks.__enter__()

    def close(self) -> None:
        self._hooks.__exit__(None, None, None)

    def _wire_bytes(self) -> float:
        return self._ring_bytes() if self._exchanged else 0.0


_TORCHFT = {TORCHFT_DDP: _TorchftDDP, TORCHFT_DILOCO: _TorchftDiLoCo}
_OTHERS = {NONE: NoExchange, PLAIN_TOPK: _PlainTopK, PLAIN_TOPK_MPI: _PlainTopK} | dict.fromkeys(DDP, _PyTorch)


@contextmanager
def trainers(exchanges: Sequence[Exchange], job: Job) -> Iterator[list[NoExchange]]:
    """Return a context with a trainer for each exchange, closed before its process group. Collective."""
    with ExitStack() as stack:
        if any(not exchange.ours and exchange.name != NONE for exchange in exchanges):
            stack.enter_context(process_group(job.transport))
        made: list[NoExchange] = []
        for exchange in exchanges:
            if exchange.name in _TORCHFT:
                manager = stack.enter_context(replica_group(job.transport, exchange.name))
                made.append(_TORCHFT[exchange.name](exchange, job, manager))
            else:
                made.append(_OTHERS.get(exchange.name, _Mpicomp)(exchange, job))
        yield made
        while made:  # none is left when the process group goes
            made.pop().close()


def train_all(exchanges: Sequence[Exchange], job: Job, say: Callable[[str], None]) -> tuple[list[Trained], int, int]:
    """Train with every exchange, each with a new model and optimizer. Collective."""
    torch.set_num_threads(threads_of_rank(job.transport.cores))
    with trainers(exchanges, job) as made:
        return train_in_turn(made, job.settings, job.transport, say), made[0].numel, torch.get_num_threads()
