"""Training steps with several exchanges in turn, and with none: the share of throughput that each leaves."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import numpy as np
from mpicomp.bench.measure.intervals import block_interval, ratio_interval
from mpicomp.bench.measure.timings import gather
from numpy.typing import NDArray

from mpicomp.compressors import Compressor
from mpicomp.mpi import Transport

if TYPE_CHECKING:  # they load torch
    from mpicomp.bench.tasks import Task
    from mpicomp.bench.trainer import Replica, StepTimes

NONE, AUTO, DILOCO = "none", "auto", "torchft-diloco"
DDP = ("ddp", "ddp-fp16", "ddp-powersgd")
OTHERS = (NONE, *DDP, DILOCO)  # exchanges that are not mpicomp's
INLINE = "-inline"  # suffix of the name of an exchange that waits for backward to end
UPDATES = "updates:"
"""Prefix of the name of an exchange of updates, in place of gradients; that of the exchange follows."""
MUON = "muon"  # name of the exchange of `mpicomp.torch.LocalMuon`
MUON_COMPRESSOR = {"id": "onebit"}
MUON_UPDATES: dict[str, Any] = {"inner": "muon", "sync_every": 10}

SECONDS, FORWARD, BACKWARD, WIRE, PROCESSOR, COMPRESS, EXCHANGE, DECODE = range(8)
"""Columns of the numbers that a rank reports of a step: seconds, those of two parts, bytes that left the rank, seconds
of a processor's time, and the seconds of the phases of its exchange, NaN where the exchange does not report them."""
FIELDS = 8  # numbers that a rank reports of a step


class _Training(TypedDict):
    """The training and its exchange."""

    task: Annotated[str, "name of the task"]
    ranks: Annotated[int, "that took part"]
    hosts: Annotated[int, "that they are on"]
    parameters: Annotated[int, "of the model, float32"]
    batch_size: Annotated[int, "samples of a rank in a step"]
    seed: Annotated[int, "of the model, the batches and the schemes"]
    warm_up: Annotated[int, "steps that do not count"]
    quality_name: Annotated[str, "name of `quality`"]
    exchange: Annotated[str, "the name in `--exchange`"]
    compressor: Annotated[str | None, "name; null where none was named"]
    ratio: Annotated[float | None, "kept fraction that was asked for; null where there is none"]
    collective: Annotated[str | None, "the one requested; null for `none` and for DDP"]
    overlap: Annotated[bool, "whether it begins during backward"]
    ran: Annotated[str | None, "the plan that most buckets and steps ran; null for `none` and for DDP"]
    blocks: Annotated[int, "in which the steps that count were done"]
    steps: Annotated[int, "that count"]


class TrainingRow(_Training):
    """A row of ``bench training``."""

    median_s: Annotated[float, "median of the samples"]
    low_s: Annotated[float | None, "lower end of its 95 % interval"]
    high_s: Annotated[float | None, "its upper end"]
    mean_s: Annotated[float, "mean of the samples"]
    p95_s: Annotated[float, "95 % of the samples took no longer"]
    samples_per_s: Annotated[float, "of all ranks: `batch_size ranks / median_s`"]
    forward_s: Annotated[float, "median: batch and forward"]
    backward_s: Annotated[float, "median: backward, and the part of the exchange during it"]
    after_s: Annotated[float, "median: from the end of backward to the end of the step"]
    phases_s: Annotated[
        dict[str, Any] | None, "medians: `compress`, `exchange` with waiting, `decode`; null where unknown"
    ]
    processor_s: Annotated[float, "processor time of a rank in a step, all its threads; mean over ranks and steps"]
    wire_bytes: Annotated[float, "that left a rank in a step, mean; of DDP those of a ring, which is gloo's way"]
    link_bytes: Annotated[float | None, "that left a host's eth0 in a step, with headers; null outside a lab"]
    replicas_equal: Annotated[bool, "whether all ranks ended with the same parameters, bit for bit"]
    quality: Annotated[float | None, "on held-out data, after all steps; null where ranks differ"]
    of_none: Annotated[float | None, "`median_s` of `none` over this one; null where `none` was not run"]
    of_none_low: Annotated[float | None, "lower end of its 95 % interval"]
    of_none_high: Annotated[float | None, "its upper end"]


@dataclass(frozen=True)
class Exchange:
    """The exchange that averages the gradients of a training, mpicomp's or another one's."""

    name: str  # the requested one: unique, and the same with `INLINE` behind it for the same exchange in line
    compressor: Compressor | None = None  # of mpicomp's; None lets it choose
    collective: str = AUTO  # of mpicomp's

    @property
    def updates(self) -> bool:
        """Whether updates of the optimizers are exchanged in place of gradients."""
        return self.name.startswith(UPDATES) or self.name in (DILOCO, MUON)


@dataclass(frozen=True)
class Settings:
    """Length of the training, and the seed."""

    steps: int  # steps in a block
    blocks: int  # blocks of each exchange
    warm_up: int  # steps of each exchange before its blocks
    # Steps from one exchange of updates to the next, of which those of a block and of the warm-up are multiples
    every: int = 1
    seed: int = 0  # of schemes that draw random numbers


class Trainer:
    """Trains one replica, block by block."""

    def __init__(self, exchange: Exchange, task: "Task", replica: "Replica", every: int) -> None:
        self.exchange = exchange
        self.replica = replica
        self.plans: Counter[str] = Counter()  # steps and buckets of mpicomp's plans
        self._task = task
        self._every = every if exchange.updates else 1  # steps from one exchange to the next
        self._steps = 0

    def block(self, steps: int) -> NDArray[np.float64]:
        """Do some steps; return their numbers, as means over the steps from one exchange to the next."""
        from mpicomp.bench.trainer import train

        rows: list[list[float]] = []
        used = time.process_time()
        replica = self.replica

        def on_step(_: int, times: "StepTimes") -> None:
            nonlocal used
            before, used = used, time.process_time()
            phases = replica.phases_s or {}
            parts = times.seconds, times.forward - times.start, times.backward - times.forward
            exchange = (phases.get(name, np.nan) for name in ("compress", "exchange", "decode"))
            rows.append([*parts, replica.wire_bytes, used - before, *exchange])
            if replica.record is not None:
                self.plans.update(f"{one.compressor['id']} {one.collective}" for one in replica.record.buckets)

        train(self._task, replica, range(self._steps, self._steps + steps), on_step)
        self._steps += steps
        means: NDArray[np.float64] = np.array(rows).reshape(-1, self._every, FIELDS).mean(axis=1)
        return means.repeat(self._every, axis=0)


@contextmanager
def trainers(
    exchanges: Sequence[Exchange], task: "Task", settings: Settings, transport: Transport, device: Any = None
) -> Iterator[list[Trainer]]:
    """Return a context with a trainer for each exchange, closed before its process group. Collective."""
    import torch
    from mpicomp.bench import peers
    from mpicomp.bench.trainer import CPU, MpicompReplica, Replica, threads_of_rank

    device = device or CPU
    steps = settings.warm_up + settings.steps * settings.blocks
    torch.set_num_threads(threads_of_rank(transport.cores))
    with ExitStack() as stack:
        if any(exchange.name in (*DDP, DILOCO) for exchange in exchanges):
            stack.enter_context(peers.process_group(transport))
        made: list[Trainer] = []
        for exchange in exchanges:
            if exchange.name == DILOCO:
                manager = stack.enter_context(peers.replica_group(transport, exchange.name))
                replica: Replica = peers.DiLoCoReplica(manager, task, transport, steps, settings.every, device)
            elif exchange.name in DDP:
                replica = peers.DDPReplica(exchange.name, task, transport, steps, device)
            elif exchange.name == NONE:
                replica = Replica(task, transport.group, steps, device)
            else:
                words: dict[str, Any] = {"compressor": exchange.compressor, "collective": exchange.collective}
                if exchange.updates:
                    words["updates"] = (MUON_UPDATES if exchange.name == MUON else {}) | {"sync_every": settings.every}
                else:
                    words["overlap"] = False if exchange.name.endswith(INLINE) else None
                # No warm-up: the named plan is timed from the first step.
                replica = MpicompReplica(task, transport, steps, device, warmup=0, seed=settings.seed, **words)
            made.append(Trainer(exchange, task, replica, settings.every))
        yield made
        del replica
        while made:  # none is left when the process group goes
            made.pop().replica.close()


@dataclass
class Trained:
    """Result of a training, the same on all ranks except for ``quality``, which rank 0 has."""

    exchange: Exchange  # the exchange that it used
    # The counted steps, as reported by the rank that took longest for their block; bytes and processor time are means
    # over ranks
    steps: NDArray[np.float64]
    link_bytes: float | None  # bytes that left a host in a step, as its kernel counts them; None outside a lab
    ran: str | None  # the plan that most steps ran; None where plans are not mpicomp's
    overlaps: bool  # whether the exchange began during backward
    equal: bool  # whether all ranks ended with the same parameters, bit for bit
    quality: float | None  # on held-out data; None where they did not


def train_in_turn(
    made: Sequence[Trainer], task: "Task", settings: Settings, transport: Transport, print_root: Callable[[str], None]
) -> list[Trained]:
    """Train with every exchange, block by block, another one first each round. Collective."""
    for trainer in made:
        print_root(f"warming up: {trainer.exchange.name}")
        trainer.block(settings.warm_up)
        gather(np.zeros(1), transport)
    sent_by_host = Path("/sys/class/net/eth0/statistics/tx_bytes") if os.environ.get("MPICOMP_LAB") == "1" else None
    blocks: dict[str, list[NDArray[np.float64]]] = {trainer.exchange.name: [] for trainer in made}
    link_bytes = dict.fromkeys(blocks, 0)
    for turn in range(settings.blocks):
        first = turn % len(made)
        for trainer in [*made[first:], *made[:first]]:
            name = trainer.exchange.name
            gather(np.zeros(1), transport)  # all begin a block together
            before = 0 if sent_by_host is None else int(sent_by_host.read_text())
            blocks[name].append(slowest(gather(trainer.block(settings.steps), transport)))
            link_bytes[name] += 0 if sent_by_host is None else int(sent_by_host.read_text()) - before
        done = (f"{name} {np.median(taken[-1][:, SECONDS]):.3g} s" for name, taken in blocks.items())
        print_root(f"round {turn + 1} of {settings.blocks}: {', '.join(done)}")
    trained = []
    for trainer in made:
        name, replica = trainer.exchange.name, trainer.replica
        equal = not replica.differing_ranks(transport)
        quality = task.evaluate(replica.model) if equal and transport.group.rank == 0 else None
        link = float(gather(np.array([link_bytes[name] / (settings.steps * settings.blocks)]), transport).mean())
        ran = trainer.plans.most_common(1)[0][0] if trainer.plans else None
        result = np.array(blocks[name]), None if sent_by_host is None else link, ran, replica.overlaps, equal, quality
        trained.append(Trained(trainer.exchange, *result))
    return trained


def slowest(block: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the steps of the rank that took longest for a block, with bytes and processor time of all ranks' mean."""
    steps: NDArray[np.float64] = block[block[:, :, SECONDS].sum(axis=1).argmax()].copy()
    steps[:, [WIRE, PROCESSOR]] = block[:, :, [WIRE, PROCESSOR]].mean(axis=0)
    return steps


def rows_of(trained: Sequence[Trained], batch: int, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each exchange."""
    none = next((training.steps[:, :, SECONDS] for training in trained if training.exchange.name == NONE), None)
    return [{**facts, **_row(training, batch, none)} for training in trained]


def _row(training: Trained, batch: int, none: NDArray[np.float64] | None) -> dict[str, Any]:
    exchange, steps = training.exchange, training.steps
    seconds = steps[:, :, SECONDS]
    median = float(np.median(seconds))
    low, high = block_interval(lambda drawn: np.median(drawn, axis=1), seconds) or (None, None)
    phases = np.median(steps[:, :, [COMPRESS, EXCHANGE, DECODE]], axis=(0, 1)).tolist()
    left, left_low, left_high = None, None, None
    if none is not None:
        left = float(np.median(none)) / median
        left_low, left_high = ratio_interval(none, seconds) or (None, None)
    return {
        "exchange": exchange.name,
        "compressor": None if exchange.compressor is None else exchange.compressor.id,
        "ratio": getattr(exchange.compressor, "ratio", None),
        "collective": None if exchange.name in OTHERS else exchange.collective,
        "overlap": training.overlaps,
        "ran": training.ran,
        "blocks": seconds.shape[0],
        "steps": seconds.size,
        "median_s": median,
        "low_s": low,
        "high_s": high,
        "mean_s": float(seconds.mean()),
        "p95_s": float(np.percentile(seconds, 95, method="inverted_cdf")),
        "samples_per_s": batch / median,
        "forward_s": float(np.median(steps[:, :, FORWARD])),
        "backward_s": float(np.median(steps[:, :, BACKWARD])),
        "after_s": float(np.median(seconds - steps[:, :, FORWARD] - steps[:, :, BACKWARD])),
        "phases_s": None
        if np.isnan(phases).any()
        else dict(zip(("compress", "exchange", "decode"), phases, strict=True)),
        "processor_s": float(steps[:, :, PROCESSOR].mean()),
        "wire_bytes": float(steps[:, :, WIRE].mean()),
        "link_bytes": training.link_bytes,
        "replicas_equal": training.equal,
        "quality": training.quality,
        "of_none": left,
        "of_none_low": left_low,
        "of_none_high": left_high,
    }
