"""Trainings of the papers' tables: ranks that are simulated in this process, with the clocks of a network."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))  # where the other studies are

from flexible_search import Outcome, Search, TopKAsTold
from mpicomp.bench.tasks import Task, get_task
from study_rows import SharedModel

import mpicomp
from mpicomp.cost.formulas import terms
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.local import LocalTransport
from mpicomp.mpi.rounds import Group, Round, Rounds, dense_ring_bytes
from mpicomp.mpi.transport import Value
from mpicomp.policies.schedule import with_warmup

TRIAL = "trial"  # in the reason of a step for a trial, which is undone
_LOOKS = 10  # at held-out data, in a training


def options(tasks: str, steps: int, ranks: int | str, of: str = "a training") -> dict[str, tuple[Any, str, str]]:
    """Return the options of a study's trainings."""
    return ({"--tasks": (tasks, "T[,..]", "trained")} if tasks else {}) | {
        "--steps": (steps, "S", f"of {of}"),
        "--seeds": ("0", "K[,..]", f"of {of}"),
        "--ranks": (ranks, "N" if isinstance(ranks, int) else "N[,..]", f"of {of}"),
    }


ARMS = {"--arms": (None, "A[;..]", "exchanges, as the table names them (all)")}


@dataclass(frozen=True)
class Arm:
    """How gradients are exchanged; with neither compressor nor policy mpicomp chooses."""

    compressor: Mapping[str, Any] | None = None
    collective: str = "auto"
    policy: Mapping[str, Any] | None = None
    warmup: int = 0  # dense steps that come first
    search: Mapping[str, Any] | None = None  # settings of `flexible_search.Search`, which names the exchanges
    buffers: bool = True  # a trial's end puts back the model's buffers, too


DENSE = Arm({"id": "dense"})


class _ComputeClock:
    """Has the processor time of a rank's work pass on its simulated clock, which other programs cannot prolong."""

    def __init__(self, end: LocalTransport) -> None:
        self._end = end
        self._since: float | None = None
        end.clock = self.clock  # type: ignore[method-assign]
        end.times_kernels = True

    def clock(self) -> float:
        return self._end.seconds + (0.0 if self._since is None else time.thread_time() - self._since)

    def counted(self, exchange: Rounds[Value]) -> Rounds[Value]:
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
    """A network on which a round takes the seconds of the formulas."""

    latency_s: float
    bits: float

    def __call__(self, task: Round, group: Group) -> float:
        return terms(task, group).seconds(self.latency_s, 8 / self.bits)


@dataclass(frozen=True)
class Simulated:
    """Clocks that show the seconds of a step's network and of computing, and the processor time of exchanges."""

    link: Callable[[int], Link]
    compute_s: float


class _Training:
    """Ranks that are simulated in this process, with the same messages and losses as among processes."""

    def __init__(self, arm: Arm, task: Task, steps: int, ranks: int, simulated: Simulated | None) -> None:
        self.arm, self.steps, self.simulated = arm, steps, simulated
        self.shared = SharedModel(task, steps)
        self.done = 0  # steps that are not trials
        self.lines: list[dict[str, Any]] = []
        self.code_errors: list[float] = []
        self.computed: list[float] = []  # seconds of ranks' losses and backwards
        network = None if simulated is None else lambda task, group: simulated.link(self.done)(task, group)
        self.world = LocalWorld(ranks, hosts=1 if simulated is None else ranks, network=network)
        self.searched = [TopKAsTold() for _ in self.world.transports]
        self.reducers = [
            mpicomp.Reducer(arm.compressor, arm.collective, with_warmup(arm.policy, arm.warmup), comm=end)
            if arm.search is None
            else mpicomp.Reducer(policy=policy, comm=end)
            for end, policy in zip(self.world.transports, self.searched, strict=True)
        ]
        self.clocks = [_ComputeClock(end) for end in self.world.transports] if simulated is not None else []

    def clock(self) -> float:
        if self.simulated is None:
            return time.monotonic()
        return max(end.seconds for end in self.world.transports)

    def make_step(self, is_trial: bool = False) -> None:
        shared, begin, ranks = self.shared, self.clock(), len(self.reducers)
        gradients = []
        for rank in range(ranks):
            start = time.thread_time()
            shared.backward(len(self.lines), rank, ranks)
            self.computed.append(time.thread_time() - start)
            gradients.append(shared.gradients())
        exchanges = [reducer.rounds(arrays) for reducer, arrays in zip(self.reducers, gradients, strict=True)]
        if self.simulated is not None:
            for end in self.world.transports:
                end.seconds += self.simulated.compute_s
            exchanges = [each.counted(exchange) for each, exchange in zip(self.clocks, exchanges, strict=True)]
        shared.set_gradients(self.world.run(exchanges)[0])
        record = self.reducers[0].last_step
        assert record is not None
        if any("learning" in bucket.reason for bucket in record.buckets):
            memories = [bucket.memory.get("lgc", {}) for bucket in self.reducers[0].layout.buckets]
            self.code_errors += [memory["error"] for memory in memories if memory.get("error") is not None]
        if is_trial:
            shared.optimizer.step()  # the rate is constant
        else:
            shared.update()
            self.done += 1
        line = record.to_json() | {"seconds": self.clock() - begin, "quality": None}
        if not is_trial and self.done % max(1, self.steps // _LOOKS) == 0:
            line["quality"] = shared.task.evaluate(shared.model, shared.task.glance)
        self.lines.append(line)

    def search(self, settings: Mapping[str, Any]) -> None:
        """Train by the published search, which names the exchange of each step."""
        assert self.simulated is not None
        link = self.simulated.link
        nbytes = 4 * sum(parameter.numel() for parameter in self.shared.parameters.values())

        def keep() -> Any:
            return self.shared.copy(self.arm.buffers), [reducer.state_dict() for reducer in self.reducers]

        def restore(kept: Any) -> None:
            self.shared.restore(kept[0])
            for reducer, state in zip(self.reducers, kept[1], strict=True):
                reducer.load_state_dict(state)

        def network() -> tuple[float, float]:
            return link(self.done).latency_s, 8 / link(self.done).bits

        Search(self._step_as_told, keep, restore, network, len(self.reducers), nbytes, **settings).run(self.steps)

    def _step_as_told(self, ratio: float, collective: str, reason: str) -> Outcome:
        for policy in self.searched:
            policy.ratio, policy.collective, policy.reason = ratio, collective, reason
        self.make_step(TRIAL in reason)
        buckets = [reducer.last_step.buckets[0] for reducer in self.reducers if reducer.last_step is not None]
        return Outcome(
            max(bucket.phases_s["compress"] + bucket.phases_s["decode"] for bucket in buckets),
            min(bucket.phases_s["exchange"] for bucket in buckets),
            (buckets[0].gain or 0.0) * (buckets[0].energy or 0.0),
            buckets[0].energy or 0.0,
        )


def train(
    arm: Arm, task_name: str, steps: int, ranks: int, seed: int = 0, simulated: Simulated | None = None
) -> dict[str, Any]:
    """Train with simulated ranks; return the row.

    Steps for a trial come besides, as in papers that have them. On a simulated network each rank is a host, and seconds
    are those of its clocks; otherwise those of all ranks one after the other. Late bytes are those of a step of rank 0,
    mean over the last third of the steps; ``kept`` is the share of elements that was sent, mean over steps;
    ``compute_s`` the median processor time of a rank's loss and backward.
    """
    import paper_tasks  # noqa: F401, registers tasks

    training = _Training(arm, get_task(task_name, seed), steps, ranks, simulated)
    if arm.search is not None:
        training.search(arm.search)
    while training.done < steps:
        training.make_step()
    for reducer in training.reducers:
        reducer.close()
    return _row(training.lines) | {
        "quality": training.shared.task.evaluate(training.shared.model),
        "compute_s": median(training.computed),
        "code_error": fmean(training.code_errors[-_LOOKS:] or [0]),
    }


def _row(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    numel = sum(bucket["numel"] for bucket in lines[0]["buckets"])
    late = [line["buckets"] for line in lines[2 * len(lines) // 3 :]]
    kept = [sum(bucket["numel"] * bucket["ratio_reached"] for bucket in line["buckets"]) / numel for line in lines]
    return {
        "late_bytes": fmean(float(sum(bucket["sent_bytes"] for bucket in buckets)) for buckets in late),
        "late_wire_bytes": fmean(float(sum(bucket["wire_bytes"] for bucket in buckets)) for buckets in late),
        "learned_once_bytes": sum(line["once_wire_bytes"] for line in lines[1:]),
        "dense_bytes": 4 * numel,
        "numel": numel,
        "kept": sum(kept) / len(kept),
        "curve": [(line["step"] + 1, line["quality"]) for line in lines if line["quality"] is not None],
        "plans": [
            (line["seconds"], share, "+".join(sorted({bucket["collective"] for bucket in line["buckets"]})),
             line["buckets"][0]["reason"])
            for line, share in zip(lines, kept, strict=True)
        ],
    }  # fmt: skip


def grouped(rows: Iterable[Any], *names: str) -> dict[Any, list[Any]]:
    """Return rows, or objects, by their values of one or several fields, in their order."""
    found: dict[Any, list[Any]] = {}
    for row in rows:
        key = tuple(row[name] if isinstance(row, Mapping) else getattr(row, name) for name in names)
        found.setdefault(key if len(names) > 1 else key[0], []).append(row)
    return found


def steps_to(row: Mapping[str, Any], target: float, lower: bool) -> int | None:
    """Return the steps after which a training's quality was first as good as a target, None where it never was.

    >>> steps_to({"curve": [(10, 0.5), (20, 0.9), (30, 0.8)]}, 0.8, lower=False)
    20
    """
    return next((step for step, value in row["curve"] if (value <= target if lower else value >= target)), None)


def bits_for(share: float, compute_s: float, numel: int, ranks: int) -> float:
    """Return the bandwidth at which dense exchange by a ring takes a share of a step that computes for ``compute_s``.

    >>> bits_for(0.5, 0.1, 1_000_000, 4)
    480000000.0
    """
    return 8 * dense_ring_bytes(numel, ranks) / (compute_s * share / (1 - share))


def of_seeds(values: Sequence[float], form: str = ".4f") -> str:
    """Return the mean over seeds, and the range where there are several; nothing where there is none.

    >>> of_seeds([0.5]), of_seeds([0.5, 0.75, 1.0], ".2f")
    ('0.5000', '0.75 (0.50 to 1.00)')
    """
    mean = format(fmean(values), form) if values else ""
    return mean if len(values) < 2 else f"{mean} ({min(values):{form}} to {max(values):{form}})"
