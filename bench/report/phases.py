"""Where the seconds of a step go."""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator
from mpicomp.bench.report import draw
from mpicomp.bench.report.bins import put_together
from mpicomp.bench.report.lines import PHASES
from mpicomp.bench.report.palette import LIGHT
from mpicomp.bench.report.picture import Picture, Section, Table
from mpicomp.bench.report.runs import Run
from mpicomp.bench.report.words import digits, seconds

_MEANS = {
    "compute": "forward and backward",
    "compress": "gradient to message",
    "exchange": "in the network, waiting for slower ranks included",
    "decode": "messages to mean",
    "update": "the optimizer",
    "other": "copies, residuals, choosing plans",
}


def section(runs: Sequence[Run]) -> Section:
    """Return bars of all runs' median steps, and for each run with --metrics the parts of its steps over time."""
    pictures = [_bars(runs)] + [_areas(run) for run in runs if run.lines is not None]
    said = []
    for run in runs:
        most = max(PHASES, key=lambda name: run.phases_s[name])
        share = run.phases_s["exchange"] / run.step_s
        said.append(
            f"{run.titled('a step takes')} {seconds(run.step_s)}, most of it {most} ({seconds(run.phases_s[most])}); "
            f"exchange is {100 * share:.0f} %."
        )
    return Section(
        "seconds", "Where a step's time goes", "", pictures, [(n, f"{n}: {m}") for n, m in _MEANS.items()], said
    )


def _bars(runs: Sequence[Run]) -> Picture:
    bars = [("this run" if run.alone else run.name, run.step_s, run.phases_s) for run in runs]
    dense = runs[0].outcome.get("dense_step_s") if len(runs) == 1 and runs[0].outcome else None
    figure, axes = draw.panel(
        "seconds a step", "", left=112, right=70, height=76 + 34 * (len(bars) + (dense is not None)), grid="x"
    )
    for place, (_, whole, phases) in enumerate(bars):
        at = 0.0
        for phase in PHASES:
            axes.barh(place, phases[phase], left=at, height=0.62, color=LIGHT[phase], edgecolor="none")
            at += phases[phase]
        draw.beside(axes, at, place, seconds(whole))
    names = [name for name, _, _ in bars]
    if dense is not None:
        axes.barh(len(bars), dense, height=0.62, color="none", edgecolor=LIGHT["soft"], linewidth=1, linestyle="--")
        draw.beside(axes, dense, len(bars), seconds(dense), bold=False)
        names.append("dense, estimate")
    axes.set_yticks(range(len(names)), [draw.shortened(name, 15) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.spines["bottom"].set_visible(False)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    draw.formatted("x", axes, draw.in_seconds)
    rows = [[name, seconds(whole), *(seconds(phases[phase]) for phase in PHASES)] for name, whole, phases in bars]
    said = "; ".join(f"{row[0]}: {row[1]}, of which exchange {row[2 + PHASES.index('exchange')]}" for row in rows)
    outline = "" if dense is None else " Dashed: what a step would take with the fastest dense exchange."
    ranks = (
        "of the rank that was slowest in each step"
        if all(run.outcome for run in runs)
        else "of rank 0 where there is no --json"
    )
    return Picture(
        "step-by-phase",
        "A step by phase",
        f"Median seconds of a step. {said}.",
        figure,
        f"Medians over steps, {ranks}; medians of parts need not add up to that of the whole.{outline}",
        Table(["run", "a step", *PHASES], rows),
    )


def _areas(run: Run) -> Picture:
    lines = run.lines
    assert lines is not None
    bins = put_together(lines.step.size)
    means = np.nan_to_num(bins.each("mean", lines.phases)).T
    x = bins.last(lines.step)
    figure, axes = draw.panel("step", "seconds a step, by phase", left=58)
    axes.stackplot(x, means, colors=[LIGHT[phase] for phase in PHASES], linewidth=0, baseline="zero", antialiased=False)
    whole = means.sum(axis=0)
    steady = whole[np.searchsorted(bins.edges[:-1], run.start) :]
    top = 1.25 * float(np.percentile(steady if steady.size else whole, 95))
    over = whole > top
    axes.set_ylim(0, top or 1)
    axes.set_xlim(x[0], x[-1] if x.size > 1 else x[0] + 1)
    draw.formatted("y", axes, draw.in_seconds)
    first, last = means[:, : max(1, x.size // 10)].mean(axis=1), means[:, -max(1, x.size // 10) :].mean(axis=1)
    place = PHASES.index("exchange")
    beyond = (
        f" {over.sum()} of {over.size} points reach beyond the axis, the highest to {seconds(float(whole.max()))}."
        if over.any()
        else ""
    )
    least, most = bins.each("min", lines.seconds), bins.each("max", lines.seconds)
    return Picture(
        f"phases-{run.name}",
        run.titled("phases over steps"),
        f"In the first tenth of the run a step took {seconds(first.sum())} in the mean, {seconds(first[place])} of it "
        f"exchange; in the last tenth {seconds(last.sum())}, {seconds(last[place])} of it exchange.",
        figure,
        f"Rank 0; {bins.in_words()}, as means, since these add up.{beyond}",
        Table(
            ["step", *PHASES, "least step", "greatest step"],
            [
                [digits(at, 7), *map(seconds, column), seconds(low), seconds(high)]
                for at, column, low, high in zip(x, means.T, least, most, strict=True)
            ],
        ),
    )
