"""Seconds of exchanges as predicted by the cost model, against those that were measured."""

from collections.abc import Sequence

import numpy as np
from mpicomp.bench.report import draw
from mpicomp.bench.report.bins import put_together
from mpicomp.bench.report.lines import Array
from mpicomp.bench.report.palette import LIGHT
from mpicomp.bench.report.picture import Picture, Section, Table
from mpicomp.bench.report.runs import Run
from mpicomp.bench.report.words import digits, seconds


def section(runs: Sequence[Run]) -> Section | None:
    """Return a picture of every run that has predictions; None where none has."""
    runs = [run for run in runs if run.lines is not None and np.isfinite(run.lines.predicted).any()]
    if not runs:
        return None
    said = [
        f"{run.titled('measured over predicted is')} {digits(float(np.median(_ratio(run))), 2)} in the median."
        for run in runs
    ]
    words = (
        "What the cost model expected of compress, exchange and decode. Measured seconds are rank 0's and hold its "
        "waiting for slower ranks, of which the model knows nothing."
    )
    return Section("predicted", "Predicted and measured seconds", words, [_picture(run) for run in runs], points=said)


def _ratio(run: Run) -> Array:
    lines = run.lines
    assert lines is not None
    known = np.isfinite(lines.predicted) & (lines.predicted > 0)
    known[: run.start] &= not known[run.start :].any()  # the first steps compile
    ratio: Array = lines.measured[known] / lines.predicted[known]
    return ratio if ratio.size else np.array([np.nan])


def _picture(run: Run) -> Picture:
    lines = run.lines
    assert lines is not None
    bins = put_together(lines.step.size)
    x = bins.last(lines.step)
    figure, axes = draw.panel("step", "seconds of a step's exchanges", left=58, right=88)
    rows, labels = [], []
    found = {}
    for name, token, values in (("measured", "run1", lines.measured), ("predicted", "run0", lines.predicted)):
        low, middle, high = (bins.each(of, values) for of in ("min", "median", "max"))
        found[name] = middle
        axes.fill_between(x, low, high, color=LIGHT[token], alpha=0.16, linewidth=0)
        axes.plot(x, middle, color=LIGHT[token], linewidth=1.8, linestyle="-" if name == "measured" else (0, (4, 1.5)))
        known = middle[np.isfinite(middle)]
        labels.append((float(known[-1]) if known.size else 1.0, name, token))
        rows.append((low, middle, high))
    both = np.concatenate([found["measured"], found["predicted"]])
    both = both[np.isfinite(both) & (both > 0)]
    if both.size:
        axes.set_yscale("log")
        axes.set_ylim(both.min() / 2, both.max() * 2)
        draw.plain_log("y", axes)
        draw.formatted("y", axes, draw.in_seconds)
    axes.set_xlim(left=0)
    draw.label_ends(axes, labels)
    ratio = _ratio(run)
    near = float(np.mean((ratio > 0.5) & (ratio < 2)))
    spread = "" if bins.largest == 1 else ": lines, medians; bands, least to greatest, cut by the axis"
    return Picture(
        f"predicted-{run.name}",
        run.titled("predicted and measured"),
        f"Measured over predicted: median {digits(float(np.median(ratio)), 2)}; within a factor of 2 in "
        f"{100 * near:.0f} % of {ratio.size} steps.",
        figure,
        f"Sum over the buckets that have a prediction; {bins.in_words()}{spread}. Logarithmic.",
        Table(
            ["step", "measured", "predicted", "measured, least", "measured, greatest"],
            [
                [digits(at, 7), seconds(own), seconds(told), seconds(low), seconds(high)]
                for at, own, told, low, high in zip(x, rows[0][1], rows[1][1], rows[0][0], rows[0][2], strict=True)
            ],
        ),
    )
