"""Axes and labels in one style, drawn by matplotlib; SVG whose colours a page can change."""

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from mpicomp.bench.report.lines import Array
from mpicomp.bench.report.palette import LIGHT
from mpicomp.bench.report.words import amount, digits, seconds

WIDTH, HEIGHT = 380, 250  # in pixels of the page at which text has its own size; as wide as a phone
TEXT = 12  # pixels
DASHES: dict[str, Any] = {f"run{place}": (0, (4, 1.5)) for place in range(4, 8)}
TALL = 13  # pixels between labels, so that they do not touch

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": TEXT,
    "text.color": LIGHT["ink"],
    "axes.edgecolor": LIGHT["line"],
    "axes.labelcolor": LIGHT["soft"],
    "axes.linewidth": 1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.7,
    "xtick.color": LIGHT["line"],
    "ytick.color": LIGHT["line"],
    "xtick.labelcolor": LIGHT["soft"],
    "ytick.labelcolor": LIGHT["soft"],
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "mpicomp",
}


def panel(
    across: str, up: str, left: int = 52, right: int = 14, height: int = HEIGHT, grid: str | None = "y"
) -> tuple[Figure, Axes]:
    """Return an empty picture with the names and units of its axes.

    Parameters
    ----------
    across, up : str
        What goes to the right, and what goes up.
    left, right : int
        Pixels beside the axes, for their numbers and for labels.
    height : int
        Pixels.
    grid : str or None
        Which axis has lines through its numbers.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, facecolor="none")
        top, bottom = 30 if up else 12, 42 if across else 26
        box = (left / WIDTH, bottom / height, (WIDTH - left - right) / WIDTH, (height - top - bottom) / height)
        axes = figure.add_axes(box, facecolor="none")
        axes.tick_params(length=0, pad=5)
        if across:
            figure.text((left + WIDTH - right) / 2 / WIDTH, 7 / height, across, ha="center", color=LIGHT["soft"])
        if up:
            figure.text(6 / WIDTH, 1 - 14 / height, up, ha="left", color=LIGHT["soft"])
        if grid:
            axes.grid(axis=grid)  # type: ignore[arg-type]
        if grid != "x":
            axes.spines["left"].set_visible(False)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_locator(MaxNLocator(5))
    return figure, axes


def plain_log(axis: str, axes: Axes) -> None:
    """Write the numbers of a logarithmic axis: powers of ten, and parts of these where they are few."""
    low, high = getattr(axes, f"get_{axis}lim")()
    span = np.log10(high / low)
    steps = [1, 1.5, 2, 3, 5, 7] if span < 0.8 else [1, 2, 5] if span < 1.6 else [1, 3] if span < 2.6 else [1]
    ticks = [m * 10.0**e for e in range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1) for m in steps]
    own = getattr(axes, f"{axis}axis")
    own.set_ticks([tick for tick in ticks if low <= tick <= high])
    own.set_ticks([], minor=True)
    own.set_major_formatter(FuncFormatter(lambda value, _: digits(value, 2)))


def beside(axes: Axes, x: float, y: float, text: str, bold: bool = True) -> None:
    """Write a number to the right of the end of a bar."""
    with matplotlib.rc_context(STYLE):
        axes.annotate(
            text, (x, y), (6, 0), textcoords="offset points", va="center", fontweight="bold" if bold else "normal"
        )


def formatted(axis: str, axes: Axes, form: Callable[[float], str]) -> None:
    """Write the numbers of an axis with a function."""
    getattr(axes, f"{axis}axis").set_major_formatter(FuncFormatter(lambda value, _: form(value)))


def in_seconds(value: float) -> str:
    """Return a number of an axis as seconds."""
    return "0" if value == 0 else seconds(value)


def in_bytes(value: float) -> str:
    """Return a number of an axis as bytes."""
    return "0" if value == 0 else amount(value)


def curve(axes: Axes, x: Array, low: Array, middle: Array, high: Array, token: str) -> None:
    """Draw medians as a line and what lies between least and most as a band."""
    axes.fill_between(x, low, high, color=LIGHT[token], alpha=0.16, linewidth=0)
    marker = "o" if x.size == 1 else None
    axes.plot(
        x, middle, color=LIGHT[token], linewidth=1.8, linestyle=DASHES.get(token, "-"), marker=marker, markersize=4
    )


def label_ends(axes: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Write names at the right of the axes, each as near as possible to its height; none on another.

    Parameters
    ----------
    axes : Axes
        Whose limits are final.
    labels : sequence of (float, str, str)
        A height, a text, and the token of its colour.
    """
    if not labels:
        return
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    box = axes.get_window_extent()
    at = sorted((float(axes.transData.transform((axes.get_xlim()[1], y))[1]), text, token) for y, text, token in labels)
    heights = spread([min(max(height, box.y0), box.y1) for height, _, _ in at], TALL, box.y0, box.y1)
    for height, (_, text, token) in zip(heights, at, strict=True):
        place = (box.x1 + 5) / figure.bbox.width, height / figure.bbox.height
        with matplotlib.rc_context(STYLE):
            figure.text(*place, shortened(text, 11), color=LIGHT[token], va="center", fontweight="bold")


def spread(heights: Sequence[float], apart: float, low: float, high: float) -> list[float]:
    """Move heights, which rise, so far from each other, and back between two bounds where there is room.

    Examples
    --------
    >>> spread([0, 1, 50], 10, 0, 55)
    [0, 10, 50]
    >>> spread([48, 49, 50], 10, 0, 50)
    [30, 40, 50]
    """
    found: list[float] = []
    for height in heights:
        found.append(max(height, found[-1] + apart) if found else height)
    limit = high
    for place in range(len(found) - 1, -1, -1):
        found[place] = min(found[place], limit)
        limit = found[place] - apart
    if found and found[0] < low:  # there is no room for all: go on above
        return [low + place * apart for place in range(len(found))]
    return found


def shortened(text: str, most: int) -> str:
    """Leave out the middle of what is too long.

    Examples
    --------
    >>> shortened("encoder.layers.0.weight", 13)
    'encode…weight'
    """
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def heat(
    names: Sequence[str], cells: Array, x: tuple[float, float], across: str, up: str, least: float | None = None
) -> Figure:
    """Return a map of colours: a row for each name, steps to the right, and a scale.

    Parameters
    ----------
    names : sequence of str
    cells : array, shape (names, columns)
        NaN leaves a gap.
    x : (float, float)
        First and last step.
    across, up : str
        Names of the axis to the right, and of what the colours mean.
    least : float or None
        Lowest value of a logarithmic scale, which ends at 1; None for a linear one from 0 to 1.
    """
    height = HEIGHT + 50 if len(names) > 8 else 90 + 20 * len(names)
    width = min(22, max(len(name) for name in names))  # characters of names
    figure, axes = panel(across, up, left=22 + 7 * width, right=68, height=height, grid=None)
    norm = Normalize(0, 1) if least is None else LogNorm(least, 1, clip=True)
    with matplotlib.rc_context(STYLE):
        edges = (x[0] - 0.5, x[1] + 0.5, len(names) - 0.5, -0.5)
        image = axes.imshow(cells, "cividis", norm=norm, aspect="auto", interpolation="none", extent=edges)
        shown = np.unique(np.linspace(0, len(names) - 1, min(len(names), 10)).round().astype(int))
        axes.set_yticks(shown, [shortened(names[place], width) for place in shown])
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        for side in axes.spines.values():
            side.set_visible(False)
        box = axes.get_position()
        scale = figure.add_axes((box.x1 + 10 / WIDTH, box.y0, 9 / WIDTH, box.height), facecolor="none")
        bar = figure.colorbar(image, cax=scale)
        bar.outline.set_visible(False)
        scale.tick_params(length=0, pad=3, which="both")
        if least is None:
            bar.set_ticks([0, 0.5, 1], labels=["0", "0.5", "1"])
        else:
            ticks = [10.0**power for power in range(int(np.ceil(np.log10(least) - 1e-9)), 1)]
            bar.set_ticks(ticks, labels=[digits(tick) for tick in ticks])
            bar.set_ticks([], minor=True)
    return figure


def rows(names: Sequence[str], shares: Array, x: Array, ends: Sequence[str], across: str, up: str) -> Figure:
    """Return a row for each name, as high as its share at each step.

    Parameters
    ----------
    names : sequence of str
    shares : array, shape (names, columns)
        Between 0 and 1.
    x : array, shape (columns + 1,)
        Where columns begin and end.
    ends : sequence of str
        What is written at the right of each row.
    across, up : str
        Names of the axes.
    """
    width = min(24, max(len(name) for name in names))  # characters of names
    figure, axes = panel(across, up, left=22 + 7 * width, right=52, height=90 + 24 * len(names), grid=None)
    for place, row in enumerate(shares):
        low = np.full(x.size, place + 0.4)
        high = low - 0.8 * np.append(row, row[-1])
        axes.fill_between(x, low, high, step="post", color=LIGHT["run0"], linewidth=0)
        axes.plot(x[[0, -1]], low[:2], color=LIGHT["line"], linewidth=1)
        beside(axes, x[-1], place, ends[place])
    axes.set_yticks(range(len(names)), [shortened(name, width) for name in names])
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_xlim(x[0], x[-1])
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.spines["bottom"].set_visible(False)
    return figure


def svg(figure: Figure) -> str:
    """Return a picture as SVG, by itself."""
    file = io.StringIO()
    with matplotlib.rc_context(STYLE):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=nothing)
    return file.getvalue()


def on_white(text: str) -> str:
    """Return an SVG with a white ground, for use outside the page."""
    return text.replace('style="fill: none"', f'style="fill: {LIGHT["ground"]}"', 1)


def png(figure: Figure, path: str) -> None:
    """Write a picture as PNG of 300 pixels an inch, on white."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, format="png", dpi=288, facecolor=LIGHT["ground"])


_TOKENS = {colour: token for token, colour in LIGHT.items() if token != "ground"}


def inline(text: str, name: str) -> str:
    """Return an SVG for the inside of a page: without a size and with the page's colours and font.

    Parameters
    ----------
    text : str
        From `svg`.
    name : str
        Letters, digits and hyphens; unlike those of other pictures of the page, so that names in it are, too.
    """
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda own: f' id="{name}-{own[1]}"' if own[1] in used else "", text)
    text = re.sub(r'(url\(#|href="#)', lambda own: f"{own[1]}{name}-", text)
    text = re.sub(r"#[0-9a-f]{6}\b", lambda own: f"var(--{_TOKENS[own[0]]})" if own[0] in _TOKENS else own[0], text)
    text = re.sub(r"'DejaVu Sans'(, [^;\"]+)?", "var(--font)", text)
    return re.sub(r"\n\s*", "\n", text)
