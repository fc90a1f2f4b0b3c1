"""Sections on learning: loss and quality against steps, seconds and bytes; progress that waits in residuals."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from mpicomp.bench.report import draw
from mpicomp.bench.report.runs import Run
from mpicomp.bench.report.section_parts import (
    Array,
    Curve,
    Picture,
    Section,
    Table,
    amount,
    capital,
    digits,
    seconds,
    step_number,
)

_LOG_RATIO = 20  # greatest over least median loss, from which on the axis is logarithmic
_LOG_BYTES_RATIO = 8  # the same of the runs' bytes


def loss(runs: Sequence[Run]) -> Section | None:
    """Return the pictures of the runs that have recorded a loss; None without one."""
    runs = [run for run in runs if run.recorded and np.isfinite(run.lines.loss).any()]
    if not runs:
        return None
    pictures = [_loss_against(unit, runs) for unit in ("steps", "seconds", "bytes")]
    evaluated = [run for run in runs if np.isfinite(run.lines.quality).sum() > 1]
    if evaluated:
        pictures.append(_quality(evaluated))
    points = []
    for run in runs:
        curve = loss_curve(run)
        start_s = float(run.lines.seconds[: run.start].sum())
        start = f"; its first {run.start} steps took {seconds(start_s)}" if run.start else ""
        ends = f"{digits(curve.middle[0])} to {digits(curve.middle[-1])}"
        points.append(f"{run.titled('from')} {ends} in {seconds(float(run.elapsed[-1]))}{start}.")
    words = "Training loss on rank 0's batch, before each update."
    if any(run.start for run in runs):
        words += " In the seconds, the first steps count as the median step: they compile, and measure the network."
    return Section("loss", "Loss against steps, seconds and bytes", words, pictures, points)


def loss_curve(run: Run, unit: str = "seconds") -> Curve:
    """Return the training loss against steps, seconds or bytes."""
    lines = run.lines
    x = {"steps": lines.step, "seconds": run.elapsed, "bytes": np.cumsum(lines.wire_bytes)}[unit]
    return Curve.of(run.bins, x, lines.loss)


def _loss_against(unit: str, runs: Sequence[Run]) -> Picture:
    x_label = {"steps": "step", "seconds": "seconds of training", "bytes": "bytes that left rank 0"}[unit]
    form = {"steps": digits, "seconds": seconds, "bytes": amount}[unit]
    figure, axes = draw.panel(x_label, "training loss", right=draw.RUN_LABELS if len(runs) > 1 else 18)
    curves = [loss_curve(run, unit) for run in runs]
    rows, ends = [], []
    for number, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        draw.plot(axes, curve, f"run{number}")
        end = f"{run.steps:,} steps" if unit == "steps" else form(float(curve.x[-1]))
        ends.append(f"{run.prefix}{digits(curve.middle[-1])} after {end}")
        rows += curve.rows(form, run.name)
    _limit_loss(axes, curves)
    bytes_sent = [float(run.lines.wire_bytes.sum()) for run in runs]
    if unit == "bytes" and 0 < _LOG_BYTES_RATIO * min(bytes_sent) < max(bytes_sent):  # one from 0 would hide some
        draw.log_axis(axes, "x")
    else:
        axes.set_xlim(left=0)
    if unit != "steps":
        draw.format_axis(axes, "x", form)
    if len(runs) > 1:
        labels = [(float(np.nan_to_num(curve.known[-1])), run.name) for run, curve in zip(runs, curves, strict=True)]
        draw.label_ends(axes, [(*label, f"run{number}") for number, label in enumerate(labels)])
    spread = ": line, their median; band, their least to their greatest loss, cut by the axis"
    return Picture(
        f"loss-{unit}",
        f"Loss against {unit}",
        f"Training loss at the end: {'; '.join(ends)}.",
        figure,
        f"{runs[0].bins.caption(spread=spread)}.",
        Table(["run", unit, "least", "median", "greatest"], rows),
    )


def _limit_loss(axes: Axes, curves: Sequence[Curve]) -> None:
    """Scale the axis to hold all medians; logarithmic if an axis from 0 would hide some."""
    medians = _finite([curve.middle for curve in curves])
    if medians.size == 0:
        return
    low, high = float(medians.min()), float(medians.max())
    if 0 < low < high / _LOG_RATIO:
        least = float(_finite([curve.low for curve in curves]).min())
        axes.set_yscale("log")
        axes.set_ylim(max(least, low / 4) / 1.2, high * 1.3)
        draw.log_axis(axes, "y")
    else:
        axes.set_ylim(0 if 0 <= low < 0.5 * high else low - 0.1 * (high - low), high + 0.08 * (high - low) + 1e-12)


def _finite(arrays: Sequence[Array]) -> Array:
    values = np.concatenate(arrays)
    return values[np.isfinite(values)]


def _quality(runs: Sequence[Run]) -> Picture:
    name, better = runs[0].quality if runs[0].outcome else ("held-out quality", "")
    figure, axes = draw.panel("seconds of training", name, right=draw.RUN_LABELS if len(runs) > 1 else 18)
    labels, rows, ends = [], [], []
    for number, run in enumerate(runs):
        seen = np.isfinite(run.lines.quality)
        x, y = run.elapsed[seen], run.lines.quality[seen]
        token = f"run{number}"
        style = draw.DASHES.get(token, "-")
        axes.plot(x, y, color=draw.LIGHT[token], linewidth=1.8, linestyle=style, marker="o", markersize=3)
        labels.append((float(y[-1]), run.name, token))
        ends.append(f"{run.prefix}{digits(y[-1])} after {seconds(float(x[-1]))}")
        points = zip(run.lines.step[seen], x, y, strict=True)
        rows += [[run.name, f"{step:.0f}", seconds(at), digits(value)] for step, at, value in points]
    axes.set_xlim(left=0)
    draw.format_axis(axes, "x", seconds)
    if len(runs) > 1:
        draw.label_ends(axes, labels)
    note = f"Each point is a look at held-out data; {better} is better." if better else "Looks at held-out data."
    return Picture(
        "quality-seconds",
        f"{capital(name)} against seconds",
        f"{capital(name)} at the last look: {'; '.join(ends)}.",
        figure,
        f"{note} Looking is not in the seconds.",
        Table(["run", "step", "seconds", name], rows),
    )


def steps_behind(runs: Sequence[Run]) -> Section | None:
    """Return the picture of progress that waits in residuals; None where nothing is known of any run."""
    drawn, points = [], []
    for number, run in enumerate(runs):
        delay = None if run.outcome is None else run.outcome.get("delay")
        if run.outcome is not None and delay is None:
            points.append(f"{run.titled('no error feedback')}: what is left out does not come later.")
            continue
        if run.recorded and np.isfinite(run.lines.delay).any():
            late = run.lines.delay[run.lines.step.size // 2 :]
            if delay is None:
                delay = float(np.nanmedian(late)) if np.isfinite(late).any() else np.nan
            drawn.append((f"run{number}", run))
        if delay is not None:
            steps = "no step" if delay == 0 else f"{digits(delay, 2)} steps"
            points.append(f"{run.titled('in the second half')} {steps} behind.")
    if not points:
        return None
    words = "Error feedback keeps in residuals what is not sent, and sends it later."
    return Section("behind", "How far behind", words, [_delay(drawn)] if drawn else [], points)


def _delay(drawn: Sequence[tuple[str, Run]]) -> Picture:
    figure, axes = draw.panel("step", "steps behind", right=draw.RUN_LABELS if len(drawn) > 1 else 18)
    labels, rows, values, highest = [], [], [], 0.0
    for token, run in drawn:
        curve = Curve.of(run.bins, run.lines.step, run.lines.delay)
        draw.plot(axes, curve, token)
        known = curve.known
        labels.append((float(known[-1]), run.name, token))
        highest = max(highest, float(known.max()))
        ends = f"{digits(known[0])} at first, {digits(known[-1])} at last"
        values.append(f"{run.prefix}{ends}, {digits(known.max())} at most")
        rows += curve.rows(step_number, run.name)
    axes.set_ylim(0, 1.15 * highest or 1)
    axes.set_xlim(left=0)
    if len(drawn) > 1:
        draw.label_ends(axes, labels)
    caption = drawn[0][1].bins.caption(spread=": line, their median; band, their least to their greatest value")
    return Picture(
        "steps-behind",
        "Steps of progress that wait in residuals",
        f"Steps behind: {'; '.join(values)}.",
        figure,
        f"Energy in residuals after a step over the energy that it sent. {caption}.",
        Table(["run", "step", "least", "median", "greatest"], rows),
    )
