"""The section on choices: plans over steps; ratio and gain of layers, or of buckets, over steps."""

import warnings
from collections.abc import Sequence

import numpy as np
from mpicomp.bench.report import draw
from mpicomp.bench.report.runs import Rows, Run
from mpicomp.bench.report.section_parts import (
    Array,
    Curve,
    Picture,
    Section,
    Table,
    capital,
    digits,
    listed,
    percent,
    step_number,
)

_MAX_PLANS = 8  # rows of the picture of plans
_MAX_ROWS = 120  # of a map; more would be thinner than two pixels
_SAME_FRACTION = 0.01  # of the largest value; a map of smaller differences shows no more than a sentence
_MEANINGS = {"ratio": "ratio: kept fraction", "gain": "gain: share of the energy sent"}


def chosen(runs: Sequence[Run]) -> Section:
    """Return maps of every run with --metrics; a sentence stands for values that never change."""
    pictures, points = [], []
    for run in runs:
        plans = [f"{name} {percent(share)}" for name, share in run.plans if share >= 0.005]
        more = [f"{len(plans) - 3} more plans"] if len(plans) > 4 else plans[3:]
        words = f"{run.titled('of the elements exchanged,')} {listed([*plans[:3], *more]) if plans else 'none'}."
        if run.recorded:
            if len(run.plans) > 1:
                pictures.append(_plans(run))
            layers = run.lines.layers
            gains = layers if np.isfinite(layers.gain).any() else run.lines.buckets
            for what, rows, values in (("ratio", layers, layers.ratio), ("gain", gains, gains.gain)):
                known = values[np.isfinite(values)]
                if known.size and np.ptp(known) > _SAME_FRACTION * known.max():
                    pictures.append((_map if len(rows.names) > 1 else _curve)(run, what, rows, values))
                elif known.size:
                    words += f" Its {what} was {digits(float(np.median(known)))} in every part and step."
        points.append(words)
    words = "Ratio is the kept fraction; gain is the share of the gradient's energy, residual included, that was sent."
    return Section("chosen", "What was chosen", words, pictures, points)


def _plans(run: Run) -> Picture:
    step, names, shares = run.lines.step, run.lines.plans, run.lines.shares
    exchanged = shares.sum(axis=1) > 0
    if len(names) > _MAX_PLANS:
        rest = shares[:, _MAX_PLANS - 1 :].sum(axis=1, keepdims=True)
        names = [*names[: _MAX_PLANS - 1], f"{len(names) - _MAX_PLANS + 1} others"]
        shares = np.hstack([shares[:, : _MAX_PLANS - 1], rest])
    edges = np.append(step[run.bins.edges[:-1]], step[-1] + 1)
    cells = run.bins.reduce("mean", np.where(exchanged[:, None], shares, np.nan)).T
    ends = [percent(share) for share in _mean(shares, exchanged)]
    middle = step.size // 2
    halves = [_mean(shares[part], exchanged[part]) for part in (slice(middle), slice(middle, None))]
    leaders = [names[int(half.argmax())] for half in halves]
    rows = [[name, *(f"{100 * half[row]:.1f} %" for half in halves)] for row, name in enumerate(names)]
    return Picture(
        f"plans-{run.name}",
        run.titled("plans over steps"),
        f"{leaders[0]} carried most of the first half of the run ({percent(halves[0].max())}), {leaders[1]} most of "
        f"the second ({percent(halves[1].max())}).",
        draw.share_rows(names, np.nan_to_num(cells), edges, ends, "share of the elements exchanged"),
        f"A row is full where its plan carried all. {run.bins.caption('column')}, as means. At the right, the whole.",
        Table(["plan", "first half", "second half"], rows),
    )


def _mean(shares: Array, exchanged: Array) -> Array:
    mean: Array = shares[exchanged].sum(axis=0) / max(1, np.count_nonzero(exchanged))
    return mean


def _map(run: Run, what: str, rows: Rows, values: Array) -> Picture:
    cells = run.bins.reduce("median", values).T
    names, shown, averaged = _merge_rows(rows, cells)
    known = values[np.isfinite(values)]
    least = None
    if what == "ratio":
        positive = known[known > 0]
        least = float(min(0.1, 10 ** np.floor(np.log10(np.quantile(positive, 0.01))))) if positive.size else 0.1
        shown = np.where(shown < least, least, shown)  # NaN stays
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of rows where all are NaN
        low, middle, high = np.nanmin(values, axis=0), np.nanmedian(values, axis=0), np.nanmax(values, axis=0)
    lowest, highest = int(np.nanargmin(middle)), int(np.nanargmax(middle))
    clipped = "" if least is None else f" What is below {digits(least)} has the color of {digits(least)}."
    gaps = " Gaps: nothing was recorded there." if np.isnan(cells).any() else ""
    return Picture(
        f"{what}-{run.name}",
        run.titled(f"{what} by {'layer' if rows is run.lines.layers else 'bucket'}"),
        f"The median over steps goes from {digits(middle[lowest])} in {rows.names[lowest]} to "
        f"{digits(middle[highest])} in {rows.names[highest]}; single steps from {digits(known.min())} to "
        f"{digits(known.max())}.",
        draw.heat(names, shown, run.lines.step, _MEANINGS[what], least),
        f"{run.bins.caption('cell')}, as a median{averaged}; rank 0.{clipped}{gaps}",
        Table(
            ["part", "elements", "least", "median", "greatest"],
            [
                [name, f"{numel:,}", *map(digits, numbers)]
                for name, numel, *numbers in zip(rows.names, rows.numels, low, middle, high, strict=True)
            ],
        ),
    )


def _curve(run: Run, what: str, _: Rows, values: Array) -> Picture:
    curve = Curve.of(run.bins, run.lines.step, values[:, 0])
    figure, axes = draw.panel("step", f"{what} of the whole", right=18)
    draw.plot(axes, curve, "run0")
    axes.set_ylim(0, 1.04)
    axes.set_xlim(left=0)
    known = curve.known
    caption = run.bins.caption(spread=": line, their median; band, their least to their greatest")
    return Picture(
        f"{what}-{run.name}",
        run.titled(f"{what} over steps"),
        f"{capital(what)} {digits(known[0])} at first, {digits(known[-1])} at last; medians from "
        f"{digits(known.min())} to {digits(known.max())}.",
        figure,
        f"All is one bucket. {caption}.",
        Table(["step", "least", "median", "greatest"], curve.rows(step_number)),
    )


def _merge_rows(rows: Rows, cells: Array) -> tuple[list[str], Array, str]:
    """Average neighboring rows, weighted by their elements, where there are too many; return a caption, too."""
    if len(rows.names) <= _MAX_ROWS:
        return rows.names, cells, ""
    edges = np.linspace(0, len(rows.names), _MAX_ROWS + 1).round().astype(int)
    weights = np.where(np.isfinite(cells), np.array(rows.numels, float)[:, None], 0)
    sums = np.add.reduceat(np.nan_to_num(cells) * weights, edges[:-1])
    counts = np.add.reduceat(weights, edges[:-1])
    means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    largest = int(np.diff(edges).max())
    return [rows.names[row] for row in edges[:-1]], means, f" of up to {largest} neighboring rows' mean"
