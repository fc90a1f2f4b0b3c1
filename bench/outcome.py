"""Result of a training run, and the object that ``train --json`` writes of it."""

import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mpicomp.bench.measure.chosen_plans import Layer, Ran
from mpicomp.bench.measure.correlation import Correlations
from mpicomp.bench.measure.probe import Probe
from mpicomp.bench.measure.run_fields import RunObject
from mpicomp.bench.measure.timings import RankTimes, Slowest
from mpicomp.bench.simulate.measured import Measured

from mpicomp.compressors import Compressor

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
    correlations: Correlations | None = None  # correlations between ranks' gradients; None where they were not compared
    # Exchanges by which gradients, or updates, were late in the second half of the run; see `Choices.delay`. None
    # without error feedback, where what is left out does not come later
    delay: float | None = None
    # Steps from one exchange to the next, on the average. Seconds of steps are means over those of an exchange
    every: float = 1.0
    # Steps that an earlier job has made, from whose checkpoint this one went on; what is measured is of the others
    resumed_at: int = 0
    by_rank: list[RankTimes] = field(default_factory=list)  # what each rank took, in the order of ranks
    measured: Measured | None = None  # what ``mpicomp simulate`` needs; None where it was not asked for
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
        """Estimated seconds of a step with the best dense exchange.

        The rest of the step, waiting for the slowest rank included, is assumed to stay the same.
        """
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
        "shards": task.shards,
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
        "correlation": None if outcome.correlations is None else outcome.correlations.to_json(),
        "sent_bytes": outcome.sent_bytes,
        "wire_bytes": outcome.wire_bytes,
        "dense_wire_bytes": outcome.dense_wire_bytes,
        "dense_bytes": 4 * outcome.parameters * (settings.steps - outcome.resumed_at),
        "once_bytes": outcome.once_bytes,
        "verdict": verdict,
    }
    return dict(written)
