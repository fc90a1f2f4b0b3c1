"""The verdict of a report: of one run the one that train printed; of several, which reaches a quality first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from mpicomp.bench.report.numbers import amount, digits, listed, seconds, times
from mpicomp.bench.report.plots import points
from mpicomp.bench.report.runs import Array, Run

_WAY_FRACTION = 0.95  # of the way that the reference went, which the others are timed over
_MIN_EVALUATIONS = 5  # on held-out data; with fewer the training loss is compared


def verdict(runs: Sequence[Run]) -> list[str]:
    """Return sentences, the most important one first."""
    if len(runs) > 1:
        order = sorted(runs, key=lambda run: run.step_s)
        parts = [f"{run.name} {seconds(run.step_s)} and {amount(run.bytes_per_step[0])}" for run in order]
        costs = f"A step takes, and sends from a rank: {listed(parts)}."
        return [sentence for sentence in (_race(runs), _final_quality(runs), costs, _differences(runs)) if sentence]
    run = runs[0]
    if run.outcome is not None:
        return [f"{part[:1].upper()}{part[1:]}." for part in run.outcome.verdict.split("; ", 1)]
    sent, dense = run.bytes_per_step
    fewer = f", {times(dense / sent)} fewer than with a dense ring" if sent else ""
    return [
        f"A step took {seconds(run.step_s)} on rank 0, and {amount(sent)} left it{fewer}.",
        "Whether that paid is in the file of train --json, which was not named.",
    ]


@dataclass
class Race:
    """Seconds until each run reaches a quality near the reference's last one."""

    reference: Run  # the dense run, else the one that ends best
    level: float
    seconds: list[tuple[Run, float]]  # the fastest first; infinity where a run does not reach it
    quality_name: str


def race(runs: Sequence[Run]) -> Race | None:
    """Return who comes first, by quality on held-out data, or by training loss; None without two curves."""
    runs = [run for run in runs if run.lines]
    by_quality = all(run.outcome and np.isfinite(run.column("quality")).sum() >= _MIN_EVALUATIONS for run in runs)
    sign = -1.0 if by_quality and runs and runs[0].quality[1] == "higher" else 1.0
    ways: list[tuple[Run, Array, Array]] = []  # seconds, and loss or negative quality
    for run in runs:
        if by_quality:
            quality = run.column("quality")
            known = np.isfinite(quality)
            ways.append((run, run.elapsed[known], sign * quality[known]))
        else:
            elapsed, _, middle, _ = points(run.elapsed, run.column("loss"))
            ways.append((run, elapsed, middle))
    sound = [way for way in ways if np.isfinite(way[2][[0, -1]]).all()]
    if len(sound) < 2:
        return None
    reference, _, values = next((way for way in sound if way[0].is_dense), min(sound, key=lambda way: way[2][-1]))
    last = float(np.median(values[-max(1, values.size // 10) :]))
    level = values[0] + _WAY_FRACTION * (last - values[0])
    taken = []
    for run, elapsed, values in ways:
        reached = np.flatnonzero(values <= level)
        taken.append((run, float(elapsed[reached[0]]) if reached.size else math.inf))
    taken.sort(key=lambda pair: pair[1])
    return Race(reference, sign * level, taken, runs[0].quality[0] if by_quality else "training loss")


def _race(runs: Sequence[Run]) -> str | None:
    found = race(runs)
    if found is None or math.isinf(found.seconds[0][1]):
        return None
    first, best = found.seconds[0]
    parts = [
        f"{first.name} comes first: it reaches a {found.quality_name} of {digits(found.level)} after {seconds(best)}, "
        f"{100 * _WAY_FRACTION:.0f} % of the way that {found.reference.name} went"
    ]
    for run, taken in found.seconds[1:]:
        if math.isfinite(taken):
            longer = f", {times(taken / best)} as long" if taken > 1.05 * best else ""
            parts.append(f"{run.name} needs {seconds(taken)}{longer}")
    never = [run.name for run, taken in found.seconds if math.isinf(taken)]
    if never:
        parts.append(f"{listed(never)} {'do' if len(never) > 1 else 'does'} not reach it")
    return "; ".join(parts) + "."


def _final_quality(runs: Sequence[Run]) -> str | None:
    values = {run.name: run.outcome.quality["value"] for run in runs if run.outcome}
    if len(values) < 2:
        return None
    name, better = next(run.quality for run in runs if run.outcome)
    sign = -1 if better == "higher" else 1
    order = sorted(values, key=lambda run: (not math.isfinite(values[run]), sign * values[run]))
    reached = listed([f"{run} {digits(values[run])}" for run in order])
    return f"{name[:1].upper()}{name[1:]} in the end, {better} is better: {reached}."


def _differences(runs: Sequence[Run]) -> str:
    differ = []
    for key in ("ranks", "shard", "hosts", "steps", "seed", "exchange", "lr_scale"):
        values = {run.name: getattr(run.outcome, key) for run in runs if run.outcome}
        if len(set(map(str, values.values()))) > 1:
            differ.append(f"{key} ({', '.join(f'{name} {value}' for name, value in values.items())})")
    note = "One run of each: only runs of other seeds show differences by chance."
    return f"The runs differ in {listed(differ)}, too. {note}" if differ else note
