"""Which rank the others wait for."""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator
from mpicomp.bench.report import draw
from mpicomp.bench.report.lines import PHASES
from mpicomp.bench.report.palette import LIGHT
from mpicomp.bench.report.picture import Picture, Section, Table
from mpicomp.bench.report.runs import Run
from mpicomp.bench.report.words import seconds

_MOST = 16  # bars of a picture
_BUSY = [name for name in PHASES if name != "exchange"]


def section(runs: Sequence[Run]) -> Section | None:
    """Return a picture of every run whose --json tells of more than one rank; None where none does."""
    runs = [run for run in runs if run.outcome is not None and len(run.outcome.get("by_rank", [])) > 1]
    if not runs:
        return None
    said = []
    for run in runs:
        assert run.outcome is not None
        ranks = run.outcome["by_rank"]
        slow = max(ranks, key=lambda own: own["slowest"])
        fair = 1 / len(ranks)
        word = (
            "about as often as chance would have it" if slow["slowest"] < 1.25 * fair else "so it holds the others up"
        )
        said.append(f"{run.titled('rank')} {slow['rank']} in {100 * slow['slowest']:.0f} % of the steps, {word}.")
    words = (
        "All ranks' steps end together, so the slowest is the one that is busy longest outside the exchange, where the "
        "others wait for it."
    )
    return Section("ranks", "The slowest rank", words, [_picture(run) for run in runs], points=said)


def _picture(run: Run) -> Picture:
    assert run.outcome is not None
    ranks = sorted(run.outcome["by_rank"], key=lambda own: -_busy(own))
    shown = ranks[:_MOST]
    figure, axes = draw.panel("seconds of a step", "", left=66, right=58, height=76 + 26 * len(shown), grid="x")
    ends = np.zeros(len(shown))
    for phase in [*_BUSY, "exchange"]:
        values = np.array([own["phases_s"][phase] for own in shown])
        axes.barh(range(len(shown)), values, left=ends, height=0.62, color=LIGHT[phase], edgecolor="none")
        ends = ends + values
    for place, own in enumerate(shown):
        draw.beside(axes, ends[place], place, f"{100 * own['slowest']:.0f} %")
    axes.set_yticks(range(len(shown)), [f"rank {own['rank']}" for own in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.spines["bottom"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    draw.formatted("x", axes, draw.in_seconds)
    slow, quick = ranks[0], ranks[-1]
    left_out = f" The {_MOST} busiest of {len(ranks)} ranks." if len(ranks) > _MOST else ""
    return Picture(
        f"ranks-{run.name}",
        run.titled("ranks"),
        f"Rank {slow['rank']} is busy for {seconds(_busy(slow))} a step outside the exchange, rank {quick['rank']} for "
        f"{seconds(_busy(quick))}.",
        figure,
        "Medians over steps. Exchange, with the waiting in it, comes last; behind each bar the share of steps in which "
        f"the rank was the slowest.{left_out}",
        Table(
            ["rank", "slowest in", "busy", *PHASES],
            [
                [
                    str(own["rank"]),
                    f"{100 * own['slowest']:.1f} %",
                    seconds(_busy(own)),
                    *(seconds(own["phases_s"][name]) for name in PHASES),
                ]
                for own in ranks
            ],
        ),
    )


def _busy(own: dict[str, dict[str, float]]) -> float:
    return sum(own["phases_s"][name] for name in _BUSY)
