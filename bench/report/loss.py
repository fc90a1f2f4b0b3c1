"""Loss and quality against steps, seconds and bytes."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from mpicomp.bench.report import draw
from mpicomp.bench.report.bins import put_together
from mpicomp.bench.report.lines import Array
from mpicomp.bench.report.palette import LIGHT
from mpicomp.bench.report.picture import Picture, Section, Table
from mpicomp.bench.report.runs import Run
from mpicomp.bench.report.words import amount, digits, seconds

_DECADES = 20  # the greatest loss over the least one, from which on the axis is logarithmic


def section(runs: Sequence[Run]) -> Section | None:
    """Return the pictures of the runs that have recorded a loss; None where none has."""
    runs = [run for run in runs if run.lines is not None and np.isfinite(run.lines.loss).any()]
    if not runs:
        return None
    pictures = [_against(runs, across) for across in ("steps", "seconds", "bytes")]
    looks = [run for run in runs if run.lines is not None and np.isfinite(run.lines.quality).sum() > 1]
    if looks:
        pictures.append(_quality(looks))
    points = []
    for run in runs:
        first, last = _ends(run)
        started = f"; its first {run.start} steps took {seconds(_start_s(run))}" if run.start else ""
        points.append(
            f"{run.titled('from')} {digits(first)} to {digits(last)} in {seconds(float(run.elapsed[-1]))}{started}."
        )
    words = "Training loss on rank 0's batch, before each update."
    if any(run.start for run in runs):
        words += " In the seconds, the first steps count as the median step: they compile, and measure the network."
    return Section("loss", "Loss against steps, seconds and bytes", words, pictures, points=points)


def smooth_loss(run: Run) -> tuple[Array, Array]:
    """Return medians of neighbouring steps, and the seconds at the end of each."""
    assert run.lines is not None
    bins = put_together(run.lines.step.size)
    return bins.each("median", run.lines.loss), bins.last(run.elapsed)


def _ends(run: Run) -> tuple[float, float]:
    middle, _ = smooth_loss(run)
    return float(middle[0]), float(middle[-1])


def _start_s(run: Run) -> float:
    assert run.lines is not None
    return float(run.lines.seconds[: run.start].sum())


def _against(runs: Sequence[Run], across: str) -> Picture:
    unit = {"steps": "step", "seconds": "seconds of training", "bytes": "bytes that left rank 0"}[across]
    figure, axes = draw.panel(unit, "training loss", right=106 if len(runs) > 1 else 18)
    labels, rows, said, lows = [], [], [], []
    for place, run in enumerate(runs):
        lines = run.lines
        assert lines is not None
        bins = put_together(lines.step.size)
        way = {"steps": lines.step, "seconds": run.elapsed, "bytes": np.cumsum(lines.wire_bytes)}[across]
        x = bins.last(way)
        low, middle, high = (bins.each(of, lines.loss) for of in ("min", "median", "max"))
        draw.curve(axes, x, low, middle, high, f"run{place}")
        end = middle[np.isfinite(middle)]
        labels.append((float(end[-1]) if end.size else 0.0, run.name, f"run{place}"))
        lows += [middle, low]
        form = {"steps": digits, "seconds": seconds, "bytes": amount}[across]
        end_x = f"{run.steps:,} steps" if across == "steps" else form(float(x[-1]))
        said.append(
            f"{digits(middle[-1])} after {end_x}" if run.alone else f"{run.name} {digits(middle[-1])} after {end_x}"
        )
        rows += [
            [run.name, form(float(at)), *map(digits, found)] for at, *found in zip(x, low, middle, high, strict=True)
        ]
    _limits(axes, runs)
    if across == "bytes" and len(runs) > 1 and _apart(runs):
        axes.set_xscale("log")
        draw.plain_log("x", axes)
    else:
        axes.set_xlim(left=0)
    if across != "steps":
        draw.formatted("x", axes, draw.in_bytes if across == "bytes" else draw.in_seconds)
    if len(runs) > 1:
        draw.label_ends(axes, labels)
    first = runs[0].lines
    assert first is not None
    bins = put_together(first.step.size)
    spread = (
        "" if bins.largest == 1 else ": line, their median; band, their least to their greatest loss, cut by the axis"
    )
    return Picture(
        f"loss-{across}",
        f"Loss against {across}",
        f"Training loss at the end: {'; '.join(said)}.",
        figure,
        f"{bins.in_words().capitalize()}{spread}.",
        Table(["run", across, "least", "median", "greatest"], rows),
    )


def _apart(runs: Sequence[Run]) -> bool:
    """Tell whether the runs' bytes differ so much that one axis from 0 would hide some."""
    sums = [float(run.lines.wire_bytes.sum()) for run in runs if run.lines is not None]
    return min(sums) > 0 and max(sums) > 8 * min(sums)


def _limits(axes: Axes, runs: Sequence[Run]) -> None:
    """Have the axis hold all medians; a logarithmic one where they differ so much that one from 0 would hide some."""
    medians = np.concatenate([smooth_loss(run)[0] for run in runs])
    medians = medians[np.isfinite(medians)]
    if medians.size == 0:
        return
    low, high = float(medians.min()), float(medians.max())
    least = min(_least(run) for run in runs)
    if 0 < low < high / _DECADES:
        axes.set_yscale("log")
        axes.set_ylim(max(least, low / 4) / 1.2, high * 1.3)
        draw.plain_log("y", axes)
    else:
        axes.set_ylim(0 if 0 <= low < 0.5 * high else low - 0.1 * (high - low), high + 0.08 * (high - low) + 1e-12)


def _least(run: Run) -> float:
    assert run.lines is not None
    loss = run.lines.loss
    return float(np.min(loss[np.isfinite(loss)], initial=np.inf))


def _quality(runs: Sequence[Run]) -> Picture:
    name, better = runs[0].quality()
    name = "held-out quality" if runs[0].outcome is None else name
    figure, axes = draw.panel("seconds of training", name, right=106 if len(runs) > 1 else 18)
    labels, rows, said = [], [], []
    for place, run in enumerate(runs):
        lines = run.lines
        assert lines is not None
        seen = np.isfinite(lines.quality)
        x, y = run.elapsed[seen], lines.quality[seen]
        token = f"run{place}"
        axes.plot(
            x, y, color=LIGHT[token], linewidth=1.8, linestyle=draw.DASHES.get(token, "-"), marker="o", markersize=3
        )
        labels.append((float(y[-1]), run.name, f"run{place}"))
        said.append(f"{'' if run.alone else run.name + ' '}{digits(y[-1])} after {seconds(float(x[-1]))}")
        rows += [
            [run.name, f"{step:.0f}", seconds(at), digits(value)]
            for step, at, value in zip(lines.step[seen], x, y, strict=True)
        ]
    axes.set_xlim(left=0)
    draw.formatted("x", axes, draw.in_seconds)
    if len(runs) > 1:
        draw.label_ends(axes, labels)
    note = (
        f"Each point is a look at held-out data; {better} is better." if runs[0].outcome else "Looks at held-out data."
    )
    return Picture(
        "quality-seconds",
        f"{name[0].upper()}{name[1:]} against seconds",
        f"{name[0].upper()}{name[1:]} at the last look: {'; '.join(said)}.",
        figure,
        f"{note} Looking is not in the seconds.",
        Table(["run", "step", "seconds", name], rows),
    )
