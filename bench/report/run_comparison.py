"""The verdict on one run, or on several compared, in words; it counts quality, not seconds alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from mpicomp.bench.report.learning import loss_curve
from mpicomp.bench.report.runs import Run
from mpicomp.bench.report.section_parts import Array, amount, capital, digits, listed, seconds, times

_WAY_FRACTION = 0.95  # of the way that the reference went, which the others are timed over
_MIN_LOOKS = 5  # at held-out data; with fewer the training loss is compared


def verdict(runs: Sequence[Run]) -> list[str]:
    """Return sentences, the most important one first."""
    if len(runs) == 1:
        return _single(runs[0])
    return [sentence for sentence in (_race(runs), _final_quality(runs), _costs(runs), _differences(runs)) if sentence]


def _single(run: Run) -> list[str]:
    if run.outcome is not None:
        return [f"{capital(part)}." for part in str(run.outcome["verdict"]).split("; ", 1)]
    sent, dense = run.bytes_per_step
    fewer = f", {times(dense / sent)} fewer than with a dense ring" if sent else ""
    return [
        f"A step took {seconds(run.step_s)} on rank 0, and {amount(sent)} left it{fewer}.",
        "Whether that paid is in the file of train --json, which was not named.",
    ]


@dataclass
class _Way:
    """Loss, or negative quality, of a run over its seconds."""

    run: Run
    values: Array
    elapsed: Array

    def seconds_to(self, level: float) -> float:
        """Return the seconds until it reaches a level; infinity if it does not."""
        reached = np.flatnonzero(self.values <= level)
        return float(self.elapsed[reached[0]]) if reached.size else math.inf


def _race(runs: Sequence[Run]) -> str | None:
    """Return who comes first to what the reference reached: the dense run, else the one that ends best."""
    runs = [run for run in runs if run.recorded]
    by_quality = all(run.outcome and np.isfinite(run.lines.quality).sum() >= _MIN_LOOKS for run in runs)
    sign = -1.0 if by_quality and runs and runs[0].quality[1] == "higher" else 1.0
    ways = []
    for run in runs:
        if by_quality:
            seen = np.isfinite(run.lines.quality)
            ways.append(_Way(run, sign * run.lines.quality[seen], run.elapsed[seen]))
        else:
            curve = loss_curve(run)
            ways.append(_Way(run, curve.middle, curve.x))
    sound = [way for way in ways if np.isfinite(way.values[[0, -1]]).all()]
    if len(sound) < 2:
        return None
    reference = next((way for way in sound if way.run.is_dense), min(sound, key=lambda way: way.values[-1]))
    first, last = reference.values[0], float(np.median(reference.values[-max(1, reference.values.size // 10) :]))
    level = first + _WAY_FRACTION * (last - first)
    what = runs[0].quality[0] if by_quality else "training loss"
    order = sorted(ways, key=lambda way: way.seconds_to(level))
    best = order[0].seconds_to(level)
    if math.isinf(best):
        return None
    parts = [
        f"{order[0].run.name} comes first: it reaches a {what} of {digits(sign * level)} after {seconds(best)}, "
        f"{100 * _WAY_FRACTION:.0f} % of the way that {reference.run.name} went"
    ]
    for way in order[1:]:
        taken = way.seconds_to(level)
        if math.isfinite(taken):
            longer = f", {times(taken / best)} as long" if taken > 1.05 * best else ""
            parts.append(f"{way.run.name} needs {seconds(taken)}{longer}")
    never = [way.run.name for way in order if math.isinf(way.seconds_to(level))]
    if never:
        parts.append(f"{listed(never)} {'do' if len(never) > 1 else 'does'} not reach it")
    return "; ".join(parts) + "."


def _final_quality(runs: Sequence[Run]) -> str | None:
    values = {run.name: float(run.outcome["quality"]["value"]) for run in runs if run.outcome}
    if len(values) < 2:
        return None
    name, better = next(run.quality for run in runs if run.outcome)
    sign = -1 if better == "higher" else 1
    order = sorted(values, key=lambda run: (not math.isfinite(values[run]), sign * values[run]))
    reached = listed([f"{run} {digits(values[run])}" for run in order])
    return f"{capital(name)} in the end, {better} is better: {reached}."


def _costs(runs: Sequence[Run]) -> str:
    order = sorted(runs, key=lambda run: run.step_s)
    parts = [f"{run.name} {seconds(run.step_s)} and {amount(run.bytes_per_step[0])}" for run in order]
    return f"A step takes, and sends from a rank: {listed(parts)}."


def _differences(runs: Sequence[Run]) -> str:
    """Return the settings that differ besides what is compared, and how much one run of each can show."""
    differ = []
    for key in ("ranks", "hosts", "steps", "seed", "exchange", "lr_scale", "shards"):
        values = {run.name: run.outcome[key] for run in runs if run.outcome and key in run.outcome}
        if len(set(map(str, values.values()))) > 1:
            differ.append(f"{key} ({', '.join(f'{name} {value}' for name, value in values.items())})")
    note = "One run of each: what differs by chance, runs of other seeds would tell."
    return f"The runs differ in {listed(differ)}, too. {note}" if differ else note
