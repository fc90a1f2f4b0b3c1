"""How soon ``collective="auto"`` notices that the network has changed, and what it then runs."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpicomp.bench.measure.exchanges import Plan, Residuals, Runner, share
from mpicomp.bench.measure.gradients import Gradients

from mpicomp.compressors import Compressor
from mpicomp.transport import Transport

_BEFORE, _AFTER = 10, 5  # steps whose medians are compared
_CHANGED = 1.5  # times longer or shorter: the network has changed
_WINDOW_S = 5.0  # before and after a change is due: the lab's clock began with the launcher, this one with the steps
_AS_GOOD = 1.05  # times the best plan's median: measuring does not tell them apart
_CLOSE = (5, 15)  # steps before and after a change that are shown one by one
_TOGETHER = 200  # steps that are shown in one line elsewhere


@dataclass(frozen=True)
class Step:
    """One step of ``auto``.

    Attributes
    ----------
    at_s : float
        When it began, in seconds since rank 0 began with the steps.
    seconds : float
        Of the slowest rank.
    plan : str
        What was run.
    """

    at_s: float
    seconds: float
    plan: str


@dataclass(frozen=True)
class Phase:
    """What came after a change, or the start.

    Attributes
    ----------
    bandwidth : str
        Of the links.
    first : int or None
        The first step that showed it; None where none did.
    best : str
        The fixed plan that is best there.
    as_good : tuple of str
        All that are within 5 % of it, itself among them.
    steps : int or None
        After how many steps one of these was run first; None where none was.
    share : float
        Of the phase's second half: how many of its steps ran one of these.
    mostly : str or None
        What most steps of that half ran; None where the change was not seen.
    """

    bandwidth: str
    first: int | None
    best: str
    as_good: tuple[str, ...]
    steps: int | None
    share: float
    mostly: str | None


def run_steps(compressor: Compressor, numel: int, seconds: float, transport: Transport) -> list[Step]:
    """Run ``auto`` step after step for so many seconds. Collective; the same on all ranks but for ``at_s``."""
    begin = time.monotonic()
    gradients = Gradients(numel, seed=transport.group.rank)
    runner = Runner(Plan(compressor, "auto"), gradients, transport, Residuals(transport.group.rank), None)
    times: list[float] = []
    while share(np.array([at_s := time.monotonic() - begin]), transport).max() < seconds:
        times.append(at_s)
        runner.step()
    runner.catch_up()
    runner.close()
    return [Step(*own) for own in zip(times, runner.slowest(), runner.ran, strict=True)]


def seen_at(steps: Sequence[Step], due_s: float) -> int | None:
    """Give the first step that shows a change of the network that is due at a time; None where none does.

    It takes longer or shorter than the steps before it, and so do those after it: whatever else the machine does
    hardly lasts that long.

    Examples
    --------
    >>> steps = [Step(at / 10, 0.1 if at < 50 else 0.3, "dense ring") for at in range(100)]
    >>> seen_at(steps, 5.5)
    50
    >>> seen_at(steps[:40], 5.5) is None
    True
    """
    for place in range(_BEFORE, len(steps) - _AFTER + 1):
        if abs(steps[place].at_s - due_s) > _WINDOW_S:
            continue
        before = float(np.median([step.seconds for step in steps[place - _BEFORE : place]]))
        after = float(np.median([step.seconds for step in steps[place : place + _AFTER]]))
        ratios = [steps[place].seconds / before, after / before]
        if min(ratios) > _CHANGED or max(ratios) < 1 / _CHANGED:
            return place
    return None


def phases_of(
    steps: Sequence[Step], bandwidths: Sequence[str], phase_s: float, fixed: Mapping[str, Mapping[str, float]]
) -> list[Phase]:
    """Tell how soon ``auto`` ran the best plan after every change.

    Parameters
    ----------
    steps : sequence of Step
        Of the whole run.
    bandwidths : sequence of str
        Of the phases, each of which lasts ``phase_s`` seconds.
    phase_s : float
        Seconds.
    fixed : mapping
        Of each bandwidth: the median seconds of every fixed plan, by name.
    """
    firsts = [0 if place == 0 else seen_at(steps, place * phase_s) for place in range(len(bandwidths))]
    phases = []
    for place, (bandwidth, first) in enumerate(zip(bandwidths, firsts, strict=True)):
        medians = fixed[bandwidth]
        best = min(medians, key=lambda name: medians[name])
        as_good = tuple(name for name in medians if medians[name] <= _AS_GOOD * medians[best])
        later = [other for other in firsts[place + 1 :] if other is not None]
        own = [] if first is None else steps[first : later[0] if later else None]
        right = [step.plan in as_good for step in own]
        half = right[len(right) // 2 :]
        ran = Counter(step.plan for step in own[len(own) // 2 :]).most_common(1)
        phases.append(
            Phase(
                bandwidth,
                first,
                best,
                as_good,
                right.index(True) if True in right else None,
                sum(half) / len(half) if half else 0.0,
                ran[0][0] if ran else None,
            )
        )
    return phases


def lines_of(steps: Sequence[Step], changes: Sequence[int]) -> Iterator[str]:
    """Show steps: one by one around the changes, many in a line elsewhere."""
    close = {step for change in changes for step in range(change - _CLOSE[0], change + _CLOSE[1])}
    start = 0
    while start < len(steps):
        stop = start + 1
        while start not in close and stop < len(steps) and stop - start < _TOGETHER and stop not in close:
            stop += 1
        own = steps[start:stop]
        ran = ", ".join(
            name if stop - start == 1 else f"{name} ({times})"
            for name, times in Counter(step.plan for step in own).most_common()
        )
        number = f"step {start}" if stop - start == 1 else f"steps {start} to {stop - 1}"
        mark = "  <- the change is seen" if start in changes else ""
        yield f"{own[0].at_s:8.3f} s  {number}: {1e3 * np.median([s.seconds for s in own]):.4g} ms  {ran}{mark}"
        start = stop


def medians_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Give the median seconds of every plan in rows of ``bench collectives``, by its name."""
    return {f"{row['compressor']} {row['collective']}": row["median_s"] for row in rows if row["median_s"] is not None}
