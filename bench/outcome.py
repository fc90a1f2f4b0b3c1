"""Result of a training run: its object for --json, its table, and the verdict whether compression paid."""

import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mpicomp.bench.measure.chosen_plans import Layer, Ran, chosen_table
from mpicomp.bench.measure.probe import Probe
from mpicomp.bench.measure.run_fields import RunObject
from mpicomp.bench.measure.timings import PHASES, RankTimes, Slowest

from mpicomp.compressors import Compressor, Dense

if TYPE_CHECKING:  # they load torch
    from mpicomp.bench.tasks import Task
    from mpicomp.bench.training_run import Settings


@dataclass
class Outcome:
    """Result of a training run; the same on every rank, except for ``quality``, which rank 0 has."""

    quality: float
    parameters: int
    ranks: int
    hosts: int
    # Whether compressors might change from step to step. ``compressor`` and ``collective`` then are those of the plan
    # that leads in the second half of the run; else they are what was named, and the collective that ran where it was
    # one alone
    adapts: bool
    compressor: Compressor
    collective: str
    median_step_s: float  # medians over all steps that are timed
    phases_s: dict[str, float]
    # Mean seconds a step of choosing plans and learning from their times; mostly a part of ``other``
    choosing_s: float
    # Of the second half where plans might change, since ``exchange_probe`` is of that half
    late_step_s: float
    late_phases_s: dict[str, float]
    sent_bytes: int
    wire_bytes: int
    dense_wire_bytes: int
    once_bytes: int
    gain: float | None
    # The run's exchange and the fastest dense one by themselves; None where they were not asked for
    exchange_probe: Probe | None
    dense_probe: Probe | None
    steps_timed: int
    ratios: list[float]  # kept fraction of the whole in every step
    plans: list[Ran]  # of the run, and of its second half
    late_plans: list[Ran]
    layers: list[Layer]  # kept elements of each parameter, mean over ranks and steps
    # Exchanges by which gradients, or updates, were late in the second half of the run; see `Choices.delay`. None
    # without error feedback, where what is left out does not come later
    delay: float | None = None
    # Steps from one exchange to the next, on the average. Seconds of steps are means over those of an exchange
    every: float = 1.0
    # Steps that an earlier job has made, from whose checkpoint this one went on; what is measured is of the others
    resumed_at: int = 0
    by_rank: list[RankTimes] = field(default_factory=list)  # what each rank took, in the order of ranks
    # The rank that the others waited for, over the steps that are timed; None where there is one rank
    slowest: Slowest | None = None

    @property
    def exchange_s(self) -> float | None:
        """Seconds of the exchange a step: kernels as they ran in steps, and rounds as the probe measured them."""
        if self.exchange_probe is None:
            return None
        phases = self.late_phases_s
        return phases["compress"] + self.exchange_probe.rounds_s / self.every + phases["decode"]

    @property
    def dense_step_s(self) -> float | None:
        """Estimated seconds of a step with the best dense exchange, whose remaining work is the same."""
        if self.exchange_s is None or self.dense_probe is None:
            return None
        phases = self.late_phases_s
        return max(self.late_step_s - self.exchange_s, phases["compute"] + phases["update"]) + self.dense_probe.seconds


def run_object(task: "Task", settings: "Settings", outcome: Outcome, verdict: str) -> dict[str, Any]:
    """Return the object that ``train --json`` writes."""
    ratios = sorted(outcome.ratios)
    written: RunObject = {
        "schema": 1,
        "task": task.name,
        "shard": settings.shard,
        "compressor": outcome.compressor.id,
        "compressor_config": outcome.compressor.get_config(),
        "ratio": getattr(outcome.compressor, "ratio", 1.0),
        "collective": outcome.collective,
        "exchange": "gradients" if settings.updates is None else "updates",
        "updates": settings.updates,
        "lr_scale": settings.lr_scale,
        "policy": settings.policy.id,
        "policy_config": settings.policy.get_config(),
        "warmup": settings.warmup,
        "ranks": outcome.ranks,
        "hosts": outcome.hosts,
        "steps": settings.steps,
        "resumed_at": outcome.resumed_at,
        "seed": settings.seed,
        "parameters": outcome.parameters,
        "quality": {"name": task.quality_name, "value": outcome.quality, "better": task.better},
        "median_step_s": outcome.median_step_s,
        "phases_s": outcome.phases_s,
        "choosing_s": outcome.choosing_s,
        "exchange_s": outcome.exchange_s,
        "dense_exchange_s": None if outcome.dense_probe is None else outcome.dense_probe.seconds,
        "dense_collective": None if outcome.dense_probe is None else outcome.dense_probe.collective,
        "dense_step_s": outcome.dense_step_s,
        "slowest_rank": None if outcome.slowest is None else outcome.slowest.rank,
        "slowest_costs_s": None if outcome.slowest is None else outcome.slowest.costs_s,
        "gain": outcome.gain,
        "delay": outcome.delay,
        "by_rank": [asdict(times) for times in outcome.by_rank],
        "ratios": {"median": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]},
        "plans": [plan.to_json() for plan in outcome.plans],
        "layers": [layer.to_json() for layer in outcome.layers],
        "sent_bytes": outcome.sent_bytes,
        "wire_bytes": outcome.wire_bytes,
        "dense_wire_bytes": outcome.dense_wire_bytes,
        "dense_bytes": 4 * outcome.parameters // settings.shard * (settings.steps - outcome.resumed_at),
        "once_bytes": outcome.once_bytes,
        "verdict": verdict,
    }
    return dict(written)


_NOISE = 0.03  # differences below this share of a step say nothing
_ALWAYS = 0.95  # share of the exchanged elements from which on a plan counts as run always; the rest was explored


def judge(outcome: Outcome, dense: Outcome | None = None, quality_name: str = "quality") -> str:
    """Return whether compression paid in seconds, and gradients' delay; where plans changed, of the second half."""
    if outcome.ranks == 1:
        return "one rank: nothing was exchanged, so there was nothing to gain; start it with mpiexec -n 4"
    compressed = [plan.share for plan in outcome.late_plans if not _is_exact(plan.compressor)]
    parts = [_judge_seconds(outcome)]
    if sum(compressed) >= 1 - _ALWAYS:
        parts.append(_late(outcome.delay, dense is not None))
    if dense is not None:
        parts.append(
            f"{quality_name} {outcome.quality:.4f}, and {dense.quality:.4f} with dense exchange from the same seed, "
            f"whose steps took {dense.median_step_s:.3f} s"
        )
    slowest = outcome.slowest
    if slowest is not None and slowest.matters(outcome.median_step_s, _NOISE):
        parts.append(
            f"rank {slowest.rank} is slow: a step takes it {slowest.costs_s:.3f} s more work than the middle rank, and "
            "the others wait for it"
        )
    return "; ".join(parts)


def _is_exact(compressor: Compressor) -> bool:
    return compressor == Dense()


def _late(delay: float | None, compared: bool) -> str:
    """Return the delay of gradients in words, with the note that quality was not compared where it was not."""
    late = (
        "no delay to measure, since there is no error feedback"
        if delay is None
        else f"delay {_steps(delay)} steps: so many steps' worth of gradient energy wait in residuals"
    )
    return late if compared else f"{late}; quality was not compared with dense exchange"


def _steps(delay: float) -> str:
    if 0 < delay < 0.01:
        return "under 0.01"
    return f"{delay:.0f}" if delay >= 10 else f"{delay:.2g}"


def _judge_seconds(outcome: Outcome) -> str:
    times = outcome.dense_wire_bytes / outcome.wire_bytes if outcome.wire_bytes else float("inf")
    dense, step_s = outcome.dense_step_s, outcome.late_step_s
    fewer = f"{times:.1f} times fewer bytes left each rank than with a dense ring"
    if _is_exact(outcome.compressor):
        if not outcome.adapts:
            return f"dense exchange: nothing was compressed; a step took {step_s:.3f} s"
        share = sum(plan.share for plan in outcome.late_plans if plan.compressor.message == "dense")
        mostly = "" if share > _ALWAYS else f" for {100 * share:.0f} % of the later steps"
        return (
            f"mpicomp chose dense exchange{mostly}: nothing that sends enough of the gradient beats it here; "
            f"a step took {step_s:.3f} s"
        )
    if dense is None:
        return f"none, since no dense exchange was measured: a step took {step_s:.3f} s, and {fewer}"
    ratio = dense / step_s
    if ratio > 1 + _NOISE:
        return (
            f"compression paid in seconds: a step took {step_s:.3f} s, {_faster(ratio)} than "
            f"the {dense:.3f} s with a dense exchange here, and {fewer}"
        )
    if ratio < 1 - _NOISE:
        return (
            f"compression did not pay in seconds: a step took {step_s:.3f} s, with a dense exchange it would take "
            f"{dense:.3f} s here, although {fewer}; use --compressor dense on this network"
        )
    return f"compression made no difference to the time of a step ({step_s:.3f} s), and {fewer}"


def _faster(ratio: float) -> str:
    return f"{ratio:.1f} times faster" if ratio >= 2 else f"{100 * (ratio - 1):.0f} % faster"


def table(outcome: Outcome, quality_name: str, steps: int) -> str:
    """Return the measurements that the verdict rests on, a line each."""
    median, made = outcome.median_step_s, steps - outcome.resumed_at
    lines = [
        f"{quality_name}: {outcome.quality:.4f} after {steps} steps",
        f"seconds a step: {median:.4f} (median of {outcome.steps_timed}, slowest rank), of which",
    ]
    lines += [
        f"  {name:<9}{outcome.phases_s[name]:.4f}  {100 * outcome.phases_s[name] / median:5.1f} %" for name in PHASES
    ]
    lines.append(f"choosing plans: {outcome.choosing_s:.4f} s a step, {100 * outcome.choosing_s / median:.1f} % (mean)")
    lines += [
        f"bytes that left a rank: {outcome.wire_bytes / made:,.0f} a step, "
        f"dense ring {outcome.dense_wire_bytes / made:,.0f}",
        f"bytes at the start, once: {outcome.once_bytes:,}",
    ]
    if outcome.exchange_probe is not None and outcome.dense_probe is not None:
        lines.append(
            f"an exchange without waiting: {outcome.exchange_s:.4f} s; dense {outcome.dense_probe.seconds:.4f} s "
            f"by {outcome.dense_probe.collective}, the fastest (medians of {outcome.exchange_probe.repeats} and "
            f"{outcome.dense_probe.repeats})"
        )
    if outcome.gain is not None:
        lines.append(f"gain (share of the accumulated gradient's energy that was sent): {outcome.gain:.3f}")
    if outcome.delay is not None:
        late = "energy that waits in residuals over what a step sends, second half"
        lines.append(f"delay ({late}): {outcome.delay:.3g} steps")
    lines.append(chosen_table(outcome.plans, outcome.layers))
    return "\n".join(lines)
