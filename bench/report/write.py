"""``mpicomp report``: files of runs in, one page out, and pictures for papers where they are asked for."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from mpicomp.bench.report import draw
from mpicomp.bench.report.chosen import chosen
from mpicomp.bench.report.learning import loss, loss_curve, steps_behind
from mpicomp.bench.report.runs import Run, read_lines, read_runs
from mpicomp.bench.report.section_parts import Array, Table, amount, capital, digits, listed, seconds, times
from mpicomp.bench.report.step_time import phases, predicted, ranks

from mpicomp._version import __version__
from mpicomp.system import whole_file

_WAY_FRACTION = 0.95  # of the way that the reference went, which the others are timed over
_MIN_LOOKS = 5  # at held-out data; with fewer the training loss is compared


def verdict(runs: Sequence[Run]) -> list[str]:
    """Return sentences, the most important one first."""
    if len(runs) == 1:
        return _single(runs[0])
    return [sentence for sentence in (_race(runs), _final_quality(runs), _costs(runs), _differences(runs)) if sentence]


def _single(run: Run) -> list[str]:
    if run.outcome is not None:
        return [f"{capital(part)}." for part in str(run.outcome["verdict"]).split("; ", 1)]
    sent, dense = run.bytes_per_step
    fewer = f", {times(dense / sent)} fewer than with a dense ring" if sent else ""
    return [
        f"A step took {seconds(run.step_s)} on rank 0, and {amount(sent)} left it{fewer}.",
        "Whether that paid is in the file of train --json, which was not named.",
    ]


@dataclass
class _Way:
    """Loss, or negative quality, of a run over its seconds."""

    run: Run
    values: Array
    elapsed: Array

    def seconds_to(self, level: float) -> float:
        """Return the seconds until it reaches a level; infinity if it does not."""
        reached = np.flatnonzero(self.values <= level)
        return float(self.elapsed[reached[0]]) if reached.size else math.inf


@dataclass
class Race:
    """Seconds until each run reaches what the reference went nearly all the way to."""

    reference: Run  # the dense run, else the one that ends best
    level: float
    seconds: list[tuple[Run, float]]  # the fastest first; infinity where a run does not reach it
    quality_name: str


def race(runs: Sequence[Run]) -> Race | None:
    """Return who comes first, by quality on held-out data, or by training loss; None without two curves."""
    runs = [run for run in runs if run.recorded]
    by_quality = all(run.outcome and np.isfinite(run.lines.quality).sum() >= _MIN_LOOKS for run in runs)
    sign = -1.0 if by_quality and runs and runs[0].quality[1] == "higher" else 1.0
    ways = []
    for run in runs:
        if by_quality:
            seen = np.isfinite(run.lines.quality)
            ways.append(_Way(run, sign * run.lines.quality[seen], run.elapsed[seen]))
        else:
            curve = loss_curve(run)
            ways.append(_Way(run, curve.middle, curve.x))
    sound = [way for way in ways if np.isfinite(way.values[[0, -1]]).all()]
    if len(sound) < 2:
        return None
    reference = next((way for way in sound if way.run.is_dense), min(sound, key=lambda way: way.values[-1]))
    first, last = reference.values[0], float(np.median(reference.values[-max(1, reference.values.size // 10) :]))
    level = first + _WAY_FRACTION * (last - first)
    taken = sorted(((way.run, way.seconds_to(level)) for way in ways), key=lambda pair: pair[1])
    return Race(reference.run, sign * level, taken, runs[0].quality[0] if by_quality else "training loss")


def _race(runs: Sequence[Run]) -> str | None:
    found = race(runs)
    if found is None or math.isinf(found.seconds[0][1]):
        return None
    first, best = found.seconds[0]
    parts = [
        f"{first.name} comes first: it reaches a {found.quality_name} of {digits(found.level)} after {seconds(best)}, "
        f"{100 * _WAY_FRACTION:.0f} % of the way that {found.reference.name} went"
    ]
    for run, taken in found.seconds[1:]:
        if math.isfinite(taken):
            longer = f", {times(taken / best)} as long" if taken > 1.05 * best else ""
            parts.append(f"{run.name} needs {seconds(taken)}{longer}")
    never = [run.name for run, taken in found.seconds if math.isinf(taken)]
    if never:
        parts.append(f"{listed(never)} {'do' if len(never) > 1 else 'does'} not reach it")
    return "; ".join(parts) + "."


def _final_quality(runs: Sequence[Run]) -> str | None:
    values = {run.name: float(run.outcome["quality"]["value"]) for run in runs if run.outcome}
    if len(values) < 2:
        return None
    name, better = next(run.quality for run in runs if run.outcome)
    sign = -1 if better == "higher" else 1
    order = sorted(values, key=lambda run: (not math.isfinite(values[run]), sign * values[run]))
    reached = listed([f"{run} {digits(values[run])}" for run in order])
    return f"{capital(name)} in the end, {better} is better: {reached}."


def _costs(runs: Sequence[Run]) -> str:
    order = sorted(runs, key=lambda run: run.step_s)
    parts = [f"{run.name} {seconds(run.step_s)} and {amount(run.bytes_per_step[0])}" for run in order]
    return f"A step takes, and sends from a rank: {listed(parts)}."


def _differences(runs: Sequence[Run]) -> str:
    """Return the settings that differ besides what is compared, and how much one run of each can show."""
    differ = []
    for key in ("ranks", "shard", "hosts", "steps", "seed", "exchange", "lr_scale", "shards"):
        values = {run.name: run.outcome[key] for run in runs if run.outcome and key in run.outcome}
        if len(set(map(str, values.values()))) > 1:
            differ.append(f"{key} ({', '.join(f'{name} {value}' for name, value in values.items())})")
    note = "One run of each: only runs of other seeds show what differs by chance."
    return f"The runs differ in {listed(differ)}, too. {note}" if differ else note


def write_report(paths: Sequence[str], output: str, folder: str | None = None) -> int:
    """Write the report of one run, or of several compared."""
    return draw_report(read_runs(paths), output, folder)


def report_of_run(
    outcome: dict[str, Any], lines: str | None, output: str, dense: tuple[dict[str, Any], str | None] | None = None
) -> int:
    """Write the report of a run that has just ended."""
    if dense is None:
        found = [(str(outcome["compressor"]), outcome, lines)]
    else:
        found = [(_plan_name(outcome), outcome, lines), ("dense", *dense)]
    runs = [Run(name, result, read_lines(path) if path else None, dense is None) for name, result, path in found]
    return draw_report(runs, output, None)


def draw_report(runs: list[Run], output: str, folder: str | None) -> int:
    """Write the report of runs that have been read; see `write_report`."""
    found = [loss(runs), phases(runs), chosen(runs), steps_behind(runs), predicted(runs), ranks(runs)]
    sections = [section for section in found if section is not None]
    drawings: dict[str, str] = {}
    for picture in (picture for section in sections for picture in section.pictures):
        name = re.sub(r"[^a-z0-9]+", "-", picture.name.lower()).strip("-")
        picture.name = name if name not in drawings else f"{name}-{len(drawings)}"
        svg = draw.svg(picture.figure)
        drawings[picture.name] = draw.inline(svg, picture.name)
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, f"{picture.name}.svg").write_text(draw.on_white(svg), encoding="utf-8")
            draw.png(picture.figure, str(Path(folder, f"{picture.name}.png")))
    verdicts = {run.name: run.outcome["verdict"] for run in runs if run.outcome} if len(runs) > 1 else {}
    page = jinja2.Environment(autoescape=True).from_string((files(__package__) / "page.html").read_text("utf-8"))
    text = page.render(
        version=__version__,
        light=draw.LIGHT,
        dark=draw.DARK,
        width=draw.WIDTH,
        title=_title(runs),
        size=_size(runs),
        verdict=verdict(runs),
        facts=_facts(runs[0]) if len(runs) == 1 else [],
        sections=sections,
        drawings=drawings,
        runs=_settings(runs),
        verdicts=verdicts,
    )
    with whole_file(output) as file:
        file.write(text)
    return len(drawings)


def _plan_name(outcome: dict[str, Any]) -> str:
    return str(outcome["policy"] if outcome["policy"] != "static" else outcome["compressor"])


def _title(runs: Sequence[Run]) -> str:
    task = next((str(run.outcome["task"]) for run in runs if run.outcome), None)
    what = f"Training {task}" if task else "Training"
    if len(runs) > 1:
        return f"{what}: {len(runs)} runs compared"
    outcome = runs[0].outcome
    return f"{what}: {runs[0].name}" if outcome is None else f"{what} with {_plan_name(outcome)}"


def _size(runs: Sequence[Run]) -> str:
    parts = []
    outcomes = [run.outcome for run in runs if run.outcome]
    if outcomes:
        for key in ("ranks", "hosts"):
            values = sorted({int(outcome[key]) for outcome in outcomes})
            parts.append(f"{' or '.join(map(str, values))} {key.removesuffix('s') if values == [1] else key}")
        if "parameters" in outcomes[0]:
            parts.append(f"{outcomes[0]['parameters']:,} parameters")
    steps = sorted({run.steps for run in runs})
    return " · ".join([*parts, f"{' or '.join(f'{count:,}' for count in steps)} steps"])


def _facts(run: Run) -> list[tuple[str, str, str]]:
    outcome, lines = run.outcome or {}, run.recorded
    dense_s = outcome.get("dense_step_s")
    estimate = "" if dense_s is None else f"about {seconds(dense_s)} with dense exchange"
    facts = [("a step, median", seconds(run.step_s), estimate)]
    if outcome:
        quality = outcome["quality"]
        facts.append((quality["name"], digits(quality["value"]), f"{quality['better']} is better"))
    sent, dense = run.bytes_per_step
    fewer = f"{times(dense / sent)} fewer than a dense ring" if 0 < sent < dense else f"{amount(dense)} in a dense ring"
    facts.append(("bytes that left a rank in a step", amount(sent), fewer if dense else ""))
    if outcome.get("delay") is not None:
        facts.append(("behind", f"{digits(outcome['delay'], 2)} steps", "of progress wait in residuals"))
    if lines and lines.skipped:
        facts.append(("skipped", f"{len(lines.skipped)} steps", "a gradient was not finite"))
    if lines and lines.lost:
        lost = ", ".join(f"rank {rank} before step {step}" for step, rank in lines.lost)
        facts.append(("lost", f"{len(lines.lost)} ranks", lost))
    return facts


def _settings(runs: Sequence[Run]) -> Table:
    """Return the settings and outcomes of runs, a column a run; rows without any are left out."""
    columns = [_column(run) for run in runs]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return Table(["", *(run.name for run in runs)], [row for row in rows if any(row[1:])])


def _column(run: Run) -> dict[str, str]:
    outcome = run.outcome or {}
    quality = outcome.get("quality")
    sent, dense = run.bytes_per_step

    def text(key: str, form: Any = str) -> str:
        value = outcome.get(key)
        return "" if value is None else form(value)

    return {
        "policy": text("policy"),
        "compressor": text("compressor"),
        "collective": text("collective"),
        "exchange": text("exchange"),
        "warm-up": text("warmup"),
        "ranks": text("ranks", "{:,}".format),
        "hosts": text("hosts", "{:,}".format),
        "seed": text("seed"),
        "steps": f"{run.steps:,}",
        "quality": "" if quality is None else f"{quality['name']} {digits(quality['value'])}",
        "a step, median": seconds(run.step_s),
        "a dense step, estimate": text("dense_step_s", seconds),
        "an exchange, without waiting": text("exchange_s", seconds),
        "a dense exchange, without waiting": text("dense_exchange_s", seconds),
        "choosing plans, a step": text("choosing_s", seconds),
        "bytes that left a rank, a step": amount(sent),
        "in a dense ring, a step": amount(dense),
        "bytes sent once": text("once_bytes", amount),
        "gain": text("gain", digits),
        "steps behind": text("delay", lambda value: digits(value, 2)),
    }
