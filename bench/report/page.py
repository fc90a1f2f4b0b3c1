"""The page: words first, then pictures with their text and their tables. It runs no script and asks for no file."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files

from mpicomp.bench.report import draw
from mpicomp.bench.report.palette import DARK, LIGHT
from mpicomp.bench.report.picture import Picture, Section, Table
from mpicomp.bench.report.runs import Run
from mpicomp.bench.report.words import amount, digits, seconds, times

from mpicomp._version import __version__

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(runs: Sequence[Run], said: Sequence[str], sections: Sequence[Section], pictures: Mapping[str, str]) -> str:
    """Return the report as HTML.

    Parameters
    ----------
    runs : sequence of Run
    said : sequence of str
        The verdict, a sentence each.
    sections : sequence of Section
    pictures : mapping of str to str
        SVG by the names of pictures.
    """
    title = _title(runs)
    links = "".join(f'<li><a href="#{own.anchor}">{escape(own.title)}</a></li>' for own in [*sections, _RUNS])
    verdict = "".join(f"<p>{escape(sentence)}</p>" for sentence in said)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="generator" content="mpicomp {__version__}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{_style()}
</style>
</head>
<body>
<a class="skip" href="#main">Skip to the pictures</a>
<header>
<h1>{escape(title)}</h1>
<p class="what">{escape(_what(runs))}</p>
<div class="verdict" role="region" aria-label="Verdict">{verdict}</div>
{_facts(runs[0]) if len(runs) == 1 else ""}
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main id="main">
{"".join(_section(own, pictures) for own in sections)}
{_runs(runs)}
</main>
<footer><p>Written by mpicomp report, version {__version__}; docs/report.md explains it.</p></footer>
</body>
</html>
"""


_RUNS = Section("runs", "The runs in numbers", "")


def _style() -> str:
    light = "".join(f"--{token}: {colour}; " for token, colour in LIGHT.items())
    dark = "".join(f"--{token}: {colour}; " for token, colour in DARK.items())
    css = (files(__package__) / "page.css").read_text(encoding="utf-8")
    return f":root {{ {light}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n{css}"


def _title(runs: Sequence[Run]) -> str:
    task = next((str(run.outcome["task"]) for run in runs if run.outcome), None)
    what = f"Training {task}" if task else "Training"
    if len(runs) > 1:
        return f"{what}: {len(runs)} runs compared"
    outcome = runs[0].outcome
    if outcome is None:
        return f"{what}: {runs[0].name}"
    named = outcome["policy"] if outcome["policy"] != "static" else outcome["compressor"]
    return f"{what} with {named}"


def _what(runs: Sequence[Run]) -> str:
    parts = []
    told = [run.outcome for run in runs if run.outcome]
    if told:
        for key, one, many in (("ranks", "rank", "ranks"), ("hosts", "host", "hosts")):
            values = sorted({int(own[key]) for own in told})
            parts.append(f"{' or '.join(map(str, values))} {one if values == [1] else many}")
        if "parameters" in told[0]:
            parts.append(f"{told[0]['parameters']:,} parameters")
    steps = sorted({run.steps for run in runs})
    parts.append(f"{' or '.join(f'{own:,}' for own in steps)} steps")
    return " · ".join(parts)


def _facts(run: Run) -> str:
    own, dense = run.bytes_a_step
    facts = [("a step, median", seconds(run.step_s), "")]
    if run.outcome is not None:
        estimate = run.outcome.get("dense_step_s")
        if estimate is not None:
            facts[0] = (*facts[0][:2], f"about {seconds(estimate)} with dense exchange")
        quality = run.outcome["quality"]
        facts.append((quality["name"], digits(quality["value"]), f"{quality['better']} is better"))
    fewer = f"{times(dense / own)} fewer than a dense ring" if 0 < own < dense else f"{amount(dense)} in a dense ring"
    facts.append(("bytes that left a rank in a step", amount(own), fewer if dense else ""))
    if run.outcome is not None and run.outcome.get("delay") is not None:
        facts.append(("behind", f"{digits(run.outcome['delay'], 2)} steps", "of progress wait in residuals"))
    lines = run.lines
    if lines is not None and lines.skipped:
        facts.append(("skipped", f"{len(lines.skipped)} steps", "a gradient was not finite"))
    if lines is not None and lines.lost:
        lost = ", ".join(f"rank {rank} before step {step}" for step, rank in lines.lost)
        facts.append(("lost", f"{len(lines.lost)} ranks", lost))
    cells = [
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in facts
    ]
    return f'<dl class="facts">{"".join(cells)}</dl>'


def _section(own: Section, pictures: Mapping[str, str]) -> str:
    figures = "".join(_figure(picture, pictures[picture.name]) for picture in own.pictures)
    grid = f'<div class="grid">{figures}</div>' if figures else ""
    return (
        f'<section id="{own.anchor}" aria-labelledby="{own.anchor}-title">'
        f'<h2 id="{own.anchor}-title">{escape(own.title)}</h2>\n{_words(own)}{_key(own)}{grid}</section>\n'
    )


def _words(own: Section) -> str:
    points = own.points
    listed = f"<ul>{''.join(f'<li>{escape(point)}</li>' for point in points)}</ul>" if len(points) > 1 else ""
    words = own.words if listed or not points else f"{own.words} {points[0]}"
    return f"<p>{escape(words.strip())}</p>{listed}\n"


def _key(own: Section) -> str:
    if not own.key:
        return ""
    items = []
    for token, words in own.key:
        name, _, meaning = words.partition(": ")
        rect = f'<rect width="12" height="12" rx="2" fill="var(--{token})"/>'
        square = f'<svg viewBox="0 0 12 12" aria-hidden="true">{rect}</svg>'
        items.append(f"<li>{square}<b>{escape(name)}</b> {escape(meaning)}</li>")
    return f'<ul class="key" aria-label="Colours">{"".join(items)}</ul>'


def _figure(picture: Picture, svg: str) -> str:
    name = picture.name
    inside = draw.inline(svg, name)
    inside = inside[inside.index(">") + 1 :]
    height = round(72 * picture.figure.get_figheight())
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {draw.WIDTH} {height}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc"><title id="{name}-title">{escape(picture.title)}</title>'
        f'<desc id="{name}-desc">{escape(picture.finding)}</desc>'
    )
    table = "" if picture.table is None else _details(picture)
    return (
        f"<figure>\n<h3>{escape(picture.title)}</h3>\n{head}{inside}\n"
        f"<figcaption><strong>{escape(picture.finding)}</strong> {escape(picture.caption)}</figcaption>\n"
        f"{table}</figure>\n"
    )


def _details(picture: Picture) -> str:
    assert picture.table is not None
    words = f"Numbers: {picture.title}"
    return f"<details><summary>{escape(words)}</summary>{_table(picture.table, words)}</details>\n"


def _table(table: Table, words: str) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>\n'
        for row in table.rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(words, quote=True)}"><table><thead><tr>'
        f"{head}</tr></thead><tbody>\n{body}</tbody></table></div>"
    )


def _runs(runs: Sequence[Run]) -> str:
    """Return what was asked for and what came out of it, a column a run, and each run's own verdict."""
    rows = []
    for words, value in _ROWS.items():
        cells = [value(run) for run in runs]
        if any(cells):
            rows.append([words, *cells])
    table = _table(Table(["", *(run.name for run in runs)], rows), "The runs in numbers")
    verdicts = "".join(
        f"<p><strong>{escape(run.name)}</strong>: {escape(str(run.outcome['verdict']))}.</p>"
        for run in runs
        if run.outcome is not None and len(runs) > 1
    )
    if verdicts:
        verdicts = f"<h3>What each run said of itself</h3>{verdicts}"
    return (
        f'<section id="runs" class="all" aria-labelledby="runs-title"><h2 id="runs-title">{_RUNS.title}</h2>'
        f"{table}{verdicts}</section>"
    )


def _asked(key: str) -> Callable[[Run], str]:
    def value(run: Run) -> str:
        found = None if run.outcome is None else run.outcome.get(key)
        return "" if found is None else f"{found:,}" if isinstance(found, int) else str(found)

    return value


def _found(key: str, form: Callable[[float], str]) -> Callable[[Run], str]:
    def value(run: Run) -> str:
        found = None if run.outcome is None else run.outcome.get(key)
        return "" if found is None else form(found)

    return value


def _quality(run: Run) -> str:
    return "" if run.outcome is None else f"{run.outcome['quality']['name']} {digits(run.outcome['quality']['value'])}"


_ROWS: dict[str, Callable[[Run], str]] = {
    "policy": _asked("policy"),
    "compressor": _asked("compressor"),
    "collective": _asked("collective"),
    "exchange": _asked("exchange"),
    "warm-up": _asked("warmup"),
    "ranks": _asked("ranks"),
    "hosts": _asked("hosts"),
    "seed": lambda run: "" if run.outcome is None else str(run.outcome["seed"]),
    "steps": lambda run: f"{run.steps:,}",
    "quality": _quality,
    "a step, median": lambda run: seconds(run.step_s),
    "a dense step, estimate": _found("dense_step_s", seconds),
    "an exchange, without waiting": _found("exchange_s", seconds),
    "a dense exchange, without waiting": _found("dense_exchange_s", seconds),
    "choosing plans, a step": _found("choosing_s", seconds),
    "bytes that left a rank, a step": lambda run: amount(run.bytes_a_step[0]),
    "in a dense ring, a step": lambda run: amount(run.bytes_a_step[1]),
    "bytes sent once": _found("once_bytes", amount),
    "gain": _found("gain", digits),
    "steps behind": _found("delay", lambda value: digits(value, 2)),
}
