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
from mpicomp.bench.measure.intervals import block_interval
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


class TrainingRow(TypedDict):
    """A row of ``bench training``."""

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
        dict[str, float] | None, "medians: `compress`, `exchange` with waiting, `decode`; null where unknown"
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
    def ours(self) -> bool:
        return self.name not in OTHERS

    @property
    def updates(self) -> bool:
        """Whether updates of the optimizers are exchanged in place of gradients."""
        return self.name.startswith(UPDATES) or self.name in (DILOCO, MUON)


@dataclass(frozen=True)
class Settings:
    """Length of the training: steps of a block, number of blocks, steps of warm-up."""

    steps: int  # steps in a block
    blocks: int  # blocks of each exchange
    warm_up: int  # steps of each exchange before its blocks
    # Steps from one exchange of updates to the next, of which those of a block and of the warm-up are multiples
    every: int = 1
    seed: int = 0  # of schemes that draw random numbers

    @property
    def total(self) -> int:
        return self.warm_up + self.steps * self.blocks


class Trainer:
    """Trains one replica, block by block."""

    def __init__(self, exchange: Exchange, task: "Task", replica: "Replica", settings: Settings) -> None:
        self.exchange = exchange
        self.replica = replica
        self._task = task
        self._every = settings.every if exchange.updates else 1  # steps from one exchange to the next
        self._steps = 0
        self._plans: Counter[str] = Counter()

    @property
    def ran(self) -> str | None:
        """The plan that most steps ran; None where plans are not mpicomp's."""
        return self._plans.most_common(1)[0][0] if self._plans else None

    def block(self, steps: int) -> NDArray[np.float64]:
        """Do some steps; return their numbers, as means over the steps from one exchange to the next."""
        from mpicomp.bench.trainer import train

        rows: list[list[float]] = []
        used = time.process_time()

        def on_step(_: int, times: "StepTimes") -> None:
            nonlocal used
            before, used = used, time.process_time()
            phases = self.replica.phases_s or {}
            rows.append(
                [
                    times.seconds,
                    times.forward - times.start,
                    times.backward - times.forward,
                    self.replica.wire_bytes,
                    used - before,
                    *(phases.get(name, np.nan) for name in ("compress", "exchange", "decode")),
                ]
            )
            record = getattr(self.replica, "record", None)
            if record is not None:
                self._plans.update(f"{bucket.compressor['id']} {bucket.collective}" for bucket in record.buckets)

        train(self._task, self.replica, range(self._steps, self._steps + steps), on_step)
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
    steps = settings.total

    def ours(exchange: Exchange) -> Replica:
        words: dict[str, Any] = {}
        if exchange.name == MUON:
            words["updates"] = MUON_UPDATES | {"sync_every": settings.every}
        elif exchange.updates:
            words["updates"] = {"sync_every": settings.every}
        else:
            words["overlap"] = False if exchange.name.endswith(INLINE) else None
        words |= {"compressor": exchange.compressor, "collective": exchange.collective, "seed": settings.seed}
        return MpicompReplica(
            task, transport, steps, device, warmup=0, **words
        )  # the named plan is timed from the first step

    torch.set_num_threads(threads_of_rank(transport.cores))
    with ExitStack() as stack:
        if any(not exchange.ours and exchange.name != NONE for exchange in exchanges):
            stack.enter_context(peers.process_group(transport))
        made = []
        for exchange in exchanges:
            if exchange.name == DILOCO:
                manager = stack.enter_context(peers.replica_group(transport, exchange.name))
                replica: Replica = peers.DiLoCoReplica(manager, task, transport, steps, settings.every, device)
            elif exchange.name in DDP:
                replica = peers.DDPReplica(exchange.name, task, transport, steps, device)
            elif exchange.name == NONE:
                replica = Replica(task, transport.group, steps, device)
            else:
                replica = ours(exchange)
            made.append(Trainer(exchange, task, replica, settings))
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
    ran: str | None  # the plan that most steps ran
    overlaps: bool  # whether the exchange began during backward
    equal: bool  # whether all ranks ended with the same parameters, bit for bit
    quality: float | None  # on held-out data; None where they did not

    @property
    def is_wrong(self) -> bool:
        """Whether ranks differ that an exchange was to keep equal."""
        return not self.equal and self.exchange.name != NONE


def train_in_turn(
    made: Sequence[Trainer], task: "Task", settings: Settings, transport: Transport, print_root: Callable[[str], None]
) -> list[Trained]:
    """Train with every exchange, block by block, another one first each round. Collective."""
    for trainer in made:
        print_root(f"warming up: {trainer.exchange.name}")
        trainer.block(settings.warm_up)
        gather(np.zeros(1), transport)
    blocks: dict[str, list[NDArray[np.float64]]] = {trainer.exchange.name: [] for trainer in made}
    link_bytes = dict.fromkeys(blocks, 0.0)
    for turn in range(settings.blocks):
        first = turn % len(made)
        for trainer in [*made[first:], *made[:first]]:
            name = trainer.exchange.name
            gather(np.zeros(1), transport)  # all begin a block together
            before = _sent_by_host()
            block = trainer.block(settings.steps)
            blocks[name].append(slowest(gather(block, transport)))
            link_bytes[name] += _sent_by_host() - before
        done = (f"{name} {np.median(taken[-1][:, SECONDS]):.3g} s" for name, taken in blocks.items())
        print_root(f"round {turn + 1} of {settings.blocks}: {', '.join(done)}")
    trained = []
    for trainer in made:
        name, replica = trainer.exchange.name, trainer.replica
        equal = not replica.differing_ranks(transport)
        quality = task.evaluate(replica.model) if equal and transport.group.rank == 0 else None
        link = gather(np.array([link_bytes[name] / (settings.steps * settings.blocks)]), transport).mean()
        link_or_none = float(link) if _is_in_lab() else None
        result = np.array(blocks[name]), link_or_none, trainer.ran, replica.overlaps, equal, quality
        trained.append(Trained(trainer.exchange, *result))
    return trained


def slowest(block: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the steps of the rank that took longest for a block, with bytes and processor time of all ranks' mean."""
    steps: NDArray[np.float64] = block[block[:, :, SECONDS].sum(axis=1).argmax()].copy()
    steps[:, [WIRE, PROCESSOR]] = block[:, :, [WIRE, PROCESSOR]].mean(axis=0)
    return steps


def rows_of(trained: Sequence[Trained], batch: int, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each exchange."""
    none = next((training for training in trained if training.exchange.name == NONE), None)
    return [{**facts, **_row(training, batch), **_of_none(training, none)} for training in trained]


def _row(training: Trained, batch: int) -> dict[str, Any]:
    exchange, steps = training.exchange, training.steps
    seconds = steps[:, :, SECONDS]
    median = float(np.median(seconds))
    low, high = block_interval(np.median, seconds) or (None, None)
    return {
        "exchange": exchange.name,
        "compressor": None if exchange.compressor is None else exchange.compressor.id,
        "ratio": getattr(exchange.compressor, "ratio", None),
        "collective": exchange.collective if exchange.ours else None,
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
        "phases_s": _phases(training),
        "processor_s": float(steps[:, :, PROCESSOR].mean()),
        "wire_bytes": float(steps[:, :, WIRE].mean()),
        "link_bytes": training.link_bytes,
        "replicas_equal": training.equal,
        "quality": training.quality,
    }


def _phases(training: Trained) -> dict[str, float] | None:
    medians = np.median(training.steps[:, :, [COMPRESS, EXCHANGE, DECODE]], axis=(0, 1))
    if np.isnan(medians).any():
        return None
    return dict(zip(("compress", "exchange", "decode"), map(float, medians), strict=True))


def _of_none(training: Trained, none: Trained | None) -> dict[str, Any]:
    if none is None:
        return dict.fromkeys(("of_none", "of_none_low", "of_none_high"))
    samples = none.steps[:, :, SECONDS], training.steps[:, :, SECONDS]

    def share_left(without: NDArray[np.float64], with_it: NDArray[np.float64]) -> float:
        return float(np.median(without) / np.median(with_it))

    low, high = block_interval(share_left, *samples) or (None, None)
    return {"of_none": share_left(*samples), "of_none_low": low, "of_none_high": high}


def _is_in_lab() -> bool:
    return os.environ.get("MPICOMP_LAB") == "1"


def _sent_by_host() -> float:
    return float(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text()) if _is_in_lab() else 0.0
