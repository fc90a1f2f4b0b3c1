"""Colours, axes and labels in one style, drawn by matplotlib as SVG whose colours a page can change."""

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
from mpicomp.bench.report.section_parts import Array, Curve, digits, seconds

# Every colour of a line, a label or an area has a contrast of 3 to its ground, and that of text 4.5 (WCAG 2.2, AA).
# Within the phases, the first four runs and the other four, whose lines are dashed, no two colors look the same with
# any of the three weaknesses of color vision.
_COLOURS = {
    "ground": ("#ffffff", "#15181d"),
    "ink": ("#1b1f24", "#eceff3"),
    "soft": ("#59616b", "#a9b2bd"),
    "line": ("#d5d9df", "#3a414b"),
    "run0": ("#14469c", "#459bf4"),
    "run1": ("#b93f0b", "#f98c49"),
    "run2": ("#08855e", "#67f0bb"),
    "run3": ("#954280", "#d090c1"),
    "run4": ("#926a00", "#d4b72c"),
    "run5": ("#9e0040", "#e3718d"),
    "run6": ("#006f99", "#30bfe6"),
    "run7": ("#727379", "#d3e5e6"),
    "compute": ("#5b5d74", "#7283a7"),
    "compress": ("#cb7d1b", "#ffad40"),
    "exchange": ("#2357af", "#6b9df7"),
    "decode": ("#2d9464", "#4fe3ba"),
    "update": ("#a174b7", "#dabff5"),
    "other": ("#7d979a", "#8d786f"),
}
LIGHT = {token: light for token, (light, _) in _COLOURS.items()}
DARK = {token: dark for token, (_, dark) in _COLOURS.items()}
DASHES: dict[str, Any] = {f"run{number}": (0, (4, 1.5)) for number in range(4, 8)}

WIDTH, HEIGHT = 380, 250  # in pixels of the page at which text has its own size; as wide as a phone
TEXT = 12  # pixels
TALL = 13  # pixels between labels, so that they do not touch
RUN_LABELS = 106  # pixels at the right of axes where curves have labels

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
    x_label: str, y_label: str, left: int = 52, right: int = 14, height: int = HEIGHT, grid: str | None = "y"
) -> tuple[Figure, Axes]:
    """Return an empty picture with the names and units of its axes."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, facecolor="none")
        top, bottom = 30 if y_label else 12, 42 if x_label else 26
        box = (left / WIDTH, bottom / height, (WIDTH - left - right) / WIDTH, (height - top - bottom) / height)
        axes = figure.add_axes(box, facecolor="none")
        axes.tick_params(length=0, pad=5)
        if x_label:
            figure.text((left + WIDTH - right) / 2 / WIDTH, 7 / height, x_label, ha="center", color=LIGHT["soft"])
        if y_label:
            figure.text(6 / WIDTH, 1 - 14 / height, y_label, ha="left", color=LIGHT["soft"])
        if grid:
            axes.grid(axis=grid)  # type: ignore[arg-type]
        if grid != "x":
            axes.spines["left"].set_visible(False)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_locator(MaxNLocator(5))
    return figure, axes


def bars(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows of horizontal bars, from the top down."""
    axes.set_yticks(range(len(names)), [shortened(name, 15) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.spines["bottom"].set_visible(False)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    format_axis(axes, "x", seconds)


def log_axis(axes: Axes, axis: str) -> None:
    """Make an axis logarithmic, with powers of ten, and parts of these where they are few."""
    getattr(axes, f"set_{axis}scale")("log")
    low, high = getattr(axes, f"get_{axis}lim")()
    span = np.log10(high / low)
    steps = [1, 1.5, 2, 3, 5, 7] if span < 0.8 else [1, 2, 5] if span < 1.6 else [1, 3] if span < 2.6 else [1]
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    ticks = [step * 10.0**power for power in powers for step in steps]
    scale = getattr(axes, f"{axis}axis")
    scale.set_ticks([tick for tick in ticks if low <= tick <= high])
    scale.set_ticks([], minor=True)
    format_axis(axes, axis, lambda value: digits(value, 2))


def format_axis(axes: Axes, axis: str, form: Callable[[float], str]) -> None:
    """Write the numbers of an axis with a function; 0 needs no unit."""
    formatter = FuncFormatter(lambda value, _: "0" if value == 0 else form(value))
    getattr(axes, f"{axis}axis").set_major_formatter(formatter)


def plot(axes: Axes, curve: Curve, token: str, dashes: object = None) -> None:
    """Draw medians as a line, and a band from least to greatest."""
    axes.fill_between(curve.x, curve.low, curve.high, color=LIGHT[token], alpha=0.16, linewidth=0)
    marker = "o" if curve.x.size == 1 else None
    style: Any = dashes or DASHES.get(token, "-")
    axes.plot(curve.x, curve.middle, color=LIGHT[token], linewidth=1.8, linestyle=style, marker=marker, markersize=4)


def label_bar(axes: Axes, x: float, y: float, text: str, bold: bool = True) -> None:
    """Write a text to the right of the end of a bar."""
    weight = "bold" if bold else "normal"
    with matplotlib.rc_context(STYLE):
        axes.annotate(text, (x, y), (6, 0), textcoords="offset points", va="center", fontweight=weight)


def label_ends(axes: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Write names at the right of the axes, each as near as possible to its height, without overlap."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    box = axes.get_window_extent()
    right = axes.get_xlim()[1]
    ends = sorted((float(axes.transData.transform((right, y))[1]), text, token) for y, text, token in labels)
    heights = spread([min(max(height, box.y0), box.y1) for height, _, _ in ends], TALL, box.y0, box.y1)
    for height, (_, text, token) in zip(heights, ends, strict=True):
        x, y = (box.x1 + 5) / figure.bbox.width, height / figure.bbox.height
        with matplotlib.rc_context(STYLE):
            figure.text(x, y, shortened(text, 11), color=LIGHT[token], va="center", fontweight="bold")


def spread(heights: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """Move rising heights at least ``distance`` from each other, and back between two bounds where there is room.

    >>> spread([0, 1, 50], 10, 0, 55)
    [0, 10, 50]
    >>> spread([48, 49, 50], 10, 0, 50)
    [30, 40, 50]
    """
    found: list[float] = []
    for height in heights:
        found.append(max(height, found[-1] + distance) if found else height)
    limit = high
    for index in range(len(found) - 1, -1, -1):
        found[index] = min(found[index], limit)
        limit = found[index] - distance
    if found and found[0] < low:  # there is no room for all: the last ones stand above
        return [low + index * distance for index in range(len(found))]
    return found


def shortened(text: str, length: int) -> str:
    """Shorten a long text in its middle.

    >>> shortened("encoder.layers.0.weight", 13)
    'encode…weight'
    """
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def heat(names: Sequence[str], cells: Array, steps: Array, meaning: str, least: float | None = None) -> Figure:
    """Return a map of colours: a row for each name, steps to the right, and a scale."""
    height = HEIGHT + 50 if len(names) > 8 else 90 + 20 * len(names)
    width = min(22, max(len(name) for name in names))  # characters of names
    figure, axes = panel("step", meaning, left=22 + 7 * width, right=68, height=height, grid=None)
    norm = Normalize(0, 1) if least is None else LogNorm(least, 1, clip=True)
    with matplotlib.rc_context(STYLE):
        edges = (steps[0] - 0.5, steps[-1] + 0.5, len(names) - 0.5, -0.5)
        image = axes.imshow(cells, "cividis", norm=norm, aspect="auto", interpolation="none", extent=edges)
        shown = np.unique(np.linspace(0, len(names) - 1, min(len(names), 10)).round().astype(int))
        axes.set_yticks(shown, [shortened(names[row], width) for row in shown])
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


def share_rows(names: Sequence[str], shares: Array, x: Array, ends: Sequence[str], meaning: str) -> Figure:
    """Return a row for each name, as high as its share at each step."""
    width = min(24, max(len(name) for name in names))  # characters of names
    figure, axes = panel("step", meaning, left=22 + 7 * width, right=52, height=90 + 24 * len(names), grid=None)
    for row, share in enumerate(shares):
        low = np.full(x.size, row + 0.4)
        high = low - 0.8 * np.append(share, share[-1])
        axes.fill_between(x, low, high, step="post", color=LIGHT["run0"], linewidth=0)
        axes.plot(x[[0, -1]], low[:2], color=LIGHT["line"], linewidth=1)
        label_bar(axes, x[-1], row, ends[row])
    axes.set_yticks(range(len(names)), [shortened(name, width) for name in names])
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_xlim(x[0], x[-1])
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.spines["bottom"].set_visible(False)
    return figure


def svg(figure: Figure) -> str:
    """Return a picture as an SVG file."""
    file = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return file.getvalue()


def on_white(text: str) -> str:
    """Return an SVG with a white ground, for use outside the page."""
    return text.replace('style="fill: none"', f'style="fill: {LIGHT["ground"]}"', 1)


def png(figure: Figure, path: str) -> None:
    """Write a picture as PNG of 288 pixels an inch, on white."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, format="png", dpi=288, facecolor=LIGHT["ground"])


_TOKENS = {colour: token for token, colour in LIGHT.items() if token != "ground"}


def inline(text: str, name: str) -> str:
    """Return the inside of an SVG for a page, without its first tag, with the page's colours and font."""
    text = text[text.index(">", text.index("<svg")) + 1 :].strip()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->\s*", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", text)
    text = re.sub(r'(url\(#|href="#)', lambda found: f"{found[1]}{name}-", text)
    colour = re.compile(r"#[0-9a-f]{6}\b")
    text = colour.sub(lambda found: f"var(--{_TOKENS[found[0]]})" if found[0] in _TOKENS else found[0], text)
    text = re.sub(r"'DejaVu Sans'(, [^;\"]+)?", "var(--font)", text)
    return re.sub(r"\n\s*", "\n", text)
