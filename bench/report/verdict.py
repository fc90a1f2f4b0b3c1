"""The verdict on one run, or on several compared, in words; it counts quality, not seconds alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from mpicomp.bench.report.lines import Array
from mpicomp.bench.report.loss import smooth_loss
from mpicomp.bench.report.runs import Run
from mpicomp.bench.report.words import amount, digits, listed, seconds, times

_WAY = 0.95  # share of the way that the reference went, which the others are timed over
_LOOKS = 5  # at held-out data, from which on these are compared and not the training loss


def verdict(runs: Sequence[Run]) -> list[str]:
    """Return sentences, the most important one first."""
    if len(runs) == 1:
        return _of_one(runs[0])
    said = [_race(runs), _in_the_end(runs), _costs(runs), _settings(runs)]
    return [sentence for sentence in said if sentence]


def _of_one(run: Run) -> list[str]:
    if run.outcome is not None:
        return [f"{part[0].upper()}{part[1:]}." for part in str(run.outcome["verdict"]).split("; ", 1)]
    own, dense = run.bytes_a_step
    return [
        f"A step took {seconds(run.step_s)} on rank 0, and {amount(own)} left it"
        + (f", {times(dense / own)} fewer than with a dense ring." if own else "."),
        "Whether that paid is in the file of train --json, which was not named.",
    ]


@dataclass
class _Way:
    """What a run reached, as what is better the lower it is, and when."""

    run: Run
    values: Array
    elapsed: Array

    def reaches(self, level: float) -> float:
        """Return the seconds after which it is there; infinity where it is not."""
        there = np.flatnonzero(self.values <= level)
        return float(self.elapsed[there[0]]) if there.size else math.inf


def _race(runs: Sequence[Run]) -> str | None:
    """Tell who comes first to what the reference reached: the dense run, else the one that ends best."""
    traced = [run for run in runs if run.lines is not None]
    if len(traced) < 2:
        return None
    looked = all(run.outcome and np.isfinite(run.lines.quality).sum() >= _LOOKS for run in traced if run.lines)
    sign = -1.0 if looked and traced[0].quality()[1] == "higher" else 1.0
    ways = []
    for run in traced:
        assert run.lines is not None
        if looked:
            seen = np.isfinite(run.lines.quality)
            ways.append(_Way(run, sign * run.lines.quality[seen], run.elapsed[seen]))
        else:
            ways.append(_Way(run, *smooth_loss(run)))
    sound = [way for way in ways if np.isfinite(way.values[[0, -1]]).all()]
    if len(sound) < 2:
        return None
    reference = next((way for way in sound if way.run.is_dense), min(sound, key=lambda way: way.values[-1]))
    first, last = reference.values[0], float(np.median(reference.values[-max(1, reference.values.size // 10) :]))
    level = first + _WAY * (last - first)
    what = traced[0].quality()[0] if looked else "training loss"
    order = sorted(ways, key=lambda way: way.reaches(level))
    best = order[0].reaches(level)
    if math.isinf(best):
        return None
    said = [
        f"{order[0].run.name} comes first: it reaches a {what} of {digits(sign * level)} after {seconds(best)}, "
        f"{100 * _WAY:.0f} % of the way that {reference.run.name} went"
    ]
    for way in order[1:]:
        own = way.reaches(level)
        if math.isfinite(own):
            longer = f", {times(own / best)} as long" if own > 1.05 * best else ""
            said.append(f"{way.run.name} needs {seconds(own)}{longer}")
    never = [way.run.name for way in order if math.isinf(way.reaches(level))]
    if never:
        said.append(f"{listed(never)} {'do' if len(never) > 1 else 'does'} not reach it")
    return "; ".join(said) + "."


def _in_the_end(runs: Sequence[Run]) -> str | None:
    """Compare the quality that was reached."""
    told = [run for run in runs if run.outcome is not None]
    if len(told) < 2:
        return None
    name, better = told[0].quality()
    values = {run.name: float(run.outcome["quality"]["value"]) for run in told if run.outcome}
    sign = -1 if better == "higher" else 1
    order = sorted(values, key=lambda one: (not math.isfinite(values[one]), sign * values[one]))
    reached = listed([f"{one} {digits(values[one])}" for one in order])
    return f"{name[0].upper()}{name[1:]} in the end, {better} is better: {reached}."


def _costs(runs: Sequence[Run]) -> str:
    """Compare seconds and bytes of a step."""
    order = sorted(runs, key=lambda run: run.step_s)
    parts = [f"{run.name} {seconds(run.step_s)} and {amount(run.bytes_a_step[0])}" for run in order]
    return f"A step takes, and sends from a rank: {listed(parts)}."


def _settings(runs: Sequence[Run]) -> str:
    """Say what differs besides what is compared, and how much one run of each can tell."""
    differ = []
    for key in ("ranks", "hosts", "steps", "seed", "exchange", "lr_scale", "shards"):
        values = {run.name: run.outcome[key] for run in runs if run.outcome and key in run.outcome}
        if len(set(map(str, values.values()))) > 1:
            differ.append(f"{key} ({', '.join(f'{name} {value}' for name, value in values.items())})")
    note = "One run of each: what differs by chance, runs of other seeds would tell."
    return f"The runs differ in {listed(differ)}, too. {note}" if differ else note
