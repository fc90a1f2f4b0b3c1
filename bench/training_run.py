"""Train a task with its gradients averaged by mpicomp, and measure every step."""

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from mpicomp.bench.measure.chosen_plans import Choices, Ran, leading
from mpicomp.bench.measure.metrics import MetricsWriter
from mpicomp.bench.measure.probe import probe, probe_dense
from mpicomp.bench.measure.progress import Progress
from mpicomp.bench.measure.timings import PHASES, Slowest, Timings, by_rank, gather, medians, of_slowest
from mpicomp.bench.outcome import Outcome
from mpicomp.bench.replica import CPU, Replica, threads_of_rank
from mpicomp.bench.tasks import Task
from mpicomp.bench.tasks.updating import Updater

from mpicomp.checkpoint import load_checkpoint, save_checkpoint
from mpicomp.compressors import Compressor
from mpicomp.errors import ConfigurationError, MpicompError
from mpicomp.policies import Policy
from mpicomp.policies.warmup import read_warmup
from mpicomp.reducer import StepRecord
from mpicomp.reducer.trace import trace
from mpicomp.rounds import dense_ring_bytes
from mpicomp.torch import broadcast_parameters, replicas, shard_mesh
from mpicomp.torch.update_optimizer import AUTO
from mpicomp.transport import Transport
from mpicomp.transport.connect import connect


class Checkpoints:
    """Checkpoints of one training, below one folder."""

    def __init__(self, folder: str, every: int, run: dict[str, Any]) -> None:
        self.folder = folder
        self._every = every
        self._run = run
        self._due = False

    def load(self, task: Task, model: torch.nn.Module, optimizer: Any, updater: Updater, transport: Transport) -> int:
        """Load the newest checkpoint, if there is one, and return the steps that were made until it. Collective."""
        saved = load_checkpoint(self.folder, comm=transport)
        if saved is None:
            return 0
        ours, theirs = self._of(task), saved["run"]
        for name in ours:
            if theirs.get(name) != ours[name]:
                raise ConfigurationError(
                    f"train: the checkpoint in '{self.folder}' is of a run with {name} {theirs.get(name)}, and this "
                    f"one has {ours[name]}; name another folder, or start the command that wrote it"
                )
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        updater.load_state_dict(saved["updater"])
        torch.set_rng_state(saved["random"])
        return int(saved["step"])

    def due(self, step: int, exchanged: bool) -> bool:
        """Return whether one is due after so many steps, the last of which has exchanged something or not."""
        self._due = self._due or step % self._every == 0
        return self._due and exchanged

    def save(
        self, step: int, task: Task, model: torch.nn.Module, optimizer: Any, updater: Updater, transport: Transport
    ) -> None:
        """Write a checkpoint after so many steps. Collective; ranks that have stepped by themselves exchange first."""
        if self._run["exchange"] != "gradients":
            optimizer.synchronize()
        state = {
            "run": self._of(task),
            "step": step,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "updater": updater.state_dict(),
            "random": torch.get_rng_state(),
        }
        save_checkpoint(self.folder, state, comm=transport)
        self._due = False

    def _of(self, task: Task) -> dict[str, Any]:
        return {"task": task.name} | self._run


@dataclass(frozen=True)
class Settings:
    """Settings of a training run, the same on every rank."""

    compressor: Compressor | None  # none lets the policy choose
    collective: str
    policy: Policy  # the policy; an object serves one run
    steps: int  # at least 1
    seed: int  # seed of the model, of the data's order and of the schemes
    evaluate_every: int = 0  # steps from one look at the held-out data to the next; 0 looks at the end alone
    probes: bool = True  # whether exchanges, dense ones among them, are measured by themselves after the training
    warmup: int | str = 0
    # Settings of `mpicomp.torch.UpdateOptimizer`, ``sync_every`` among them; None exchanges gradients.
    # ``"inner"`` names what ranks step by in place of the task's optimizer: ``"sgd"`` or ``"muon"``.
    updates: dict[str, Any] | None = None
    lr_scale: float = 1.0  # times the task's learning rate, which is tuned for dense exchange of gradients
    on_failure: str = "abort"
    checkpoints: Checkpoints | None = None  # where the training goes on from, and what it writes; None for neither
    trace: str | None = None  # the file that `mpicomp.trace` writes of the steps
    shard: int = 1  # ranks to a replica, over which the model is sharded

    @property
    def every(self) -> int:
        """Steps from one exchange to the next, at first."""
        return 1 if self.updates is None or self.updates["sync_every"] == AUTO else int(self.updates["sync_every"])

    @property
    def adapts(self) -> bool:
        return self.policy.id != "static"

    @property
    def changes(self) -> bool:
        """Whether the second half of a run may use other plans than the first."""
        if self.warmup:
            return True
        if self.adapts or self.compressor is None:
            return self.adapts
        return self.compressor.bind([], [], warm_up=False).get_config() != self.compressor.get_config()


@dataclass(frozen=True)
class Stopped:
    """A training that was asked to stop: a checkpoint was written after so many steps."""

    step: int


def train(
    task: Task,
    settings: Settings,
    transport: Transport,
    progress: Progress,
    metrics: MetricsWriter,
    device: torch.device = CPU,
) -> Outcome | Stopped:
    """Train a task, to its end or until ranks are asked to stop. Collective over the transport's ranks."""
    group = transport.group
    hosts = transport.hosts()
    torch.set_num_threads(threads_of_rank(transport.cores))
    inner = "task" if settings.updates is None else settings.updates.get("inner", "task")
    mesh = None if settings.shard == 1 else shard_mesh(settings.shard, device.type, transport)
    replica = Replica(task, group, settings.steps, device, inner=inner, lr_scale=settings.lr_scale, mesh=mesh)
    model = replica.model
    between = transport if mesh is None else connect(replicas(model))  # the ranks that exchange with this one
    between.log.clear()
    broadcast_parameters(model, comm=between)
    once_bytes = round(sum(entry.wire_bytes for entry in between.log))
    # Phases are to add up to the step, so nothing overlaps.
    of_gradients = {"overlap": False} if settings.updates is None else {}
    replica.exchange_by(
        between,
        settings.updates,
        compressor=settings.compressor,
        collective=settings.collective,
        policy=settings.policy,
        seed=settings.seed,
        warmup=settings.warmup,
        on_failure=settings.on_failure,
        **of_gradients,
    )
    optimizer, updater = replica.optimizer, replica.updater
    saves, first = settings.checkpoints, 0
    if saves is not None:
        first = saves.load(task, model, optimizer, updater, transport)
        if first >= settings.steps:
            raise ConfigurationError(
                f"train: the checkpoint in '{saves.folder}' was written after {first} steps, and this run has "
                f"{settings.steps}; name more --steps, or another folder"
            )
        if first:
            progress.resumed(first)
    metrics.begin(first)
    made = settings.steps - first
    numel = replica.numel
    every = settings.every
    warmup_steps = every * read_warmup(settings.warmup)[0]

    timings, choices = Timings(), Choices()
    sent = wire = dense_wire = 0.0
    gains = []
    collectives: dict[str, None] = {}
    ends: list[int] = []  # steps that had been made when something was exchanged
    traced = contextlib.nullcontext() if settings.trace is None else trace(settings.trace, comm=transport)
    with progress.over(settings.steps), traced:
        for step in range(first, settings.steps):
            loss, seconds, phases, record = _step(replica, step, settings.updates is None)
            timings.add(seconds, phases, record.choosing_s)
            sent += record.sent_bytes
            wire += record.wire_bytes
            dense_wire += (
                record.dense_wire_bytes if settings.updates is None else dense_ring_bytes(numel, between.group.size)
            )
            once_bytes += round(record.once_wire_bytes)
            gains += [bucket.gain for bucket in record.buckets if bucket.gain is not None]
            if step >= warmup_steps:
                collectives |= dict.fromkeys(bucket.collective for bucket in record.buckets)
            if record.buckets:
                choices.add(record)
                ends.append(step + 1 - first)
            quality = None
            if settings.evaluate_every and (step + 1) % settings.evaluate_every == 0:
                quality = _quality(task, model, transport, task.glance, everywhere=mesh is not None)
            if metrics.wanted:
                fields = {"step": step, "seconds": seconds, "phases_s": phases, "loss": loss, "quality": quality}
                metrics.write(partial(_line, record, fields))
            progress.step(step, loss, seconds, record, quality)
            if saves is None or step + 1 == settings.steps:
                continue
            # Where nothing was exchanged, ranks may not know the same: the record is an empty one.
            if record.stop or saves.due(step + 1, bool(record.buckets)):
                metrics.flush()  # a run that goes on from there has all lines before it
                saves.save(step + 1, task, model, optimizer, updater, transport)
            if record.stop:
                return Stopped(step + 1)

    if settings.updates is not None:
        before = optimizer.reducer.last_step
        optimizer.synchronize()
        record = optimizer.reducer.last_step
        if record is not before:  # of what the last steps have changed; a thread may have been exchanging it
            choices.add(record)
            sent, wire = sent + record.sent_bytes, wire + record.wire_bytes
            if made not in ends[-1:]:
                ends.append(made)
    different = replica.differing_ranks(transport)
    if different:
        raise MpicompError(
            f"train: all ranks must end with the same parameters; those of ranks {different} are not rank 0's. "
            "Please report it with the output of mpicomp doctor"
        )
    skipped = min(5, made // 4)  # the first steps compile, agree and grow buffers
    means = timings.everyones(transport, ends)
    everyones = means.repeat(np.diff(ends, prepend=0), axis=1)
    slowest_rows = of_slowest(everyones)
    timed = means[:, np.searchsorted(ends, skipped, side="right") :]
    slowest = Slowest.of(timed[:, :, 0] - timed[:, :, 1 + PHASES.index("exchange")])
    warmup_steps -= first
    half = max(made // 2, warmup_steps if warmup_steps < made else 0)
    late = max(skipped, half) if settings.changes else skipped
    before_half = sum(end <= half for end in ends)
    late_plans = choices.plans(before_half)
    reducer = optimizer.reducer
    delay = choices.delay(before_half)
    if not reducer.feedback and delay != 0:
        delay = None
    if settings.adapts:
        plan = leading(late_plans)
        compressor, collective = plan.compressor, plan.collective
        probed, named, cost = _for_any_names(plan), collective, None
    else:
        compressor, ran = reducer.compressor, list(collectives)
        collective = ran[0] if len(ran) == 1 else settings.collective
        probed, named, cost = compressor, settings.collective, reducer.cost
    steady = probed.bind([], [], warm_up=False)
    exchange_probe = dense_probe = None
    if settings.probes:
        there: dict[str, Any] = {
            "bring": (lambda array: torch.from_numpy(array).to(device)) if device.type == "cuda" else np.asarray,
            "wait": replica.finish,
        }
        exchange_probe = probe(steady, named, numel, between, cost=cost, **there)
        dense_probe = probe_dense(numel, between, **there)
    late_step_s, late_phases_s = float(np.median(slowest_rows[late:, 0])), medians(slowest_rows[late:])
    totals = gather(np.array([sent, wire, dense_wire], np.float64), transport).mean(axis=0)
    layers = choices.layers(gather(choices.sums(), between))
    progress.evaluating()
    quality = _quality(task, model, transport, everywhere=mesh is not None)
    if between is not transport:
        optimizer.close()
        between.close()
    return Outcome(
        quality=quality,
        parameters=sum(parameter.numel() for parameter in replica.parameters),
        ranks=transport.group.size,
        hosts=hosts,
        adapts=settings.adapts,
        compressor=compressor,
        collective=collective,
        median_step_s=float(np.median(slowest_rows[skipped:, 0])),
        phases_s=medians(slowest_rows[skipped:]),
        choosing_s=float(slowest_rows[skipped:, -1].mean()),
        late_step_s=late_step_s,
        late_phases_s=late_phases_s,
        sent_bytes=round(totals[0]),
        wire_bytes=round(totals[1]),
        dense_wire_bytes=round(totals[2]),
        once_bytes=once_bytes,
        gain=float(np.mean(gains)) if gains else None,
        exchange_probe=exchange_probe,
        dense_probe=dense_probe,
        steps_timed=made - skipped,
        ratios=choices.ratios,
        plans=choices.plans(),
        late_plans=late_plans,
        layers=layers,
        delay=delay,
        every=made / len(ends),
        resumed_at=first,
        by_rank=by_rank(everyones[:, skipped:]),
        slowest=slowest,
    )


def _for_any_names(plan: Ran) -> Compressor:
    """Return a plan's compressor for an array that is none of the model's: ratios of layers become one of them all."""
    if not getattr(plan.compressor, "layers", None):
        return plan.compressor
    ratio = {"ratio": plan.ratio_reached} if plan.compressor.selects_by_ratio else {}
    return replace(plan.compressor, layers=None, **ratio)  # type: ignore[call-arg]


def _line(record: StepRecord, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a line of --metrics: the record, with fields of the training."""
    return record.to_json() | fields


def _quality(
    task: Task, model: torch.nn.Module, transport: Transport, share: float = 1.0, *, everywhere: bool
) -> float:
    """Return the quality on held-out data on rank 0, for which the others wait, and NaN on them. Collective."""
    quality = task.evaluate(model, share) if everywhere or transport.group.rank == 0 else float("nan")
    gather(np.zeros(1), transport)
    return quality


def _step(
    replica: Replica,
    step: int,
    gradients: bool,
) -> tuple[float, float, dict[str, float], StepRecord]:
    """Train one step; return loss, seconds, phases, and the record of an exchange, if any."""
    optimizer = replica.optimizer
    before = optimizer.reducer.last_step

    synchronize = optimizer.synchronize if gradients else lambda: None
    times = replica.step(step, synchronize, set_to_none=False, wait_for_forward=False)
    record: StepRecord = optimizer.reducer.last_step
    if record is before:
        record = StepRecord(step)
    seconds = times.end - times.start
    update_s = times.end - times.synchronized - (0.0 if gradients else record.seconds)
    phases = {"compute": times.backward - times.start, "update": update_s}
    phases |= {name: record.phases_s[name] for name in ("compress", "exchange", "decode")}
    phases["other"] = max(0.0, seconds - sum(phases.values()))
    return times.loss, seconds, {name: phases[name] for name in PHASES}, record
