"""The pictures of results in the documentation, drawn from its tables: ``python studies/pictures.py``."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from mpicomp.bench.report.draw import HEIGHT, LIGHT, STYLE, TALL, WIDTH, on_white, spread, svg

from mpicomp.cli import run_program

DOCS = Path(__file__).resolve().parents[1] / "docs"
_MARGINS = 52, 118, 30, 26  # pixels left, right, above and below axes


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="studies/pictures.py", description=__doc__)
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the pages; its pictures are overwritten")
    parser.set_defaults(alone=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Draw all of them."""
    results = (arguments.docs / "results.md").read_text()
    learned = (arguments.docs / "learned.md").read_text()
    write = arguments.docs / "pictures"
    for name, figure in (("four-networks", four_networks(results)), ("codes", codes(learned))):
        text = re.sub(r"\s*\n\s*", "\n", on_white(svg(figure)))
        (write / f"{name}.svg").write_text(text + "\n")
    return 0


def table(page: str, head: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return the columns of the first table below a line of a page, and its rows by their first cell."""
    lines = page[page.index(head) :].splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip(" `*") for cell in line.strip("|").split("|")])
    return rows[0][1:], {row[0]: row[1:] for row in rows[2:]}


def number(cell: str) -> float:
    """Return the number in brackets of a cell, or its only one."""
    found = re.search(r"\(([\d.]+)\)", cell)
    return float(found[1] if found else cell.replace(",", ""))


def four_networks(page: str) -> Figure:
    """Return times to quality over those of dense exchange with the same seeds, a panel a task."""
    panels = []
    for task in ("digits", "text-lstm"):
        networks, rows = table(page, f"`{task}`: time to quality in seconds")
        labels = {"dense": "dense", "auto": "mpicomp auto", "static`, top-k at 1 %": "top-k at 1 %"}
        lines = {label: list(map(number, rows[name])) for name, label in labels.items() if name in rows}
        panels.append((f"{task}: time to the quality of dense", [network.split(",")[0] for network in networks], lines))
    return _draw(panels, "x")


def codes(page: str) -> Figure:
    """Return milliseconds of exchanges against the bandwidth of the links."""
    networks, rows = table(page, "| exchange | wire, kB | 50 Mbit/s")
    names = {
        "dense, `ring": "dense",
        "topk` over `allgather": "top-k",
        "topk` over `star-topk": "star-topk",
        "lgc": "lgc",
        'lgc`, `code="linear"': "lgc, linear",
    }
    lines = {label: [number(cell) for cell in rows[name][1:]] for name, label in names.items()}
    return _draw([("milliseconds of an exchange", networks[1:], lines)], "")


def _draw(panels: Sequence[tuple[str, list[str], dict[str, list[float]]]], unit: str) -> Figure:
    """Return lines over networks, whose names stand at their ends; heights are logarithmic."""
    left, right, above, below = _MARGINS
    with matplotlib.rc_context(STYLE):
        width = WIDTH * len(panels)
        figure = Figure(figsize=(width / 72, HEIGHT / 72), dpi=72, facecolor="none")
        for place, (title, networks, lines) in enumerate(panels):
            box = (WIDTH * place + left) / width, below / HEIGHT
            axes = figure.add_axes((*box, (WIDTH - left - right) / width, (HEIGHT - above - below) / HEIGHT))
            axes.set_yscale("log")
            axes.grid(axis="y")
            axes.spines["left"].set_visible(False)
            axes.tick_params(length=0, pad=5, which="both", labelsize=10)
            axes.set_xticks(range(len(networks)), networks)
            for token, (_, heights) in enumerate(lines.items()):
                axes.plot(heights, color=LIGHT[f"run{token}"], linewidth=1.8, marker="o", markersize=4)
            _heights(axes, [value for heights in lines.values() for value in heights], unit)
            _ends(axes, lines)
            figure.text(
                (WIDTH * place + 6) / width, 1 - 16 / HEIGHT, title, color=LIGHT["ink"], fontweight="bold", fontsize=11
            )
    return figure


def _heights(axes: Axes, values: Sequence[float], unit: str) -> None:
    """Write few round numbers at the left."""
    axes.set_ylim(min(values) / 1.25, max(values) * 1.25)
    ticks = [one * 10.0**power for power in range(-3, 5) for one in (1, 2, 5)]
    shown = [tick for tick in ticks if min(values) / 1.25 <= tick <= max(values) * 1.25]
    shown = shown if len(shown) < 7 else [tick for tick in shown if f"{tick:e}"[0] == "1"]
    axes.yaxis.set_major_locator(FixedLocator(shown))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{unit}"))


def _ends(axes: Axes, lines: dict[str, list[float]]) -> None:
    """Write each line's name at its end, clear of the others."""
    low, high = axes.transData.transform([(0, limit) for limit in axes.get_ylim()])[:, 1]
    at = sorted((axes.transData.transform((0, heights[-1]))[1], place) for place, heights in enumerate(lines.values()))
    for height, (_, place) in zip(spread([height for height, _ in at], TALL, low, high), at, strict=True):
        name, heights = list(lines.items())[place]
        y = axes.transData.inverted().transform((0, height))[1]
        axes.annotate(
            name,
            (len(heights) - 1, y),
            (8, 0),
            textcoords="offset points",
            va="center",
            color=LIGHT[f"run{place}"],
            fontweight="bold",
            annotation_clip=False,
        )


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
