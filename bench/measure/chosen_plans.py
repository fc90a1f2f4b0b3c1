"""Summary of the plans of a run: how often each ran, and the kept fraction."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from mpicomp.bench.measure.results import plain
from mpicomp.bench.measure.run_fields import PlanEntry

from mpicomp.compressors import Compressor, get_compressor
from mpicomp.reducer import StepRecord


def kept_share(record: StepRecord) -> float:
    """Return the kept fraction of all buckets."""
    numel = sum(bucket.numel for bucket in record.buckets)
    return sum(bucket.ratio_reached * bucket.numel for bucket in record.buckets) / max(1, numel)


def in_short(record: StepRecord) -> str:
    """Summarize a step in some words: kept fraction, the collective of most buckets, and their mean gain."""
    if not record.buckets:
        return "no exchange"
    collective = Counter(bucket.collective for bucket in record.buckets).most_common(1)[0][0]
    gains = [bucket.gain for bucket in record.buckets if bucket.gain is not None]
    gain = f"  gain {np.mean(gains):.2f}" if gains else ""
    return f"ratio {kept_share(record):.2g}  {collective}{gain}"


@dataclass(frozen=True)
class ChosenPlan:
    """A plan and how much of a run it has carried."""

    compressor: Compressor  # that of the plan
    ratio: float  # kept fraction that was asked for; 1 where the compressor has none
    collective: str
    share: float  # of the elements that were exchanged. With one bucket that is the share of steps
    ratio_reached: float  # kept fraction, mean over its exchanges

    def entry(self) -> PlanEntry:
        """Return its entry in ``train --json``."""
        config = self.compressor.get_config()
        plan = {"ratio": self.ratio, "collective": self.collective, "share": self.share}
        return {"compressor": self.compressor.id, "compressor_config": config, **plan}  # type: ignore[typeddict-item]


class Choices:
    """Collects the plans that steps have run, on one rank."""

    def __init__(self) -> None:
        self.ratios: list[float] = []
        """Kept fraction of the whole in every step."""
        self._steps: list[list[tuple[tuple[str, str], int, float]]] = []  # plan, elements, kept fraction of buckets
        self._energies: list[tuple[float, float]] = []  # that wait after a step, and that were sent in it

    def add(self, record: StepRecord) -> None:
        self.ratios.append(kept_share(record))
        self._steps.append([])
        waits = sent = 0.0
        for bucket in record.buckets:
            plan = json.dumps(bucket.compressor), bucket.collective
            self._steps[-1].append((plan, bucket.numel, bucket.ratio_reached))
            if bucket.gain is not None and bucket.energy is not None and not record.skipped:
                waits += (1 - bucket.gain) * bucket.energy
                sent += bucket.gain * bucket.energy
        self._energies.append((waits, sent))

    def delay(self, first: int = 0) -> float | None:
        """Return the energy that waits in residuals over the energy that is sent, from a step on; None without any."""
        waits, sent = np.sum(self._energies[first:], axis=0) if self._energies[first:] else (0.0, 0.0)
        return float(waits / sent) if sent > 0 else None

    def plans(self, first: int = 0) -> list[ChosenPlan]:
        """Return the plans that were run from a step on, from the one that has carried most."""
        elements: Counter[tuple[str, str]] = Counter()
        kept: defaultdict[tuple[str, str], float] = defaultdict(float)
        for step in self._steps[first:]:
            for plan, numel, ratio in step:
                elements[plan] += numel
                kept[plan] += ratio * numel
        found = []
        for plan, numel in elements.most_common():
            compressor = get_compressor(json.loads(plan[0]))
            ratio = getattr(compressor, "ratio", 1.0)
            found.append(ChosenPlan(compressor, ratio, plan[1], numel / elements.total(), kept[plan] / numel))
        return found


def leading(plans: Sequence[ChosenPlan]) -> ChosenPlan:
    """Return the plan that has carried most, among those of the kind of compressor that has: ratios are many."""
    shares: Counter[str] = Counter()
    for plan in plans:
        shares[plan.compressor.id] += plan.share  # type: ignore[assignment]
    kind = shares.most_common(1)[0][0]
    return max((plan for plan in plans if plan.compressor.id == kind), key=lambda plan: plan.share)


_PLANS = 8  # lines of the table of plans


def chosen_table(plans: Sequence[ChosenPlan]) -> str:
    """Return a table of plans; of many those that have carried most."""
    rows = []
    for plan in plans[:_PLANS]:
        label = repr(plan.compressor)
        if getattr(plan.compressor, "layers", None):
            label = f"{replace(plan.compressor, layers=None)!r} by layer"  # type: ignore[call-arg]
        rows.append((f"  {label}", plan.collective, f"{100 * plan.share:.1f} %"))
    lines = [plain(("compressor", "collective", "of the steps"), rows, (True, True, False))]
    if len(plans) > _PLANS:
        rest = sum(plan.share for plan in plans[_PLANS:])
        lines.append(f"  and {len(plans) - _PLANS} more, {100 * rest:.1f} % in all")
    return "\n".join(lines)
