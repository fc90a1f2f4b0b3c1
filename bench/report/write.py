"""``mpicomp report``: files of runs in, one page out, and pictures for papers where they are asked for."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpicomp.bench.report import behind, chosen, draw, loss, phases, predicted, ranks
from mpicomp.bench.report.lines import read_lines
from mpicomp.bench.report.page import page
from mpicomp.bench.report.runs import Run, read_runs
from mpicomp.bench.report.verdict import verdict

from mpicomp.system.files import whole_file


def write_report(paths: Sequence[str], output: str, folder: str | None = None) -> int:
    """Write the report of one run, or of several compared.

    Parameters
    ----------
    paths : sequence of str
        Files of ``train --json`` and ``--metrics``; those of the same name before the ending are one run.
    output : str
        The page, HTML. An old file is overwritten.
    folder : str or None
        Where each picture is written as SVG and as PNG, too. Made where it is not there.

    Returns
    -------
    int
        Number of pictures.

    Raises
    ------
    ConfigurationError
        See `read_runs`.
    OSError
        Where something cannot be written.
    """
    return draw_report(read_runs(paths), output, folder)


def report_of_run(
    outcome: dict[str, Any], lines: str | None, output: str, dense: tuple[dict[str, Any], str | None] | None = None
) -> int:
    """Write the report of a run that has just ended.

    Parameters
    ----------
    outcome : dict
        The object of --json.
    lines : str or None
        The file of --metrics; None where this rank has not written it, since the one that did has died.
    output : str
        The page.
    dense : (dict, str or None) or None
        The same of a run with dense exchange, with which this one is compared.
    """
    if dense is None:
        found = [(str(outcome["compressor"]), outcome, lines)]
    else:
        named = outcome["policy"] if outcome["policy"] != "static" else outcome["compressor"]
        found = [(str(named), outcome, lines), ("dense", *dense)]
    runs = [
        Run(name, own, None if path is None else read_lines(path), alone=dense is None) for name, own, path in found
    ]
    return draw_report(runs, output, None)


def draw_report(runs: list[Run], output: str, folder: str | None) -> int:
    """Write the report of runs that have been read; see `write_report`."""
    found = [loss.section(runs), phases.section(runs), chosen.section(runs), behind.section(runs)]
    found += [predicted.section(runs), ranks.section(runs)]
    sections = [own for own in found if own is not None]
    drawn: dict[str, str] = {}
    for section in sections:
        for picture in section.pictures:
            name = re.sub(r"[^a-z0-9]+", "-", picture.name.lower()).strip("-")
            picture.name = name if name not in drawn else f"{name}-{len(drawn)}"
            drawn[picture.name] = draw.svg(picture.figure)
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
                Path(folder, f"{picture.name}.svg").write_text(draw.on_white(drawn[picture.name]), encoding="utf-8")
                draw.png(picture.figure, str(Path(folder, f"{picture.name}.png")))
    with whole_file(output) as file:
        file.write(page(runs, verdict(runs), sections, drawn))
    return len(drawn)
