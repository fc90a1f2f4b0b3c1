"""The simulator's clock and SimGrid, with the same rounds: ``python studies/simulated_by_simgrid.py``.

SimGrid (Casanova, Giersch, Legrand, Quinson and Suter 2014, doi:10.1016/j.jpdc.2014.06.008) simulates each message of
each rank, and shares links among those that are on them. It comes with Debian's ``python3-simgrid``, for the system's
Python.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from messages import steps, ways_of
from mpicomp.bench.simulate.clock import Clock
from mpicomp.bench.simulate.topology import Links, Topology

from mpicomp.cli import run_program
from mpicomp.collectives import Scheme, bind
from mpicomp.compressors import get_compressor
from mpicomp.cost import Network
from mpicomp.errors import ConfigurationError, MpicompError
from mpicomp.rounds import HOST, WORLD, Round, layout_groups

_STUDY = "simulated_by_simgrid"
_ACTORS = Path(__file__).with_name("simgrid_actors.py")
SETTINGS = ("network/model:CM02", "network/TCP-gamma:1e18", "network/weight-S:0", "network/crosstraffic:0")
"""Of SimGrid: links as they are, no windows of TCP, no acknowledgements, even shares."""

PLANS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("dense ring", {"id": "dense"}, "ring"),
    ("dense recursive-doubling", {"id": "dense"}, "recursive-doubling"),
    ("dense scatter-reduce", {"id": "dense"}, "scatter-reduce"),
    ("dense parameter-server", {"id": "dense"}, "parameter-server"),
    ("topk 0.01 allgather", {"id": "topk", "ratio": 0.01}, "allgather"),
    ("topk 0.01 star-topk", {"id": "topk", "ratio": 0.01}, "star-topk:allreduce"),
)
RANKS = (2, 4, 8, 16, 64)
PER_HOST = (1, 2)
NUMEL = 1 << 22
INSIDE = 2e-6, 1 / 5e9
"""Seconds of latency and of a byte in a host."""
_LATER = 1 << 30  # number of a step, as the clock takes it


@dataclass(frozen=True)
class Wires:
    """Links between hosts: seconds of latency, bits a second of a host's link and of the switch, None for any."""

    latency: float
    bandwidth: float
    switch: float | None = None

    def __str__(self) -> str:
        """Write them as for `mpicomp simulate`."""
        switch = "" if self.switch is None else f", switch {self.switch / 1e6:g}mbit"
        return f"{self.bandwidth / 1e6:g}mbit/{self.latency * 1e6:g}us{switch}"


WIRES = (Wires(100e-6, 100e6), Wires(20e-6, 10e9), Wires(100e-6, 100e6, 400e6))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"studies/{_STUDY}.py", description=__doc__)
    parser.add_argument("--python", default="/usr/bin/python3", help="that has SimGrid (%(default)s)")
    parser.add_argument("--rounds", metavar="F", help="keep the file of rounds")
    parser.add_argument("--ranks", help="some of %(default)s", default=",".join(map(str, RANKS)))
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Simulate by both, and print the tables."""
    ranks = [int(word) for word in arguments.ranks.split(",")]
    check_simgrid(arguments.python)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(arguments.rounds or Path(folder) / "rounds.json")
        print("\n".join(table(compare(ranks, path, arguments.python))))
    return 0


def check_simgrid(python: str) -> None:
    """Raise where a Python has no SimGrid."""
    try:
        found = subprocess.run([python, "-c", "import simgrid"], capture_output=True, check=False).returncode == 0
    except OSError:
        found = False
    if not found:
        raise ConfigurationError(
            f"{_STUDY}: '{python}' has no SimGrid; install Debian's python3-simgrid, or name another with --python"
        )


def compare(ranks: Sequence[int], path: Path, python: str) -> list[dict[str, Any]]:
    """Return a row for each plan, number of ranks and network: what the clock predicts, and what SimGrid does."""
    rows, cases = [], []
    for row, tried in plans(ranks):
        rows.append(row)
        cases += [case | {"row": len(rows) - 1} for case in tried]
    for case, seconds in zip(cases, simulate(cases, path, python), strict=True):
        row = rows[case["row"]]
        if seconds < row.get("simgrid_s", math.inf):
            row |= {"simgrid_s": seconds, "way": case["way"], "ratio": row["predicted_s"] / seconds}
    return rows


def simulate(cases: Sequence[dict[str, Any]], path: Path, python: str) -> list[float]:
    """Write cases to a file, and return SimGrid's seconds of each."""
    path.write_text(json.dumps({"settings": SETTINGS, "cases": cases}) + "\n")
    done = subprocess.run([python, str(_ACTORS), str(path)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MpicompError(f"{_STUDY}: SimGrid ended with status {done.returncode}: {done.stderr[-500:]}")
    return read_seconds(done.stdout, len(cases))


def plans(ranks: Sequence[int]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield each plan's row, and cases for SimGrid: one for each way in which a library may make its operations."""
    for title, config, collective in PLANS:
        scheme = bind(get_compressor(config), collective)
        for size in ranks:
            for per_host in PER_HOST:
                for wires in WIRES if size > per_host else WIRES[:1]:
                    predicted_s = Clock(_topology(size, per_host, wires)).seconds(scheme, NUMEL, np.dtype(np.float32))
                    row = {
                        "plan": title,
                        "ranks": size,
                        "per_host": per_host,
                        "wires": str(wires),
                        "predicted_s": predicted_s,
                    }
                    yield row, cases_of(scheme, size, per_host, wires)


def _topology(ranks: int, per_host: int, wires: Wires) -> Topology:
    network = Network(2)  # whose factors are 1: operations take what formulas say
    network.set_link(WORLD, wires.latency, 8 / wires.bandwidth, 0.1)
    network.set_link(HOST, *INSIDE, 0.1)
    links = Links(switch=None if wires.switch is None else 8 / wires.switch)
    return Topology(ranks, per_host, network, measured_ranks=4, links=links)


def cases_of(scheme: Scheme[Any], ranks: int, per_host: int, wires: Wires) -> list[dict[str, Any]]:
    """Return what SimGrid is to simulate, as JSON.

    ``layout`` is the host of each rank; ``between`` and ``inside`` are a latency and bytes a second of messages
    between two hosts and in one, ``switch`` bytes a second of all between hosts, or null. ``tasks`` are each rank's.
    A task has ``steps``, of messages that leave (``[rank, bytes]``) and ranks from whom some come. It is made
    ``now``, when all before are done; ``next``, when but one of those before is not; or in the ``background``.
    """
    layout = [rank // per_host for rank in range(ranks)]
    rounds = [
        scheme.rounds(NUMEL, np.dtype(np.float32), layout_groups(layout, rank)[0], _LATER) for rank in range(ranks)
    ]
    shared = {
        "layout": layout,
        "between": [wires.latency, wires.bandwidth / 8],
        "inside": [INSIDE[0], 1 / INSIDE[1]],
        "switch": None if wires.switch is None else wires.switch / 8,
    }
    cases = []
    for way in ways_of(task.operation for task in rounds[0]):
        tasks = [[_task(task, layout, rank, way) for task in of_rank] for rank, of_rank in enumerate(rounds)]
        words = [f"{operation} {name}" for operation, name in way.items() if operation != "sendrecv"]
        cases.append(shared | {"way": ", ".join(words), "tasks": tasks})
    return cases


def _task(task: Round, layout: Sequence[int], rank: int, way: dict[str, str]) -> dict[str, Any]:
    members = layout_groups(layout, rank)[1][task.group]
    made = steps(task, members.index(rank), len(members), way[task.operation])
    when = "now" if not task.background else "next" if task.operation == "sendrecv" else "background"
    in_all = [
        [[[members[peer], nbytes] for peer, nbytes in leaving], [members[peer] for peer in coming]]
        for leaving, coming in made
    ]
    return {"when": when, "steps": in_all}


def read_seconds(text: str, number: int) -> list[float]:
    """Read what `simgrid_actors` prints: so many numbers above zero."""
    try:
        seconds = [float(json.loads(line)) for line in text.splitlines()]
    except (TypeError, ValueError) as error:
        raise MpicompError(f"{_STUDY}: SimGrid's results cannot be read: {error}") from None
    if len(seconds) != number or not all(0 < value < math.inf for value in seconds):
        raise MpicompError(f"{_STUDY}: {number} cases gave {len(seconds)} results, from {min(seconds, default=None)} s")
    return seconds


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of two tables in Markdown: all rows, and the ratio of predicted seconds to SimGrid's."""
    lines = [
        "| plan | ranks | a host | links | predicted s | SimGrid s | ratio | operations as |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['plan']} | {row['ranks']} | {row['per_host']} | {row['wires']} | {row['predicted_s']:.6f} | "
            f"{row['simgrid_s']:.6f} | {row['ratio']:.3f} | {row['way']} |"
        )
    wires = list(dict.fromkeys(row["wires"] for row in rows))
    lines += ["", f"| plan | a host | {' | '.join(wires)} |", "|---|---|" + "---|" * len(wires)]
    for plan, per_host in dict.fromkeys((row["plan"], row["per_host"]) for row in rows):
        alike = [row for row in rows if (row["plan"], row["per_host"]) == (plan, per_host)]
        cells = [_ratios([row["ratio"] for row in alike if row["wires"] == links]) for links in wires]
        lines.append(f"| {plan} | {per_host} | {' | '.join(cells)} |")
    return [*lines, "", f"all {len(rows)}: ratio {_ratios([row['ratio'] for row in rows])}"]


def _ratios(ratios: Sequence[float]) -> str:
    """Return the median, and the least and the most."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})" if ratios else ""


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
