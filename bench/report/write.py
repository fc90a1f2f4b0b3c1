"""The page of ``mpicomp report``: runs in, one file out."""

import base64
import io
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import jinja2
import matplotlib
from mpicomp.bench.measure.run_fields import PHASES, RunObject
from mpicomp.bench.report.comparison import verdict
from mpicomp.bench.report.numbers import amount, digits, seconds
from mpicomp.bench.report.plots import STYLE, chosen, loss, phases, plans_in_words, sent_bytes
from mpicomp.bench.report.runs import Run

from mpicomp._version import __version__
from mpicomp.job import whole_file


def draw_report(runs: list[Run], output: str) -> int:
    """Write the report of one run, or of several compared; return the number of its pictures."""
    with matplotlib.rc_context(STYLE):
        found = [loss(runs), phases(runs), sent_bytes(runs), chosen(runs)]
        pictures = [picture for picture in found if picture is not None]
        sources = {}
        for picture in pictures:
            image = io.BytesIO()
            picture.figure.savefig(image, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
            sources[picture.name] = f"data:image/svg+xml;base64,{base64.b64encode(image.getvalue()).decode()}"
    page = jinja2.Environment(autoescape=True).from_string((files(__package__) / "page.html").read_text("utf-8"))
    text = page.render(
        version=__version__,
        title=_title(runs),
        size=_size(runs),
        verdict=verdict(runs),
        pictures=pictures,
        sources=sources,
        chosen=None if "chosen" in sources else plans_in_words(runs),
        names=[run.name for run in runs],
        rows=[row for name, form in _ROWS.items() if any((row := [name, *map(form, runs)])[1:])],
        verdicts={run.name: run.outcome.verdict for run in runs if run.outcome} if len(runs) > 1 else {},
    )
    with whole_file(output) as file:
        file.write(text)
    return len(pictures)


def plan_name(outcome: RunObject) -> str:
    """Return the policy, or the compressor that was named."""
    return outcome.policy if outcome.policy != "static" else outcome.compressor


def _title(runs: Sequence[Run]) -> str:
    task = next((run.outcome.task for run in runs if run.outcome), None)
    training = f"Training {task}" if task else "Training"
    if len(runs) > 1:
        return f"{training}: {len(runs)} runs compared"
    outcome = runs[0].outcome
    return f"{training}: {runs[0].name}" if outcome is None else f"{training} with {plan_name(outcome)}"


def _size(runs: Sequence[Run]) -> str:
    parts = []
    outcomes = [run.outcome for run in runs if run.outcome]
    if outcomes:
        for key in ("ranks", "hosts"):
            values = sorted({getattr(outcome, key) for outcome in outcomes})
            parts.append(f"{' or '.join(map(str, values))} {key.removesuffix('s') if values == [1] else key}")
        parts.append(f"{outcomes[0].parameters:,} parameters")
    steps = sorted(set(map(_steps, runs)))
    return " · ".join([*parts, f"{' or '.join(f'{count:,}' for count in steps)} steps"])


def _steps(run: Run) -> int:
    return len(run.lines) if run.lines or run.outcome is None else run.outcome.steps


def _field(key: str, form: Callable[[Any], str] = str) -> Callable[[Run], str]:
    def text(run: Run) -> str:
        value = getattr(run.outcome, key, None)
        return "" if value is None else form(value)

    return text


# Settings and outcomes of a run by the names of their rows; rows without any are left out.
_ROWS: dict[str, Callable[[Run], str]] = {
    **{name: _field(name) for name in ("policy", "compressor", "collective", "exchange")},
    "warm-up": _field("warmup"),
    **{name: _field(name) for name in ("ranks", "hosts", "seed")},
    "steps": lambda run: f"{_steps(run):,}",
    "quality": _field("quality", lambda quality: f"{quality['name']} {digits(quality['value'])}"),
    "a step, median": lambda run: seconds(run.step_s),
    **{f"of it {name}": lambda run, name=name: seconds(run.phases_s[name]) for name in PHASES},  # type: ignore[misc]
    "a dense step, estimate": _field("dense_step_s", seconds),
    "an exchange, without waiting": _field("exchange_s", seconds),
    "a dense exchange, without waiting": _field("dense_exchange_s", seconds),
    "choosing plans, a step": _field("choosing_s", seconds),
    "bytes that left a rank, a step": lambda run: amount(run.bytes_per_step[0]),
    "in a dense ring, a step": lambda run: amount(run.bytes_per_step[1]),
    "bytes sent once": _field("once_bytes", amount),
    "gain": _field("gain", digits),
    "steps behind": _field("delay", lambda value: digits(value, 2)),
    "steps skipped, not finite": lambda run: str(sum(line.skipped for line in run.lines) or ""),
    "ranks lost": lambda run: ", ".join(f"{rank} before {line.step}" for line in run.lines for rank in line.lost_ranks),
}
