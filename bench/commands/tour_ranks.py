"""The trainings of ``mpicomp tour`` on one rank: dense exchange, mpicomp's choice, and LocalMuon, with three bars.

A program of the ranks' that `mpicomp.bench.commands.tour` starts on four hosts, real to MPI or simulated.
"""

import argparse
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpicomp.bench.commands.tour import BANDWIDTH, HOSTS

from mpicomp.cli import run_program
from mpicomp.cli.options import load_task
from mpicomp.errors import MpicompError

_LOOKS = 15  # at held-out data
_SYNC_EVERY = 2  # steps between exchanges of LocalMuon: short runs feel them, and one bit is cheap
_DENSE, _AUTO, _MUON = "dense", "auto", "LocalMuon"
_BAR_WIDTH = 40  # letters


def run(arguments: argparse.Namespace) -> int:
    """Train three times and compare. Collective."""
    # MPI starts before torch is loaded.
    from mpicomp.bench.lab.lab_settings import parse_bandwidth
    from mpicomp.bench.lab.simulated_links import SimulatedLinks

    from mpicomp.mpi.comm import MPITransport

    transport = SimulatedLinks(HOSTS, parse_bandwidth(BANDWIDTH)) if arguments.simulated else MPITransport()
    from mpicomp.bench.measure.metrics import MetricsWriter
    from mpicomp.bench.train import Stopped, train_measured

    first = transport.group.rank == 0
    finished: list[tuple[str, Any, str]] = []  # name, training, file of its lines on rank 0
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in _trainings(arguments.steps):
            if first:
                print(name, flush=True)
            path = str(Path(folder, f"{len(finished)}.jsonl"))
            with MetricsWriter(path if first else None) as metrics:
                task = load_task("tour", arguments, None, transport.group)
                trained = train_measured(task, settings, transport, _progress(first), metrics)
            assert not isinstance(trained, Stopped)
            finished.append((name, trained, path))
        if first:
            _show(finished, arguments.report, arguments.simulated)
    transport.close()
    return 0


def _trainings(steps: int) -> Iterator[tuple[str, Any]]:
    from mpicomp.bench.train import Settings
    from mpicomp.bench.training import MUON_COMPRESSOR, MUON_UPDATES

    from mpicomp.compressors import Dense, get_compressor
    from mpicomp.policies import get_policy

    words: dict[str, Any] = {"steps": steps, "seed": 0, "evaluate_every": max(1, steps // _LOOKS), "probes": False}
    yield _DENSE, Settings(Dense(), "auto", get_policy("static"), **words)
    yield _AUTO, Settings(None, "auto", get_policy("auto"), **words)
    updates = MUON_UPDATES | {"sync_every": _SYNC_EVERY}
    yield _MUON, Settings(get_compressor(MUON_COMPRESSOR), "auto", get_policy("static"), updates=updates, **words)


def _progress(visible: bool) -> Any:
    from mpicomp.bench.measure.progress import Progress

    class TourProgress(Progress):
        wire_bytes = 0.0

        def _text(self, loss: float, seconds: float, record: Any) -> str:
            # Seconds are in the table only: its rows leave out the compilation of the first steps.
            self.wire_bytes += record.wire_bytes
            return f"loss {loss:.2f}  {self.wire_bytes / 1e6:,.1f} MB"

        def evaluating(self) -> None:
            """Print nothing: the next training begins."""

    return TourProgress(visible)


def _show(finished: list[tuple[str, Any, str]], report: str, is_simulated: bool) -> None:
    from mpicomp.bench.report.comparison import race
    from mpicomp.bench.report.numbers import amount, digits, seconds, times
    from mpicomp.bench.report.runs import Run, read_lines
    from mpicomp.bench.report.write import draw_report
    from mpicomp.bench.train import judge
    from rich.bar import Bar
    from rich.console import Console
    from rich.table import Table

    dense, runs = finished[0][1].run, []
    quality = dense.quality["name"]
    for name, trained, path in finished:
        trained.run.verdict = judge(trained, None if trained.run is dense else dense)
        runs.append(Run(name, trained.run, read_lines(path)))
    found = race(runs)
    if found is None:
        raise MpicompError(f"tour: {quality} is not finite in two of the trainings, so that nothing can be compared")
    needed = {run.name: s for run, s in found.seconds}  # infinite where a run did not get there
    ended = {run.name: [line.quality for line in run.lines if line.quality is not None][-1] for run in runs}
    drawn = {run.name: min(needed[run.name], float(run.elapsed[-1])) for run in runs}
    table = Table("", "", "seconds", "bytes of a host", "in the end", box=None, pad_edge=False)
    parts = []
    for name, outcome in ((name, trained.run) for name, trained, _ in finished):
        gets_there = math.isfinite(needed[name])
        bar = Bar(max(drawn.values()), 0, drawn[name], width=_BAR_WIDTH)
        reached = f"{needed[name]:.1f}" if gets_there else "not reached"
        table.add_row(name, bar, reached, amount(outcome.wire_bytes), f"{ended[name]:.3f}")
        part = f"{name} {f'took {seconds(needed[name])}' if gets_there else 'did not get there'}"
        if outcome is not dense and gets_there:
            ratio = needed[_DENSE] / needed[name]
            part += f" ({times(ratio)} faster)" if ratio >= 1 else f" ({times(1 / ratio)} as long)"
        if outcome is not dense and outcome.wire_bytes:
            part += f", sent {times(dense.wire_bytes / outcome.wire_bytes)} fewer bytes"
        parts.append(f"{part} and ended at {digits(ended[name], 4)}")
    links = f"{BANDWIDTH} a host" + (", simulated links" if is_simulated else "")
    print(f"\nSeconds to a {quality} of {digits(found.level)}, four hosts, {links}:", flush=True)
    Console().print(table)
    print(f"\nTo that {quality} {'; '.join(parts)}.", flush=True)
    draw_report(runs, report)
    print(f"Curves, phases and chosen plans: {report}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="mpicomp tour")
    parser.add_argument("task")
    parser.add_argument("steps", type=int)
    parser.add_argument("report")
    parser.add_argument("--simulated", action="store_true")
    parser.set_defaults(seed=0)
    raise SystemExit(run_program(parser.parse_args, run))
