"""What was chosen: plans over steps; ratio and gain of layers, or of buckets, over steps."""

from collections.abc import Sequence

import numpy as np
from mpicomp.bench.report import draw
from mpicomp.bench.report.bins import put_together
from mpicomp.bench.report.lines import Array, Rows
from mpicomp.bench.report.picture import Picture, Section, Table
from mpicomp.bench.report.runs import Run
from mpicomp.bench.report.words import digits, listed

_PLANS = 8  # rows of the picture of plans
_ROWS = 120  # of a map; more would be thinner than two pixels
_SAME = 0.01  # a map whose values differ by less than this share of the largest says no more than a sentence


def section(runs: Sequence[Run]) -> Section:
    """Return maps of every run with --metrics; what never changes is said in words."""
    pictures, said = [], []
    for run in runs:
        plans = [f"{name} {100 * share:.0f} %" for name, share in run.plans if share >= 0.005]
        more = [f"{len(plans) - 3} more plans"] if len(plans) > 4 else plans[3:]
        words = f"{run.titled('of the elements exchanged,')} {listed([*plans[:3], *more]) if plans else 'none'}."
        if run.lines is None:
            said.append(words)
            continue
        if len(run.plans) > 1:
            pictures.append(_plans(run))
        layers = run.lines.layers
        gains = layers if np.isfinite(layers.gain).any() else run.lines.buckets
        for what, rows, values in (("ratio", layers, layers.ratio), ("gain", gains, gains.gain)):
            known = values[np.isfinite(values)]
            if known.size and known.max() - known.min() > _SAME * known.max():
                pictures.append(_map(run, what, rows, values) if len(rows.names) > 1 else _curve(run, what, values))
            elif known.size:
                words += f" Its {what} was {digits(float(np.median(known)))} in every part and step."
        said.append(words)
    words = "Ratio is the kept fraction; gain is the share of the gradient's energy, residual included, that was sent."
    return Section("chosen", "What was chosen", words, pictures, points=said)


def _plans(run: Run) -> Picture:
    """Return the share of each plan over steps."""
    lines = run.lines
    assert lines is not None
    bins = put_together(lines.step.size)
    names = lines.plans
    shares = lines.shares
    if len(names) > _PLANS:
        rest = shares[:, _PLANS - 1 :].sum(axis=1, keepdims=True)
        names, shares = (
            [*names[: _PLANS - 1], f"{len(names) - _PLANS + 1} others"],
            np.hstack([shares[:, : _PLANS - 1], rest]),
        )
    shares = np.where(lines.shares.sum(axis=1, keepdims=True) > 0, shares, np.nan)
    cells = bins.each("mean", shares).T
    whole = np.nan_to_num(shares).sum(axis=0) / max(1, np.isfinite(shares[:, 0]).sum())
    edges = np.append(lines.step[bins.edges[:-1]], lines.step[-1] + 1)
    ends = [f"{100 * share:.0f} %" for share in whole]
    figure = draw.rows(names, np.nan_to_num(cells), edges, ends, "step", "share of the elements exchanged")
    halves = [np.nan_to_num(np.nanmean(part, axis=0)) if np.isfinite(part).any() else np.zeros(len(names))
              for part in (shares[: lines.step.size // 2], shares[lines.step.size // 2 :])]  # fmt: skip
    leaders = [names[int(half.argmax())] for half in halves]
    return Picture(
        f"plans-{run.name}",
        run.titled("plans over steps"),
        f"{leaders[0]} carried most of the first half of the run ({100 * halves[0].max():.0f} %), {leaders[1]} most of "
        f"the second ({100 * halves[1].max():.0f} %).",
        figure,
        f"A row is full where its plan carried all; {bins.in_words('column')}, as means. At the right, the whole.",
        Table(
            ["plan", "first half", "second half"],
            [[name, *(f"{100 * half[place]:.1f} %" for half in halves)] for place, name in enumerate(names)],
        ),
    )


def _map(run: Run, what: str, rows: Rows, values: Array) -> Picture:
    lines = run.lines
    assert lines is not None
    bins = put_together(lines.step.size)
    cells = bins.each("median", values).T
    names, shown, together = _fewer(rows, cells)
    known = values[np.isfinite(values)]
    least = None
    if what == "ratio":
        positive = known[known > 0]
        least = float(min(0.1, 10 ** np.floor(np.log10(np.quantile(positive, 0.01))))) if positive.size else 0.1
        shown = np.where(shown < least, least, shown)  # NaN stays
    unit = "ratio: kept fraction" if what == "ratio" else "gain: share of the energy sent"
    figure = draw.heat(names, shown, (lines.step[0], lines.step[-1]), "step", unit, least)
    low, middle, high = (_over_steps(function, values) for function in (np.nanmin, np.nanmedian, np.nanmax))
    order = [place for place in np.argsort(np.nan_to_num(middle)) if np.isfinite(middle[place])]
    lowest, highest = order[0], order[-1]
    extremes = f"from {digits(float(known.min()))} to {digits(float(known.max()))}"
    said = (
        f"The median over steps goes from {digits(middle[lowest])} in {rows.names[lowest]} to "
        f"{digits(middle[highest])} in {rows.names[highest]}; single steps {extremes}."
    )
    clipped = "" if least is None else f" What is below {digits(least)} has the colour of {digits(least)}."
    gaps = " Gaps: nothing was recorded there." if np.isnan(cells).any() else ""
    return Picture(
        f"{what}-{run.name}",
        run.titled(f"{what} by {'layer' if rows is lines.layers else 'bucket'}"),
        said,
        figure,
        f"{bins.in_words('cell').capitalize()}, as a median{together}; rank 0.{clipped}{gaps}",
        Table(
            ["part", "elements", "least", "median", "greatest"],
            [
                [name, f"{numel:,}", *map(digits, numbers)]
                for name, numel, *numbers in zip(rows.names, rows.numels, low, middle, high, strict=True)
            ],
        ),
    )


def _curve(run: Run, what: str, values: Array) -> Picture:
    """Return a curve of what has one row only."""
    lines = run.lines
    assert lines is not None
    bins = put_together(lines.step.size)
    x = bins.last(lines.step)
    low, middle, high = (bins.each(of, values[:, 0]) for of in ("min", "median", "max"))
    figure, axes = draw.panel("step", f"{what} of the whole", right=18)
    draw.curve(axes, x, low, middle, high, "run0")
    axes.set_ylim(0, 1.04)
    axes.set_xlim(left=0)
    known = middle[np.isfinite(middle)]
    spread = "" if bins.largest == 1 else ": line, their median; band, their least to their greatest"
    return Picture(
        f"{what}-{run.name}",
        run.titled(f"{what} over steps"),
        f"{what.capitalize()} {digits(known[0])} at first, {digits(known[-1])} at last; medians from "
        f"{digits(known.min())} to {digits(known.max())}.",
        figure,
        f"All is one bucket; {bins.in_words()}{spread}.",
        Table(
            ["step", "least", "median", "greatest"],
            [[digits(at, 7), *map(digits, numbers)] for at, *numbers in zip(x, low, middle, high, strict=True)],
        ),
    )


def _over_steps(function: object, values: Array) -> Array:
    found = np.full(values.shape[1], np.nan)
    some = np.isfinite(values).any(axis=0)
    found[some] = function(values[:, some], axis=0)  # type: ignore[operator]
    return found


def _fewer(rows: Rows, cells: Array) -> tuple[list[str], Array, str]:
    """Put neighbouring rows together where there are too many: means, by their elements."""
    if len(rows.names) <= _ROWS:
        return rows.names, cells, ""
    edges = np.linspace(0, len(rows.names), _ROWS + 1).round().astype(int)
    weights = np.where(np.isfinite(cells), np.array(rows.numels, float)[:, None], 0)
    sums = np.add.reduceat(np.nan_to_num(cells) * weights, edges[:-1])
    counts = np.add.reduceat(weights, edges[:-1])
    means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    most = int(np.diff(edges).max())
    return [rows.names[place] for place in edges[:-1]], means, f" of up to {most} neighbouring rows' mean"
