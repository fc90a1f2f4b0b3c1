"""The four plots of a report, each with its finding in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from mpicomp.bench.measure.run_fields import PHASES
from mpicomp.bench.report.numbers import amount, digits, listed, seconds, times
from mpicomp.bench.report.runs import Array, Run

from mpicomp.errors import FileWriteError

_MAX_POINTS = 100  # of a curve
_STEPS_PER_POINT = 5  # at least, where there are many more steps
_MAX_PLANS = 8  # colors of a plot of plans
_LOG_RATIO = 20  # largest over smallest median loss above which the axis is logarithmic
_WIDTH = 8.0  # inches

# Okabe and Ito's colors, which people with any of the three weaknesses of color vision can tell apart.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
_PHASE_COLORS = ("#5b5d74", "#cb7d1b", "#2357af", "#2d9464", "#a174b7", "#b3bcbf")

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.prop_cycle": cycler(color=_COLORS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#d5d9df",
    "legend.frameon": False,
    "svg.hashsalt": "mpicomp",
}


@dataclass
class Picture:
    """A plot, and its content in words."""

    name: str
    title: str
    finding: str
    figure: Figure


def points(x: Array, values: Array) -> Array:
    """Return the last x, and the least, median and greatest value, of each group of neighboring steps.

    There are at most `_MAX_POINTS` groups. NaN values are left out; a group of nothing else is NaN.
    """
    many = values.size >= 8 * _STEPS_PER_POINT
    count = min(_MAX_POINTS, values.size // _STEPS_PER_POINT) if many else values.size
    rows = []
    for end, group in zip(np.array_split(x, count), np.array_split(values, count), strict=True):
        known = group[np.isfinite(group)]
        rows.append([end[-1], *(np.quantile(known, [0, 0.5, 1]) if known.size else [np.nan] * 3)])
    return np.array(rows).T


def loss(runs: Sequence[Run]) -> Picture | None:
    """Return training loss over seconds, and held-out quality where it was measured in between."""
    curves = {run.name: points(run.elapsed, run.column("loss")) for run in runs if run.lines}
    curves = {name: curve for name, curve in curves.items() if np.isfinite(curve[2]).any()}
    if not curves:
        return None
    evaluated = [run for run in runs if np.isfinite(run.column("quality")).sum() > 1]
    figure = Figure(figsize=(_WIDTH, 3.4), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, 1 + bool(evaluated), squeeze=False)[0]
    ends = []
    for name, (elapsed, low, middle, high) in curves.items():
        [line] = panels[0].plot(elapsed, middle, label=name, marker="o" if middle.size == 1 else None)
        panels[0].fill_between(elapsed, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        known = middle[np.isfinite(middle)]
        last = f"{digits(middle[-1])} after {seconds(float(elapsed[-1]))}"
        ends.append(f"{name} from {digits(known[0])} to {last}")
    medians = np.concatenate([curve[2][np.isfinite(curve[2])] for curve in curves.values()])
    low, high = float(medians.min()), float(medians.max())
    if 0 < low < high / _LOG_RATIO:
        panels[0].set_yscale("log")
        panels[0].set_ylim(low / 1.5, high * 1.5)
    else:
        margin = 0.1 * (high - low) or 1.0
        panels[0].set_ylim(low - margin, high + margin)
    for run in evaluated:
        quality = run.column("quality")
        known = np.isfinite(quality)
        panels[1].plot(run.elapsed[known], quality[known], label=run.name, marker="o", markersize=3)
        panels[1].set_ylabel(run.quality[0] if run.outcome else "held-out quality")
    panels[0].set_ylabel("training loss")
    for axes in panels:
        axes.set_xlabel("seconds of training")
        axes.set_xlim(left=0)
        if len(runs) > 1:
            axes.legend()
    return Picture(
        "loss",
        "Loss over seconds",
        f"Training loss: {'; '.join(ends)}. Lines are medians of up to {_MAX_POINTS} groups of steps, bands their "
        "least to greatest value. The first steps, which compile and measure the network, count as the median step.",
        figure,
    )


def phases(runs: Sequence[Run]) -> Picture:
    """Return the median seconds of a step by phase."""
    names = [run.name for run in runs]
    dense_s = runs[0].outcome.dense_step_s if len(runs) == 1 and runs[0].outcome else None
    figure, axes = _bars([*names, *(["dense, estimate"] if dense_s else [])])
    left = np.zeros(len(runs))
    for phase, color in zip(PHASES, _PHASE_COLORS, strict=True):
        widths = np.array([run.phases_s[phase] for run in runs])
        axes.barh(range(len(runs)), widths, left=left, color=color, label=phase)
        left += widths
    if dense_s:
        axes.barh(len(runs), dense_s, color="none", edgecolor="#59616b", linestyle="--")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value) if value else "0"))
    figure.legend(loc="outside upper center", ncols=len(PHASES))
    shares = [
        f"{run.name} {seconds(run.step_s)}, of which exchange {seconds(run.phases_s['exchange'])}" for run in runs
    ]
    ranks = "the slowest rank" if all(run.outcome for run in runs) else "rank 0 where there is no --json"
    more = f"; with the fastest dense exchange about {seconds(dense_s)}" if dense_s else ""
    return Picture(
        "step",
        "Seconds of a step by phase",
        f"Median seconds of a step: {'; '.join(shares)}{more}. Medians over steps, of {ranks}; exchange holds the "
        "waiting for other ranks.",
        figure,
    )


def sent_bytes(runs: Sequence[Run]) -> Picture:
    """Return the bytes that left a rank in a step, and those of a dense ring."""
    sent = [run.bytes_per_step[0] for run in runs]
    dense = max(run.bytes_per_step[1] for run in runs)
    figure, axes = _bars([*(run.name for run in runs), "dense ring"])
    bars = axes.barh(range(len(runs) + 1), [*sent, dense], color=[*_COLORS[: len(runs)], "#c3c9cf"])
    axes.bar_label(bars, [f" {amount(value)}" for value in (*sent, dense)])
    axes.margins(x=0.15)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value) if value else "0"))
    parts = [
        f"{run.name} {amount(value)}" + (f", {times(dense / value)} fewer" if 0 < value < dense else "")
        for run, value in zip(runs, sent, strict=True)
    ]
    finding = f"{'; '.join(parts)}. A dense ring would send {amount(dense)}."
    return Picture("bytes", "Bytes that leave a rank in a step", finding, figure)


def chosen(runs: Sequence[Run]) -> Picture | None:
    """Return the share of each plan over steps of the runs whose plans changed; None where none did."""
    changing = [run for run in runs if len(run.shares) > 1]
    if not changing:
        return None
    figure = Figure(figsize=(_WIDTH, 2.6 * len(changing)), layout="constrained")
    for axes, run in zip(figure.subplots(len(changing), 1, squeeze=False)[:, 0], changing, strict=True):
        shares = list(run.shares.items())
        if len(shares) > _MAX_PLANS:
            rest: Array = np.sum([share for _, share in shares[_MAX_PLANS - 1 :]], axis=0)
            shares = [*shares[: _MAX_PLANS - 1], (f"{len(shares) - _MAX_PLANS + 1} others", rest)]
        # A plan lasts until the next step begins.
        ends = np.append(run.column("step"), run.lines[-1].step + 1)
        heights = [np.append(share, share[-1]) for _, share in shares]
        axes.stackplot(ends, heights, labels=[name for name, _ in shares], step="post", linewidth=0)
        axes.set_xlim(ends[0], ends[-1])
        axes.set_ylim(0, 1)
        axes.set_xlabel("step")
        axes.set_ylabel("share of elements")
        axes.set_title(run.name, loc="left", fontsize=10)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5))  # in the stack's order
    return Picture("chosen", "Chosen plans", f"{plans_in_words(runs)} Steps without exchange are empty.", figure)


def plans_in_words(runs: Sequence[Run]) -> str:
    """Return the largest plans of each run, with their shares of the elements exchanged."""
    sentences = []
    for run in runs:
        parts = [f"{name} {100 * share:.0f} %" for name, share in run.plans.most_common() if share >= 0.005]
        more = [f"{len(parts) - 3} more plans"] if len(parts) > 4 else parts[3:]
        sentences.append(f"{run.name}, of the elements exchanged: {listed([*parts[:3], *more]) if parts else 'none'}.")
    return " ".join(sentences)


def _bars(names: Sequence[str]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, 1.2 + 0.4 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure, axes


def draw_plans(plans: dict[str, dict[str, Any]], path: str) -> None:
    """Draw bars of the throughput that each exchange leaves, a group a network, in the format that a path ends in."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(6.0, 2.5 * len(plans)), 4.0), layout="constrained")
        axes = figure.subplots()
        rows = [found["rows"][1:] for found in plans.values()]  # without that of no exchange
        width = 0.8 / len(rows[0])
        for index, of_exchange in enumerate(zip(*rows, strict=True)):
            places = [place + width * (index - (len(rows[0]) - 1) / 2) for place in range(len(plans))]
            axes.bar(places, [row["throughput"] for row in of_exchange], width, label=of_exchange[0]["exchange"])
        axes.set_xticks(range(len(plans)), [label.replace(", ", "\n") for label in plans])
        axes.set_ylabel("throughput, share of that without exchange")
        axes.set_ylim(0, 1.05)
        figure.legend(loc="outside upper center", ncols=4)
        try:
            figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
        except (OSError, ValueError) as error:
            raise FileWriteError(f"plan: '{path}' cannot be written: {error}") from error
