"""How far behind training is: steps of progress that wait in residuals."""

from collections.abc import Sequence

import numpy as np
from mpicomp.bench.report import draw
from mpicomp.bench.report.bins import put_together
from mpicomp.bench.report.picture import Picture, Section, Table
from mpicomp.bench.report.runs import Run
from mpicomp.bench.report.words import digits


def section(runs: Sequence[Run]) -> Section | None:
    """Return the picture of the runs with --metrics; None where nothing is known of any."""
    drawn, said = [], []
    for place, run in enumerate(runs):
        outcome = run.outcome or {}
        delay = outcome.get("delay")
        if run.outcome is not None and delay is None:
            said.append(f"{run.titled('no error feedback')}: what is left out does not come later.")
            continue
        if run.lines is not None and np.isfinite(run.lines.behind).any():
            late = run.lines.behind[run.lines.step.size // 2 :]
            if delay is None:
                delay = float(np.nanmedian(late)) if np.isfinite(late).any() else float("nan")
            drawn.append((place, run))
        if delay is not None:
            said.append(f"{run.titled('in the second half')} {_steps(delay)} behind.")
    if not said:
        return None
    words = "Error feedback keeps in residuals what is not sent, and sends it later."
    return Section("behind", "How far behind", words, [_picture(drawn)] if drawn else [], points=said)


def _steps(value: float) -> str:
    return "no step" if value == 0 else f"{digits(value, 2)} steps"


def _picture(drawn: Sequence[tuple[int, Run]]) -> Picture:
    figure, axes = draw.panel("step", "steps behind", right=106 if len(drawn) > 1 else 18)
    labels, rows, said, highest = [], [], [], 0.0
    largest = 1
    for place, run in drawn:
        lines = run.lines
        assert lines is not None
        bins = put_together(lines.step.size)
        largest = max(largest, bins.largest)
        x = bins.last(lines.step)
        low, middle, high = (bins.each(of, lines.behind) for of in ("min", "median", "max"))
        draw.curve(axes, x, low, middle, high, f"run{place}")
        known = middle[np.isfinite(middle)]
        labels.append((float(known[-1]), run.name, f"run{place}"))
        highest = max(highest, float(known.max()))
        name = "" if run.alone else f"{run.name} "
        said.append(f"{name}{digits(known[0])} at first, {digits(known[-1])} at last, {digits(known.max())} at most")
        rows += [
            [run.name, digits(at, 7), *map(digits, numbers)] for at, *numbers in zip(x, low, middle, high, strict=True)
        ]
    axes.set_ylim(0, 1.15 * highest or 1)
    axes.set_xlim(left=0)
    if len(drawn) > 1:
        draw.label_ends(axes, labels)
    assert drawn[0][1].lines is not None
    bins = put_together(drawn[0][1].lines.step.size)
    spread = "" if largest == 1 else ": line, their median; band, their least to their greatest value"
    return Picture(
        "steps-behind",
        "Steps of progress that wait in residuals",
        f"Steps behind: {'; '.join(said)}.",
        figure,
        f"Energy that waits after a step over the energy that it sent; {bins.in_words()}{spread}.",
        Table(["run", "step", "least", "median", "greatest"], rows),
    )
