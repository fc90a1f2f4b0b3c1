"""Train a task with its gradients averaged by mpicomp, measure every step, and judge whether compression paid."""

import contextlib
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from mpicomp.bench.measure.chosen_plans import Choices, ChosenPlan, chosen_table, leading
from mpicomp.bench.measure.metrics import MetricsWriter
from mpicomp.bench.measure.probe import Probe, probe, probe_dense
from mpicomp.bench.measure.progress import Progress
from mpicomp.bench.measure.run_fields import PHASES, RunObject
from mpicomp.bench.measure.timings import gather, means_between, slowest_rank
from mpicomp.bench.tasks import Task
from mpicomp.bench.trainer import CPU, MpicompReplica, StepTimes, threads_of_rank, train

from mpicomp.checkpoint import load_checkpoint, save_checkpoint
from mpicomp.compressors import Compressor, Dense
from mpicomp.errors import ConfigurationError, MpicompError
from mpicomp.forecast import advice
from mpicomp.mpi import Transport
from mpicomp.mpi.rounds import dense_ring_bytes
from mpicomp.policies import Policy
from mpicomp.policies.schedule import read_warmup
from mpicomp.reducer.trace import trace
from mpicomp.torch import shard_mesh
from mpicomp.torch.plan_recorder import job_of
from mpicomp.torch.updates import AUTO

_MAX_START_STEPS = 5  # first steps that are not timed: they compile, agree and grow buffers
_NOISE = 0.03  # differences below this share of a step are noise
_ALWAYS = 0.95  # share of the exchanged elements from which on a plan counts as run always; the rest was explored


class Checkpoints:
    """Checkpoints of one training, below one folder."""

    def __init__(self, folder: str, every: int, run: dict[str, Any]) -> None:
        self.folder = folder
        self._every = every
        self._run = run
        self._due = False

    def load(self, task: Task, replica: MpicompReplica, transport: Transport) -> int:
        """Load the newest checkpoint, if there is one, and return the steps that were made until it. Collective."""
        saved = load_checkpoint(self.folder, comm=transport)
        if saved is None:
            return 0
        for name, ours in ({"task": task.name} | self._run).items():
            theirs = saved["run"].get(name)
            if theirs != ours:
                raise ConfigurationError(
                    f"train: the checkpoint in '{self.folder}' is of a run with {name} {theirs}, and this one has "
                    f"{ours}; name another folder, or start the command that wrote it"
                )
        replica.model.load_state_dict(saved["model"])
        replica.optimizer.load_state_dict(saved["optimizer"])
        if replica.schedule is not None:
            replica.schedule.load_state_dict(saved["updater"])
        torch.set_rng_state(saved["random"])
        return int(saved["step"])

    def is_due(self, step: int, exchanged: bool) -> bool:
        """Return whether to save one now: every n-th step, or the next one that exchanged."""
        self._due = self._due or step % self._every == 0
        return self._due and exchanged

    def save(self, step: int, task: Task, replica: MpicompReplica, transport: Transport) -> None:
        """Write a checkpoint after a step. Collective; ranks that have stepped by themselves exchange first."""
        if replica.exchanges_updates:
            replica.optimizer.synchronize()
        state = {
            "run": {"task": task.name} | self._run,
            "step": step,
            "model": replica.model.state_dict(),
            "optimizer": replica.optimizer.state_dict(),
            "updater": {} if replica.schedule is None else replica.schedule.state_dict(),
            "random": torch.get_rng_state(),
        }
        save_checkpoint(self.folder, state, comm=transport)
        self._due = False


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
    # ``"inner": "muon"`` has ranks step by Muon and AdamW in place of the task's optimizer.
    updates: dict[str, Any] | None = None
    lr_scale: float = 1.0  # times the task's learning rate, which is tuned for dense exchange of gradients
    on_failure: str = "abort"
    checkpoints: Checkpoints | None = None  # from which training resumes, and which it writes; None for neither
    trace: str | None = None  # the file that `mpicomp.trace` writes of the steps
    shard: int = 1  # ranks to a replica, over which the model is sharded

    @property
    def every(self) -> int:
        """Steps from one exchange to the next, at first."""
        return 1 if self.updates is None or self.updates["sync_every"] == AUTO else int(self.updates["sync_every"])

    @property
    def changes(self) -> bool:
        """Whether the second half of a run may use other plans than the first."""
        if self.warmup or self.policy.id != "static":
            return True
        one = self.compressor
        return one is not None and one.bind([], [], warm_up=False).get_config() != one.get_config()


@dataclass(frozen=True)
class Stopped:
    """A training that was asked to stop: a checkpoint was written after ``step`` steps."""

    step: int


def train_measured(
    task: Task,
    settings: Settings,
    transport: Transport,
    progress: Progress,
    metrics: MetricsWriter,
    device: torch.device = CPU,
) -> "Trained | Stopped":
    """Train a task, to its end or until ranks are asked to stop. Collective over the transport's ranks."""
    torch.set_num_threads(threads_of_rank(transport.cores))
    replica = _replica(task, settings, transport, device)
    first = 0
    if settings.checkpoints is not None:
        first = settings.checkpoints.load(task, replica, transport)
        if first >= settings.steps:
            raise ConfigurationError(
                f"train: the checkpoint in '{settings.checkpoints.folder}' was written after {first} steps, and this "
                f"run has {settings.steps}; name more --steps, or another folder"
            )
        if first:
            progress.resumed(first)
    metrics.begin(first)
    recording = _Recording(settings, replica, first)
    stopped_at = None

    def on_step(step: int, times: StepTimes) -> bool:
        nonlocal stopped_at
        record, phases = replica.record, recording.add(step, times)
        quality = None
        if settings.evaluate_every and (step + 1) % settings.evaluate_every == 0:
            quality = _quality(task, replica, transport, settings, task.glance)
        if metrics.wanted:
            fields = {"step": step, "seconds": times.seconds, "phases_s": phases, "loss": times.loss}
            fields["quality"] = quality
            metrics.write(lambda: record.to_json() | fields)
        progress.step(step, times.loss, times.seconds, record, quality)
        saves = settings.checkpoints
        if saves is None or step + 1 == settings.steps:
            return False
        # Where nothing was exchanged, ranks may not know the same: the record is an empty one.
        if record.stop or saves.is_due(step + 1, bool(record.buckets)):
            metrics.flush()  # a run that resumes there has all lines before it
            saves.save(step + 1, task, replica, transport)
        if record.stop:
            stopped_at = step + 1
        return bool(record.stop)

    traced = contextlib.nullcontext() if settings.trace is None else trace(settings.trace, comm=transport)
    with progress.over(settings.steps), traced:
        train(task, replica, range(first, settings.steps), on_step)
    if stopped_at is not None:
        return Stopped(stopped_at)
    recording.finish()
    different = replica.differing_ranks(transport)
    if different:
        raise MpicompError(
            f"train: all ranks must end with the same parameters; those of ranks {different} are not rank 0's. "
            "Please report it with the output of mpicomp doctor"
        )
    trained = recording.outcome(task, transport)
    progress.evaluating()
    trained.run.quality["value"] = _quality(task, replica, transport, settings)
    if settings.shard > 1:
        replica.close()
    return trained


def _replica(task: Task, settings: Settings, transport: Transport, device: torch.device) -> MpicompReplica:
    # Phases are to add up to the step, so nothing overlaps.
    of_gradients = {"overlap": False} if settings.updates is None else {}
    return MpicompReplica(
        task,
        transport,
        settings.steps,
        device,
        updates=settings.updates,
        lr_scale=settings.lr_scale,
        mesh=None if settings.shard == 1 else shard_mesh(settings.shard, device.type, transport),
        compressor=settings.compressor,
        collective=settings.collective,
        policy=settings.policy,
        seed=settings.seed,
        warmup=settings.warmup,
        on_failure=settings.on_failure,
        **of_gradients,
    )


class _Recording:
    def __init__(self, settings: Settings, replica: MpicompReplica, first: int) -> None:
        self._settings = settings
        self._replica = replica
        self._first = first  # steps that an earlier job has made
        self._choices = Choices()
        self._rows: list[list[float]] = []  # seconds of each step: the whole, its phases, the choice of plans
        self._ends: list[int] = []  # steps that had been made when something was exchanged
        self._bytes = np.zeros(3)  # sent, on the wire, and on the wire of a dense ring
        self._once_bytes = replica.once_bytes
        self._gains: list[float] = []
        self._collectives: dict[str, None] = {}
        self._warmup_steps = settings.every * read_warmup(settings.warmup)[0]

    def add(self, step: int, times: StepTimes) -> dict[str, float]:
        """Take a step's numbers; return the seconds of its phases."""
        replica, record = self._replica, self._replica.record
        update_s = times.end - times.synchronized
        if replica.exchanges_updates:  # which happens in the update
            update_s -= record.seconds
        phases = {"compute": times.backward - times.start, "update": update_s}
        phases |= {name: record.phases_s[name] for name in ("compress", "exchange", "decode")}
        phases["other"] = max(0.0, times.seconds - sum(phases.values()))
        phases = {name: phases[name] for name in PHASES}
        self._rows.append([times.seconds, *phases.values(), record.choosing_s])
        ring = dense_ring_bytes(replica.numel, replica.between.group.size)
        dense = ring if replica.exchanges_updates else record.dense_wire_bytes
        self._bytes += (record.sent_bytes, record.wire_bytes, dense)
        self._once_bytes += round(record.once_wire_bytes)
        self._gains += [bucket.gain for bucket in record.buckets if bucket.gain is not None]
        if step >= self._warmup_steps:
            self._collectives |= dict.fromkeys(bucket.collective for bucket in record.buckets)
        if record.buckets:
            self._choices.add(record)
            self._ends.append(step + 1 - self._first)
        return phases

    def finish(self) -> None:
        """Exchange the changes of the last steps where updates are exchanged. Collective."""
        if not self._replica.exchanges_updates:
            return
        optimizer = self._replica.optimizer
        before = optimizer.reducer.last_step
        optimizer.synchronize()
        record = optimizer.reducer.last_step
        if record is not before:
            self._choices.add(record)
            self._bytes += (record.sent_bytes, record.wire_bytes, 0)
            if len(self._rows) not in self._ends[-1:]:
                self._ends.append(len(self._rows))

    def outcome(self, task: Task, transport: Transport) -> "Trained":
        """Return the result but for the quality. Collective: it also measures exchanges by themselves."""
        settings, choices, replica, ends = self._settings, self._choices, self._replica, self._ends
        reducer, between = replica.optimizer.reducer, replica.between
        made = settings.steps - self._first
        skipped = min(_MAX_START_STEPS, made // 4)
        means = means_between(ends, gather(np.array(self._rows), transport))
        everyones = means.repeat(np.diff(ends, prepend=0), axis=1)
        slowest_rows = everyones[everyones[:, :, 0].argmax(axis=0), np.arange(everyones.shape[1])]
        timed = means[:, np.searchsorted(ends, skipped, side="right") :]
        warmup_steps = self._warmup_steps - self._first
        half = max(made // 2, warmup_steps if warmup_steps < made else 0)
        late_rows = slowest_rows[max(skipped, half) if settings.changes else skipped :]
        timed_rows = slowest_rows[skipped:]
        before_half = sum(end <= half for end in ends)
        late_plans = choices.plans(before_half)
        delay = choices.delay(before_half)
        if not reducer.feedback and delay != 0:
            delay = None
        adapts = settings.policy.id != "static"
        if adapts:
            plan = leading(late_plans)
            compressor, collective = plan.compressor, plan.collective
            probed, named, cost = compressor, collective, None
            if getattr(compressor, "layers", None):  # one overall ratio in place of those per layer
                ratio = {"ratio": plan.ratio_reached} if compressor.selects_by_ratio else {}
                probed = replace(compressor, layers=None, **ratio)  # type: ignore[call-arg]
        else:
            compressor, ran = reducer.compressor, list(self._collectives)
            collective = ran[0] if len(ran) == 1 else settings.collective
            probed, named, cost = compressor, settings.collective, reducer.cost
        late_step_s = float(np.median(late_rows[:, 0]))
        exchange_probe = dense_probe = exchange_s = dense_step_s = advised = None
        if settings.probes:
            device = replica.device
            bring = np.asarray if device.type == "cpu" else lambda array: torch.from_numpy(array).to(device)
            there: dict[str, Any] = {"bring": bring, "wait": replica.finish}
            steady = probed.bind([], [], warm_up=False)
            exchange_probe = probe(steady, named, replica.numel, between, cost=cost, **there)
            dense_probe = probe_dense(replica.numel, between, **there)
            phases = _medians(late_rows)
            exchange_s, dense_step_s = estimate(late_step_s, phases, exchange_probe, dense_probe, made / len(ends))
            advised = advice_of_run(replica, dense_step_s - dense_probe.seconds, late_step_s)
        sent, wire, dense_wire = gather(self._bytes, transport).mean(axis=0).round().astype(int).tolist()
        slowest, costs_s = slowest_rank(timed[:, :, 0] - timed[:, :, 1 + PHASES.index("exchange")])
        plans, parameters = choices.plans(), sum(parameter.numel() for parameter in replica.parameters)
        run = RunObject(
            **self._settings_of_run(task),
            compressor=compressor.id,
            compressor_config=compressor.get_config(),
            ratio=getattr(compressor, "ratio", 1.0),
            collective=collective,
            ranks=transport.group.size,
            hosts=transport.group.hosts,
            parameters=parameters,
            median_step_s=float(np.median(timed_rows[:, 0])),
            phases_s=_medians(timed_rows),
            choosing_s=float(timed_rows[:, -1].mean()),
            exchange_s=exchange_s,
            dense_exchange_s=None if dense_probe is None else dense_probe.seconds,
            dense_collective=None if dense_probe is None else dense_probe.collective,
            dense_step_s=dense_step_s,
            slowest_rank=slowest,
            slowest_costs_s=costs_s,
            gain=float(np.mean(self._gains)) if self._gains else None,
            delay=delay,
            ratios={
                "median": statistics.median(choices.ratios), "least": min(choices.ratios), "most": max(choices.ratios)
            },
            plans=[plan.entry() for plan in plans],
            sent_bytes=sent,
            wire_bytes=wire,
            dense_wire_bytes=dense_wire,
            dense_bytes=4 * parameters // settings.shard * made,
            once_bytes=self._once_bytes,
        )  # fmt: skip
        timed_steps = made - skipped
        return Trained(
            run, adapts, compressor, timed_steps, late_step_s, plans, late_plans, exchange_probe, dense_probe, advised
        )

    def _settings_of_run(self, task: Task) -> dict[str, Any]:
        settings = self._settings
        return {
            "task": task.name,
            "shard": settings.shard,
            "policy": settings.policy.id,
            "policy_config": settings.policy.get_config(),
            "exchange": "gradients" if settings.updates is None else "updates",
            "updates": settings.updates,
            "lr_scale": settings.lr_scale,
            "warmup": settings.warmup,
            "steps": settings.steps,
            "resumed_at": self._first,
            "seed": settings.seed,
            "quality": {"name": task.quality_name, "value": np.nan, "better": task.better},
        }


def _quality(
    task: Task, replica: MpicompReplica, transport: Transport, settings: Settings, share: float = 1.0
) -> float:
    # On rank 0, for which the others wait, and NaN on them.
    everywhere = settings.shard > 1  # shards of all ranks are needed
    quality = task.evaluate(replica.model, share) if everywhere or transport.group.rank == 0 else float("nan")
    gather(np.zeros(1), transport)
    return quality


def _medians(rows: np.ndarray) -> dict[str, float]:
    return {name: float(np.median(rows[:, place])) for place, name in enumerate(PHASES, 1)}


@dataclass
class Trained:
    """A training that has ended: its JSON object, and more for the verdict and the table."""

    run: RunObject
    adapts: bool  # whether compressors might change from step to step
    compressor: Compressor  # the named one, or that of the plan that leads in the second half of the run
    steps_timed: int
    late_step_s: float  # median, of the second half where plans might change, since `exchange_probe` is of that half
    plans: list[ChosenPlan]  # of the run, and of its second half
    late_plans: list[ChosenPlan]
    # The run's exchange and the fastest dense one by themselves; None where they were not asked for
    exchange_probe: Probe | None = None
    dense_probe: Probe | None = None
    advice: str | None = None  # `mpicomp.forecast.advice`


def advice_of_run(replica: MpicompReplica, compute_s: float, step_s: float) -> str | None:
    """Return the advice of `mpicomp plan` on rank 0, where there are several hosts and their links were measured."""
    reducer, group = replica.optimizer.reducer, replica.between.group
    is_other = replica.exchanges_updates or group.size < replica.group.size
    if reducer.cost is None or is_other or group.hosts == 1 or group.rank > 0:
        return None
    return advice(job_of(dict(replica.model.named_parameters()), compute_s), reducer.cost.network, group, step_s)


def estimate(
    step_s: float, phases_s: Mapping[str, float], exchange: Probe, dense: Probe, every: float = 1.0
) -> tuple[float, float]:
    """Return the seconds of the exchange in a step, and of a step with the best dense exchange.

    Kernels take their seconds in steps, and rounds those that the probe measured, once in ``every`` steps; the
    remaining work of a dense step is the same.
    """
    exchange_s = phases_s["compress"] + exchange.rounds_s / every + phases_s["decode"]
    return exchange_s, max(step_s - exchange_s, phases_s["compute"] + phases_s["update"]) + dense.seconds


def judge(trained: Trained, dense: RunObject | None = None) -> str:
    """Return whether compression paid in seconds, and gradients' delay; where plans changed, of the second half."""
    run = trained.run
    if run.ranks == 1:
        return "one rank: nothing was exchanged, so there was nothing to gain; start it with mpiexec -n 4"
    parts = [_judge_seconds(trained)]
    if sum(plan.share for plan in trained.late_plans if plan.compressor != Dense()) >= 1 - _ALWAYS:
        delay = run.delay
        if delay is None:
            parts.append("no delay to measure, since there is no error feedback")
        else:
            steps = "under 0.01" if 0 < delay < 0.01 else f"{delay:.0f}" if delay >= 10 else f"{delay:.2g}"
            parts.append(f"delay {steps} steps: gradient energy that waits in residuals, counted in steps")
        if dense is None:
            parts.append("quality was not compared with dense exchange")
    if dense is not None:
        parts.append(
            f"{run.quality['name']} {run.quality['value']:.4f}, and {dense.quality['value']:.4f} with dense exchange "
            "from the same seed, "
            f"whose steps took {dense.median_step_s:.3f} s"
        )
    if trained.advice is not None:
        parts.append(trained.advice)
    return "; ".join(parts)


def _judge_seconds(trained: Trained) -> str:
    run, step_s = trained.run, trained.late_step_s
    times = run.dense_wire_bytes / run.wire_bytes if run.wire_bytes else float("inf")
    dense = run.dense_step_s
    fewer = f"{times:.1f} times fewer bytes left each rank than with a dense ring"
    if trained.compressor == Dense():
        if not trained.adapts:
            return f"dense exchange: nothing was compressed; a step took {step_s:.3f} s"
        share = sum(plan.share for plan in trained.late_plans if plan.compressor.message == "dense")
        mostly = "" if share > _ALWAYS else f" for {100 * share:.0f} % of the later steps"
        return (
            f"mpicomp chose dense exchange{mostly}: nothing that sends enough of the gradient beats it here; "
            f"a step took {step_s:.3f} s"
        )
    if dense is None:
        return f"none, since no dense exchange was measured: a step took {step_s:.3f} s, and {fewer}"
    ratio = dense / step_s
    if ratio > 1 + _NOISE:
        faster = f"{ratio:.1f} times faster" if ratio >= 2 else f"{100 * (ratio - 1):.0f} % faster"
        return (
            f"compression paid in seconds: a step took {step_s:.3f} s, {faster} than "
            f"the {dense:.3f} s with a dense exchange here, and {fewer}"
        )
    if ratio < 1 - _NOISE:
        return (
            f"compression did not pay in seconds: a step took {step_s:.3f} s, with a dense exchange it would take "
            f"{dense:.3f} s here, although {fewer}; use --compressor dense on this network"
        )
    return f"compression made no difference to the time of a step ({step_s:.3f} s), and {fewer}"


def table(trained: Trained) -> str:
    """Return the measurements that the verdict rests on, a line each."""
    run = trained.run
    median, made = run.median_step_s, run.steps - run.resumed_at
    lines = [
        f"{run.quality['name']}: {run.quality['value']:.4f} after {run.steps} steps",
        f"seconds a step: {median:.4f} (median of {trained.steps_timed}, slowest rank), of which",
    ]
    lines += [f"  {name:<9}{run.phases_s[name]:.4f}  {100 * run.phases_s[name] / median:5.1f} %" for name in PHASES]
    lines.append(f"choosing plans: {run.choosing_s:.4f} s a step, {100 * run.choosing_s / median:.1f} % (mean)")
    lines += [
        f"bytes that left a rank: {run.wire_bytes / made:,.0f} a step, dense ring {run.dense_wire_bytes / made:,.0f}",
        f"bytes at the start, once: {run.once_bytes:,}",
    ]
    if trained.exchange_probe is not None and trained.dense_probe is not None:
        lines.append(
            f"an exchange without waiting: {run.exchange_s:.4f} s; dense {run.dense_exchange_s:.4f} s "
            f"by {run.dense_collective}, the fastest (medians of {trained.exchange_probe.repeats} and "
            f"{trained.dense_probe.repeats})"
        )
    if run.gain is not None:
        lines.append(f"gain (share of the accumulated gradient's energy that was sent): {run.gain:.3f}")
    if run.delay is not None:
        late = "energy that waits in residuals over that sent in a step, second half"
        lines.append(f"delay ({late}): {run.delay:.3g} steps")
    lines.append(chosen_table(trained.plans))
    return "\n".join(lines)
