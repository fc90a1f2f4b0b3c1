"""Study of the regret of choosing the collective, on a grid of emulated networks: ``python studies/regret.py``."""

import json
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lab_jobs
import numpy as np
from study_rows import Rows, Study, show

from mpicomp.cli.options import read_compressors, read_list, read_numels, read_ratios

_STUDY = "regret"
_COLUMNS = {
    "bandwidth": "", "latency": "", "numel": "d", "ratio": "g", "best": "", "best_s": ".4g", "chosen": "",
    "median_s": ".4g", "regret": "+.1%", "regret_low": "+.1%", "regret_high": "+.1%", "best_dense_s": ".4g",
    "behind_dense": "+.1%", "prediction_error": ".1%",
}  # fmt: skip
_SHORT_S = 5e-3  # seconds: a share of a shorter cell is too little to be measured
_BEHIND_S = 200e-6  # seconds by which a dense choice may be behind the best dense plan
_BEHIND = 0.03  # share by which another choice may be behind the best one


def measure(network: lab_jobs.Network, hosts: int, options: Sequence[str]) -> dict[str, Any]:
    """Run all plans and auto in a lab; return the rows of `bench collectives`, judged, and the MPI job."""

    def watch(line: str) -> None:
        if "elements" in line and (", auto: " in line or line.startswith("WRONG")):
            print(f"{network}  {line.removeprefix('# ')}", flush=True)

    with tempfile.TemporaryDirectory(prefix="mpicomp-study-") as folder:
        path = Path(folder) / "rows.json"
        lab_jobs.run(hosts, network, ["bench", "collectives", *options, "--json", str(path)], watch)
        written = json.loads(path.read_text())
    place = {"bandwidth": network.bandwidth, "latency": network.latency}
    return {"job": written["environment"]["job"], "rows": [place | row for row in judged(written["rows"])]}


def judged(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of one network with the results of their cells; those of ``auto`` with whether it is behind."""
    found = []
    for row in rows:
        more: dict[str, Any] = {"prediction_error": None, "is_behind": None}
        if row["chosen"] is not None:
            same = [other for other in rows if other["compressor"] == "dense" or other["config"] == row["config"]]
            errors = prediction_errors([other for other in same if other["numel"] == row["numel"]])
            behind_s = row["median_s"] - row["best_dense_s"]
            most_s = _BEHIND_S if row["median_s"] < _SHORT_S else _BEHIND * row["best_dense_s"]
            more = {"prediction_error": float(np.median(errors)) if errors else None, "is_behind": behind_s > most_s}
        found.append(dict(row) | more)
    return found


def prediction_errors(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return ``|predicted - measured| / measured`` of every plan that was run and predicted.

    Seconds are from the last rank's start to the last rank's end.

    >>> prediction_errors([{"predicted_s": value, "span_s": 1.0} for value in (0.5, 1.25, None)])
    [0.5, 0.25]
    """
    pairs = [(row["predicted_s"], row["span_s"]) for row in rows]
    return [abs(value / took - 1) for value, took in pairs if value is not None and took is not None]


def summary(cells: Sequence[Mapping[str, Any]], errors: Sequence[float]) -> list[str]:
    """Return lines that summarize a grid, by the rows of ``auto`` from `judged` and the errors of all rows."""
    worst = max(cells, key=lambda cell: float(cell["regret"]))
    sure = max((cell["regret_low"] for cell in cells if cell["regret_low"] is not None), default=None)
    lines = [
        f"cells: {len(cells)}",
        f"regret over the best fixed plan: median {np.median([cell['regret'] for cell in cells]):+.1%}, worst "
        f"{worst['regret']:+.1%} ({worst['bandwidth']}, {worst['latency']}, {worst['numel']:,} elements, ratio "
        f"{worst['ratio']})",
        f"behind the best dense plan by more than {_BEHIND:.0%}, or {1e6 * _BEHIND_S:.0f} us in cells under "
        f"{1e3 * _SHORT_S:.0f} ms: {sum(cell['is_behind'] for cell in cells)} of {len(cells)}",
    ]
    if sure is not None:
        lines.append(f"worst lower end of an interval of regret: {sure:+.1%}")
    if errors:
        lines.append(f"predicted against measured seconds: median error {np.median(errors):.1%} of {len(errors)} rows")
    return lines


def rows(_: Rows, arguments: Namespace) -> Iterator[tuple[Any, ...]]:
    networks = lab_jobs.read_networks(_STUDY, arguments.networks)
    read_numels(_STUDY, arguments.numel)
    read_compressors(_STUDY, read_list(arguments.compressor), read_ratios(_STUDY, arguments.ratio))
    lab_jobs.check_lab(_STUDY)
    options = ["--numel", arguments.numel, "--ratio", arguments.ratio, "--compressor", arguments.compressor]
    for network in networks:
        yield (str(network),), measure, network, arguments.hosts, [*options, "--limit", str(arguments.timing)]


def tables(measured: Rows, _: Namespace) -> None:
    found = [row for network in measured.made for row in network["rows"]]
    cells = [row for row in found if row["chosen"] is not None]
    notes = summary(cells, prediction_errors(found)) if cells else ()
    show("auto and the best fixed plan", cells, notes, _COLUMNS)


STUDY = Study(
    _STUDY,
    "Run `mpicomp bench collectives` with all plans and auto in one lab a network, and show for every network, length "
    "and ratio how much longer auto takes than the best fixed plan. It needs a lab. The default grid takes up to 40 "
    "minutes.",
    ("network",),
    rows,
    tables,
    {
        **lab_jobs.options(
            "50mbit/0us,50mbit/1ms,50mbit/10ms,200mbit/0us,200mbit/1ms,200mbit/10ms,1gbit/0us,2.5gbit/0us"
        ),
        "--numel": ("262144,4194304,25600000", "ELEMENTS", "lengths"),
        "--ratio": ("0.001,0.01", "RATIOS", "kept fractions"),
        "--compressor": ("topk", "NAMES", "see bench collectives"),
        "--timing": (0.6, "S", "seconds of timing a plan"),
    },
    {"hosts": 1},
)

if __name__ == "__main__":
    STUDY.main()
