"""What the tables of papers share: options, rows that a later run goes on from, trainings, and how they are printed."""

import argparse
import math
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))  # where the other studies are

import kept_rows
from mpicomp.bench.measure import results
from mpicomp.bench.tasks import get_task
from mpicomp.bench.tasks.updating import Updater

import mpicomp
from mpicomp.cost.formulas import terms
from mpicomp.errors import ConfigurationError, MpicompError, UnknownNameError
from mpicomp.rounds import Asked, Group, Round, dense_ring_bytes
from mpicomp.transport import LocalWorld
from mpicomp.transport.base import Value
from mpicomp.transport.local import LocalTransport

TRIAL = "trial"
"""In the reason of a step for a trial, which is undone."""
_LOOKS = 10  # at held-out data, in a training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that all of them have."""
    parser.add_argument("--rows", metavar="F.jsonl", help="append every row to F; what is there is not measured again")
    parser.add_argument("--limit", type=float, default=90.0, metavar="M", help="minutes; what is begun is ended (90)")
    parser.set_defaults(alone=True)


def add_arms(parser: argparse.ArgumentParser) -> None:
    """Declare which of the exchanges are trained with."""
    parser.add_argument("--arms", metavar="A[;..]", help="exchanges, as the table names them (all)")


def read_arms(study: str, text: str | None, known: Iterable[str]) -> list[str]:
    """Return the exchanges that are named, all where none is."""
    names = list(known)
    if text is None:
        return names
    asked = [own.strip() for own in text.split(";")]
    for name in asked:
        if name not in names:
            raise UnknownNameError(f"{study}: --arms", name, names)
    return asked


@dataclass(frozen=True)
class Arm:
    """How gradients are exchanged.

    Attributes
    ----------
    compressor, policy : mapping or None
        Configurations; with neither mpicomp chooses.
    collective : str
        Its name.
    warmup : int
        Dense steps that come first.
    buffers : bool
        Whether a trial's end puts back the model's buffers, too.
    """

    compressor: Mapping[str, Any] | None = None
    collective: str = "auto"
    policy: Mapping[str, Any] | None = None
    warmup: int = 0
    buffers: bool = True


DENSE = Arm({"id": "dense"})


@dataclass
class Rows:
    """Rows of a study, and the time that it has left.

    Attributes
    ----------
    made : list of dict
        All of them, in the order in which they were made.
    """

    study: str
    kept: kept_rows.Rows
    end: float
    late: list[str] = field(default_factory=list)

    @property
    def made(self) -> list[dict[str, Any]]:
        """All rows so far."""
        return self.kept.made

    def find(self, *key: Any) -> dict[str, Any] | None:
        """Return the row of this key, None where there is none."""
        return next((row for row in self.made if tuple(row[name] for name in self.kept.key) == key), None)

    def complete(self, key: Sequence[Any], make: Callable[..., dict[str, Any]], *given: Any) -> None:
        """Make the row of this key with what is given, unless it is there; one that fails is told and left out."""
        name = ", ".join(map(str, key))
        if self.find(*key) is not None:
            return
        if time.monotonic() > self.end:
            self.late.append(name)
            return
        begin = time.monotonic()
        try:
            row = make(*given)
        except MpicompError as error:
            print(f"{name}: failed: {error}", flush=True)
            self.late.append(name)
            return
        self.add(key, row)
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)

    def add(self, key: Sequence[Any], row: dict[str, Any]) -> None:
        """Keep a row."""
        self.kept.complete(lambda *own: dict(zip(self.kept.key, own, strict=True)) | row, *key)


def begin(study: str, arguments: argparse.Namespace, key: Sequence[str]) -> Rows:
    """Return the rows that are there, and the time until no more are made."""
    if not 0 < arguments.limit < math.inf:
        raise ConfigurationError(f"{study}: --limit must be minutes above 0, got {arguments.limit}")
    return Rows(study, kept_rows.open_rows(study, arguments.rows, key), time.monotonic() + 60 * arguments.limit)


class _OwnWork:
    """Has the processor time of a rank's own work pass on its simulated clock, which other programs cannot prolong."""

    def __init__(self, end: LocalTransport) -> None:
        self._end = end
        self._since: float | None = None
        end.clock = self.clock  # type: ignore[method-assign]

    def clock(self) -> float:
        """Return the rank's time."""
        return self._end.seconds + (0.0 if self._since is None else time.thread_time() - self._since)

    def counted(self, exchange: Generator[Asked, Any, Value]) -> Generator[Asked, Any, Value]:
        """Run an exchange. As rounds."""
        reply = None
        while True:
            self._since = time.thread_time()
            try:
                asked = exchange.send(reply)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            finally:
                self._end.seconds, self._since = self.clock(), None
            reply = yield asked


@dataclass(frozen=True)
class Link:
    """A network on which a round takes what formulas say."""

    latency_s: float
    bits: float

    def __call__(self, task: Round, group: Group) -> float:
        """Return the seconds of a round of a group."""
        return terms(task, group).seconds(self.latency_s, 8 / self.bits)


@dataclass(frozen=True)
class Simulated:
    """Clocks that show what is said here, and the processor time of what ranks do for the exchange.

    Attributes
    ----------
    link : callable
        Gives the network of a step.
    compute_s : float
        Of each step.
    """

    link: Callable[[int], Link]
    compute_s: float


def train(
    arm: Arm, task_name: str, steps: int, ranks: int, seed: int = 0, simulated: Simulated | None = None
) -> dict[str, Any]:
    """Train with ranks that are simulated in this process: what is sent and learnt is what it would be among others.

    Parameters
    ----------
    arm : Arm
        The exchange.
    task_name : str
        Of `mpicomp train`, or resnet20.
    steps, ranks, seed : int
        Of the training. Steps for a trial come besides, as in papers that have them.
    simulated : Simulated or None
        Clocks and a network, on which each rank is a host.

    Returns
    -------
    dict
        ``quality`` in the end; ``late_bytes`` and ``late_wire_bytes`` of rank 0's buckets in a step, mean over the last
        third of the steps, ``dense_bytes`` and ``dense_wire_bytes`` of a dense step; ``learned_once_bytes`` that left
        rank 0 once after the first step; ``kept``, the share of elements that was sent, mean over steps; ``curve``,
        pairs of steps and quality; ``compute_s``, the median processor time of a rank's loss and backward; ``plans``,
        of every step its seconds, the share that was sent, the collectives and the reason of the first bucket. Seconds
        are those of simulated clocks, otherwise those of all ranks one after the other. ``code_error`` is that of a
        learned code at the end of its learning, as a share of the energy of what it codes; 0 where there is none.
    """
    import resnet  # noqa: F401, registers its task

    from mpicomp.torch.trials import trial_hooks  # loads torch

    task = get_task(task_name, seed)
    model = task.model()
    parameters = dict(model.named_parameters())
    optimizer = task.optimizer(model)
    updater = Updater(task, optimizer, steps)
    now, compute_s = 0, 0.0 if simulated is None else simulated.compute_s
    if simulated is None:
        world = LocalWorld(ranks)
    else:
        world = LocalWorld(ranks, hosts=ranks, network=lambda task, group: simulated.link(now)(task, group))
    hooks = trial_hooks(optimizer, model if arm.buffers else None)
    reducers = [
        mpicomp.Reducer(arm.compressor, arm.collective, arm.policy, comm=end, warmup=arm.warmup, **hooks)
        for end in world.transports
    ]
    works = [_OwnWork(end) for end in world.transports] if simulated is not None else []
    lines: list[dict[str, Any]] = []
    missed: list[float] = []
    computed: list[float] = []
    every = max(1, steps // _LOOKS)
    total = 0
    while now < steps:
        begin = time.monotonic() if simulated is None else max(end.seconds for end in world.transports)
        gradients = []
        for rank in range(ranks):
            start = time.thread_time()
            model.zero_grad()
            loss = task.loss(model, task.batch(total, rank, ranks))
            loss.backward()  # type: ignore[no-untyped-call]
            computed.append(time.thread_time() - start)
            own = ((name, parameter.grad) for name, parameter in parameters.items())
            gradients.append({name: grad.numpy().copy() for name, grad in own if grad is not None})
        for end in world.transports:
            end.seconds += compute_s
        exchanges = [reducer.rounds(own) for reducer, own in zip(reducers, gradients, strict=True)]
        if simulated is not None:
            exchanges = [own.counted(exchange) for own, exchange in zip(works, exchanges, strict=True)]
        means = world.run(exchanges)
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                parameter.grad.numpy()[...] = means[0][name]
        record = reducers[0].last_step
        assert record is not None
        missed += [own.code_error for own in record.buckets if own.code_error is not None and "learning" in own.reason]
        is_trial = TRIAL in record.buckets[0].reason
        if is_trial:
            optimizer.step()  # the rate stays what it is
        else:
            updater.update()
        for reducer in reducers:
            reducer.applied()  # all have one model, and put back the same
        done = time.monotonic() if simulated is None else max(end.seconds for end in world.transports)
        line = record.to_json() | {"seconds": done - begin, "quality": None}
        total += 1
        now += not is_trial
        if now % every == 0 and not is_trial:
            line["quality"] = task.evaluate(model, task.glance)
        lines.append(line)
    for reducer in reducers:
        reducer.close()
    row = {"quality": task.evaluate(model), "compute_s": median(computed), "code_error": fmean(missed[-_LOOKS:] or [0])}
    return _row(lines) | row


def _row(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    numel = sum(bucket["numel"] for bucket in lines[0]["buckets"])
    late = lines[2 * len(lines) // 3 :]
    kept = [_kept(line["buckets"]) / numel for line in lines]
    return {
        "late_bytes": fmean(_sum(line, "sent_bytes") for line in late),
        "late_wire_bytes": fmean(_sum(line, "wire_bytes") for line in late),
        "learned_once_bytes": sum(line["once_wire_bytes"] for line in lines[1:]),
        "dense_bytes": 4 * numel,
        "dense_wire_bytes": lines[0]["dense_wire_bytes"],
        "steps": len(lines),
        "numel": numel,
        "kept": sum(kept) / len(kept),
        "curve": [(line["step"] + 1, line["quality"]) for line in lines if line["quality"] is not None],
        "plans": [
            (line["seconds"], own, "+".join(sorted({bucket["collective"] for bucket in line["buckets"]})),
             line["buckets"][0]["reason"])
            for line, own in zip(lines, kept, strict=True)
        ],
    }  # fmt: skip


def _sum(line: Mapping[str, Any], name: str) -> float:
    return float(sum(bucket[name] for bucket in line["buckets"]))


def _kept(buckets: Sequence[Mapping[str, Any]]) -> float:
    return float(sum(bucket["numel"] * bucket["ratio_reached"] for bucket in buckets))


def steps_to(row: Mapping[str, Any], target: float, lower: bool) -> int | None:
    """Return the steps after which a training's quality was first as good as a target, None where it never was.

    Examples
    --------
    >>> steps_to({"curve": [(10, 0.5), (20, 0.9), (30, 0.8)]}, 0.8, lower=False)
    20
    """
    return next((step for step, own in row["curve"] if (own <= target if lower else own >= target)), None)


def bits_for(share: float, compute_s: float, numel: int, ranks: int) -> float:
    """Return the bandwidth at which dense exchange by a ring takes a share of a step that computes for so long.

    Examples
    --------
    >>> bits_for(0.5, 0.1, 1_000_000, 4)
    480000000.0
    """
    return 8 * dense_ring_bytes(numel, ranks) / (compute_s * share / (1 - share))


def show(title: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], notes: Sequence[str] = ()) -> None:
    """Print a table below its title, with what differs between the paper's set-up and this one."""
    print(f"\n{title}")
    results.show(rows, columns)
    for note in notes:
        print(f"- {note}")


def of_seeds(values: Sequence[float], form: str = ".4f") -> str:
    """Return the mean over seeds, and the range where there are several.

    Examples
    --------
    >>> of_seeds([0.5]), of_seeds([0.5, 0.75, 1.0], ".2f")
    ('0.5000', '0.75 (0.50 to 1.00)')
    """
    mean = format(fmean(values), form)
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


def late(rows: Rows) -> None:
    """Say what was not measured."""
    if rows.late:
        print(f"\nnot measured, since the time was over or it failed: {'; '.join(rows.late)}")
