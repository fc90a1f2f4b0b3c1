"""Sections on seconds: phases of a step, predicted and measured exchanges, and the slowest rank."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from mpicomp.bench.report import draw
from mpicomp.bench.report.runs import PHASES, Run
from mpicomp.bench.report.section_parts import (
    Array,
    Curve,
    Picture,
    Section,
    Table,
    digits,
    percent,
    seconds,
    step_number,
)

_MEANINGS = {
    "compute": "forward and backward",
    "compress": "gradient to message",
    "exchange": "in the network, waiting for slower ranks included",
    "decode": "messages to mean",
    "update": "the optimizer",
    "other": "copies, residuals, choosing plans",
}
_MAX_RANKS = 16  # bars of a picture
_BUSY = [name for name in PHASES if name != "exchange"]
_EXCHANGE = PHASES.index("exchange")


def phases(runs: Sequence[Run]) -> Section:
    """Return bars of all runs' median steps, and the phases of each run with --metrics over its steps."""
    pictures = [_median_steps(runs)] + [_phases_over_steps(run) for run in runs if run.recorded]
    points = []
    for run in runs:
        longest = max(PHASES, key=lambda name: run.phases_s[name])
        points.append(
            f"{run.titled('a step takes')} {seconds(run.step_s)}, most of it {longest} "
            f"({seconds(run.phases_s[longest])}); exchange is {percent(run.phases_s['exchange'] / run.step_s)}."
        )
    return Section("seconds", "Where a step's time goes", "", pictures, points, _MEANINGS)


def _stack(axes: Axes, row: int, phases_s: Mapping[str, float], order: Sequence[str] = PHASES) -> float:
    end = 0.0
    for phase in order:
        axes.barh(row, phases_s[phase], left=end, height=0.62, color=draw.LIGHT[phase], edgecolor="none")
        end += phases_s[phase]
    return end


def _median_steps(runs: Sequence[Run]) -> Picture:
    dense = runs[0].outcome.get("dense_step_s") if len(runs) == 1 and runs[0].outcome else None
    height = 76 + 34 * (len(runs) + (dense is not None))
    figure, axes = draw.panel("seconds a step", "", left=112, right=70, height=height, grid="x")
    names = ["this run" if run.is_single else run.name for run in runs]
    rows = []
    for row, run in enumerate(runs):
        draw.label_bar(axes, _stack(axes, row, run.phases_s), row, seconds(run.step_s))
        rows.append([names[row], seconds(run.step_s), *(seconds(run.phases_s[phase]) for phase in PHASES)])
    outline = ""
    if dense is not None:
        outline = " Dashed: what a step would take with the fastest dense exchange."
        axes.barh(1, dense, height=0.62, color="none", edgecolor=draw.LIGHT["soft"], linewidth=1, linestyle="--")
        draw.label_bar(axes, dense, 1, seconds(dense), bold=False)
        names.append("dense, estimate")
    draw.bars(axes, names)
    parts = "; ".join(f"{row[0]}: {row[1]}, of which exchange {row[2 + _EXCHANGE]}" for row in rows)
    is_slowest = all(run.outcome for run in runs)
    ranks = "of the rank that was slowest in each step" if is_slowest else "of rank 0 where there is no --json"
    return Picture(
        "step-by-phase",
        "A step by phase",
        f"Median seconds of a step. {parts}.",
        figure,
        f"Medians over steps, {ranks}; medians of parts need not add up to that of the whole.{outline}",
        Table(["run", "a step", *PHASES], rows),
    )


def _phases_over_steps(run: Run) -> Picture:
    lines, bins = run.lines, run.bins
    means = np.nan_to_num(bins.reduce("mean", lines.phases)).T
    x = bins.last(lines.step)
    figure, axes = draw.panel("step", "seconds a step, by phase", left=58)
    colours = [draw.LIGHT[phase] for phase in PHASES]
    axes.stackplot(x, means, colors=colours, linewidth=0, baseline="zero", antialiased=False)
    whole = means.sum(axis=0)
    steady = whole[np.searchsorted(bins.edges[:-1], run.start) :]
    top = 1.25 * float(np.percentile(steady if steady.size else whole, 95))
    over = whole > top
    axes.set_ylim(0, top or 1)
    axes.set_xlim(x[0], x[-1] if x.size > 1 else x[0] + 1)
    draw.format_axis(axes, "y", seconds)
    tenth = max(1, x.size // 10)
    first, last = means[:, :tenth].mean(axis=1), means[:, -tenth:].mean(axis=1)
    beyond = f" {over.sum()} of {over.size} points reach beyond the axis, the highest to {seconds(float(whole.max()))}."
    columns = [x, *means, bins.reduce("min", lines.seconds), bins.reduce("max", lines.seconds)]
    return Picture(
        f"phases-{run.name}",
        run.titled("phases over steps"),
        f"In the first tenth of the run a step took {seconds(first.sum())} in the mean, {seconds(first[_EXCHANGE])} of "
        f"it exchange; in the last tenth {seconds(last.sum())}, {seconds(last[_EXCHANGE])} of it exchange.",
        figure,
        f"Rank 0. {bins.caption()}, as means, since these add up.{beyond if over.any() else ''}",
        Table(
            ["step", *PHASES, "least step", "greatest step"],
            [[step_number(step), *map(seconds, values)] for step, *values in zip(*columns, strict=True)],
        ),
    )


def predicted(runs: Sequence[Run]) -> Section | None:
    """Return a picture of every run that has predictions; None without one."""
    runs = [run for run in runs if run.recorded and np.isfinite(run.lines.predicted).any()]
    if not runs:
        return None
    points = [
        f"{run.titled('measured over predicted is')} {digits(float(np.median(_error_factors(run))), 2)} in the median."
        for run in runs
    ]
    words = (
        "What the cost model expected of compress, exchange and decode. Measured seconds are rank 0's and hold its "
        "waiting for slower ranks, of which the model knows nothing."
    )
    return Section("predicted", "Predicted and measured seconds", words, [_prediction(run) for run in runs], points)


def _error_factors(run: Run) -> Array:
    """Return measured over predicted seconds of each step; one NaN where none is known."""
    lines = run.lines
    known = np.isfinite(lines.predicted) & (lines.predicted > 0)
    known[: run.start] &= not known[run.start :].any()  # the first steps compile
    return lines.measured[known] / lines.predicted[known] if known.any() else np.array([np.nan])


def _prediction(run: Run) -> Picture:
    lines, bins = run.lines, run.bins
    figure, axes = draw.panel("step", "seconds of a step's exchanges", left=58, right=88)
    measured, expected = (Curve.of(bins, lines.step, values) for values in (lines.measured, lines.predicted))
    draw.plot(axes, measured, "run1")
    draw.plot(axes, expected, "run0", dashes=(0, (4, 1.5)))
    both = np.concatenate([measured.known, expected.known])
    both = both[both > 0]
    if both.size:
        axes.set_yscale("log")
        axes.set_ylim(both.min() / 2, both.max() * 2)
        draw.log_axis(axes, "y")
        draw.format_axis(axes, "y", seconds)
    axes.set_xlim(left=0)
    ends = [(float(measured.known[-1]), "measured", "run1"), (float(expected.known[-1]), "predicted", "run0")]
    draw.label_ends(axes, ends)
    factors = _error_factors(run)
    near = float(np.mean((factors > 0.5) & (factors < 2)))
    columns = measured.x, measured.middle, expected.middle, measured.low, measured.high
    spread = ": lines, medians; bands, least to greatest, cut by the axis"
    return Picture(
        f"predicted-{run.name}",
        run.titled("predicted and measured"),
        f"Measured over predicted: median {digits(float(np.median(factors)), 2)}; within a factor of 2 in "
        f"{percent(near)} of {factors.size} steps.",
        figure,
        f"Sum over the buckets that have a prediction. {bins.caption(spread=spread)}. Logarithmic.",
        Table(
            ["step", "measured", "predicted", "measured, least", "measured, greatest"],
            [[step_number(step), *map(seconds, values)] for step, *values in zip(*columns, strict=True)],
        ),
    )


def ranks(runs: Sequence[Run]) -> Section | None:
    """Return a picture of every run whose --json has more than one rank; None without one."""
    runs = [run for run in runs if len(_by_rank(run)) > 1]
    if not runs:
        return None
    points = []
    for run in runs:
        slow = max(_by_rank(run), key=lambda rank: rank["slowest"])
        by_chance = slow["slowest"] < 1.25 / len(_by_rank(run))
        words = "about as often as chance would have it" if by_chance else "so it holds the others up"
        points.append(f"{run.titled('rank')} {slow['rank']} in {percent(slow['slowest'])} of the steps, {words}.")
    words = (
        "All ranks end a step at the same time. The slowest is the one that is busy longest outside the exchange; the "
        "others wait for it there."
    )
    return Section("ranks", "The slowest rank", words, [_busy_ranks(run) for run in runs], points)


def _by_rank(run: Run) -> list[dict[str, Any]]:
    return list((run.outcome or {}).get("by_rank", []))


def _busy_s(rank: Mapping[str, Any]) -> float:
    return float(sum(rank["phases_s"][name] for name in _BUSY))


def _busy_ranks(run: Run) -> Picture:
    ranks = sorted(_by_rank(run), key=_busy_s, reverse=True)
    shown = ranks[:_MAX_RANKS]
    figure, axes = draw.panel("seconds of a step", "", left=66, right=58, height=76 + 26 * len(shown), grid="x")
    for row, rank in enumerate(shown):
        draw.label_bar(axes, _stack(axes, row, rank["phases_s"], [*_BUSY, "exchange"]), row, percent(rank["slowest"]))
    draw.bars(axes, [f"rank {rank['rank']}" for rank in shown])
    slow, quick = ranks[0], ranks[-1]
    left_out = f" The {_MAX_RANKS} busiest of {len(ranks)} ranks." if len(ranks) > _MAX_RANKS else ""
    phases_s = [[seconds(rank["phases_s"][name]) for name in PHASES] for rank in ranks]
    return Picture(
        f"ranks-{run.name}",
        run.titled("ranks"),
        f"Rank {slow['rank']} is busy for {seconds(_busy_s(slow))} a step outside the exchange, rank {quick['rank']} "
        f"for {seconds(_busy_s(quick))}.",
        figure,
        "Medians over steps. Exchange, with the waiting in it, comes last; behind each bar the share of steps in which "
        f"the rank was the slowest.{left_out}",
        Table(
            ["rank", "slowest in", "busy", *PHASES],
            [
                [str(rank["rank"]), f"{100 * rank['slowest']:.1f} %", seconds(_busy_s(rank)), *cells]
                for rank, cells in zip(ranks, phases_s, strict=True)
            ],
        ),
    )
