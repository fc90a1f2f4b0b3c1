"""Predictions of ``mpicomp plan`` from a run of one rank, against steps in labs: ``python studies/plan_check.py``.

A host of the lab has a share of this machine's cores, so the run of one rank has a copy for each other host at the same
time; each of them is a job of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lab_jobs
import numpy as np
import study_rows
from mpicomp.bench.lab.lab_settings import parse_bandwidth, parse_latency
from mpicomp.bench.measure import results
from mpicomp.bench.plan import Links, plan, read_job, read_links

from mpicomp.cli import run_program
from mpicomp.forecast import Job

_STUDY, _KEY = "plan_check", ("network", "exchange")
_NETWORKS = "50mbit/50us,200mbit/50us,1gbit/50us,2.5gbit/50us"
_ONE_RANK, _LINKS = "one rank", "links"
# By exchange of `bench training`: the name in `mpicomp plan`, and the steps of the warm-up.
_EXCHANGES = {
    "none": ("none", 10), "ddp-fp16": ("ddp-fp16", 10), "auto": ("auto", 30), "topk": ("topk 1 %", 10),
    "muon": ("muon every 10", 10),
}  # fmt: skip
_TRAINING_STEPS = 120  # plans that wait are judged by the half of them, as in the cells
_STEPS = ("--steps", "40", "--blocks", "4", "--every", "10")
_COLUMNS = {
    "network": "", "exchange": "", "plan": "", "step_s": ".4g", "predicted_s": ".4g", "error": "+.1%",
    "by_links_s": ".4g", "links_error": "+.1%",
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="studies/plan_check.py", description=(__doc__ or "").partition("\n")[0])
    lab_jobs.add_lab(parser, _NETWORKS)
    parser.add_argument("--task", default="text-gpt", help="as in mpicomp train (%(default)s)")
    study_rows.add_rows(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Measure cells that the rows do not have yet, and print predictions and errors."""
    networks, hosts, task = lab_jobs.read_networks(_STUDY, arguments.networks), arguments.hosts, arguments.task
    lab_jobs.check_lab(_STUDY)
    rows = study_rows.begin(_STUDY, arguments, _KEY)
    rows.measure((_ONE_RANK, ""), _one_rank, task, hosts)
    for network in networks:
        for exchange in _EXCHANGES:
            rows.measure((str(network), exchange), _cell, network, hosts, task, exchange)
    for network in networks:
        rows.measure((str(network), _LINKS), _calibrate, network, hosts)
    alone = rows.find(_ONE_RANK, "")
    if alone is not None:
        _show(rows, networks, hosts, Job.from_json(alone["job"]))
    return study_rows.print_late(rows)


def _one_rank(task: str, copies: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / f"{copy}.json") for copy in range(copies)]
        words = [sys.executable, "-m", "mpicomp", "train", "--task", task, "--steps", "32", "--compressor", "dense"]
        started = [
            subprocess.Popen(
                [*words, "--no-verdict"],
                env=os.environ | {"MPICOMP_PLAN": path, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
            )
            for path in paths
        ]
        for process in started:
            process.wait()
        return {"job": read_job(paths[0], _TRAINING_STEPS)[0].to_json()}


def _calibrate(network: lab_jobs.Network, hosts: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "links.json"
        words = ["bench", "collectives", "--numel", "1024", "--limit", "0.1", "--collective", "ring"]
        words += ["--compressor", "dense", "--calibrate", str(path)]
        lab_jobs.run(hosts, network, words, lambda line: None)
        return {"model": json.loads(path.read_text())}


def _cell(network: lab_jobs.Network, hosts: int, task: str, exchange: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        words = ["bench", "training", "--task", task, "--exchange", exchange, *_STEPS, "--json", str(path)]
        lab_jobs.run(hosts, network, [*words, "--warm-up", str(_EXCHANGES[exchange][1])], lambda line: None)
        [row] = json.loads(path.read_text())["rows"]
        return {name: row[name] for name in ("median_s", "mean_s", "ran", "link_bytes")}


def _row(plan: dict[str, Any], exchange: str) -> dict[str, Any]:
    row: dict[str, Any] = next(row for row in plan["rows"] if row["exchange"] == exchange)
    return row


def _show(rows: study_rows.Rows, networks: list[lab_jobs.Network], hosts: int, job: Job) -> None:
    found: list[dict[str, Any]] = []
    for network in networks:
        nominal = Links(hosts, 1, parse_bandwidth(network.bandwidth), 1e-9 * parse_latency(network.latency))
        plans, saved = [plan(job, nominal, True)], rows.find(str(network), _LINKS)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(None if saved is None else saved["model"], file, indent=0)
            file.flush()
            plans += [plan(job, links, True) for links in (read_links(file.name, [hosts], 1) if saved else [])]
        costs: dict[str, float] = {}
        for exchange, (name, _) in _EXCHANGES.items():
            cell = rows.find(str(network), exchange)
            if cell is None:
                continue
            given, by_links = (_row(each, name) for each in (plans * 2)[:2])
            step_s = cell["mean_s" if exchange == "muon" else "median_s"]
            found.append({
                "network": str(network), "exchange": exchange, "plan": given["plan"], "step_s": step_s,
                "predicted_s": given["step_s"], "error": given["step_s"] / step_s - 1,
                "by_links_s": by_links["step_s"], "links_error": by_links["step_s"] / step_s - 1,
            })  # fmt: skip
            costs |= {name: step_s * given["steps_ratio"]} if given["steps_ratio"] else {}
        best = min(costs, key=costs.__getitem__, default="")
        print(f"{network}: recommended {plans[0]['recommended']}; least measured seconds to a quality: {costs}, {best}")
    results.show(found, _COLUMNS)
    for name in ("error", "links_error"):
        errors = np.abs([row[name] for row in found])
        print(
            f"{name}: median {np.median(errors):.1%}, {np.count_nonzero(errors <= 0.15)} of {errors.size} within 15 %"
        )


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
