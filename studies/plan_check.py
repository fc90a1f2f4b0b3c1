"""Predictions of ``mpicomp plan`` from a run of one rank, against steps in labs: ``python studies/plan_check.py``.

A lab's host has a share of this machine's cores: the run of one rank has a copy, a job of its own, for each other host.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lab_jobs
import numpy as np
from mpicomp.bench.lab.lab_settings import parse_bandwidth, parse_latency
from mpicomp.bench.plan import Links, plan, read_job, read_links
from study_rows import Rows, Study, show

from mpicomp.forecast import Forecast, Job, recommended

_STUDY = "plan_check"
_ONE_RANK, _LINKS = "one rank", "links"
# By exchange of `bench training`: the name in `mpicomp plan`, and the steps of the warm-up.
_EXCHANGES = {
    "none": ("none", 10), "ddp-fp16": ("ddp-fp16", 10), "auto": ("auto", 30), "topk": ("topk 1 %", 10),
    "muon": ("muon every 10", 10),
}  # fmt: skip
_TRAINING_STEPS = 120  # plans that wait are judged by the half of them, as in the cells
_STEPS = ("--steps", "40", "--blocks", "2", "--every", "10")


def rows(_: Rows, arguments: Namespace) -> Iterator[tuple[Any, ...]]:
    networks, hosts, task = lab_jobs.read_networks(_STUDY, arguments.networks), arguments.hosts, arguments.task
    lab_jobs.check_lab(_STUDY)
    yield (_ONE_RANK, ""), _one_rank, task, hosts
    for network in networks:
        for exchange in _EXCHANGES:
            yield (str(network), exchange), _cell, network, hosts, task, exchange
    for network in networks:
        yield (str(network), _LINKS), _calibrate, network, hosts


def _one_rank(task: str, copies: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / f"{copy}.json") for copy in range(copies)]
        words = [sys.executable, "-m", "mpicomp", "train", "--task", task, "--steps", "32", "--compressor", "dense"]
        started = []
        for path in paths:
            environment = os.environ | {"MPICOMP_PLAN": path, "OMP_NUM_THREADS": "1"}
            started.append(subprocess.Popen([*words, "--no-verdict"], env=environment, stdout=subprocess.DEVNULL))
        for process in started:
            process.wait()
        return {"job": read_job(paths[0], _TRAINING_STEPS)[0].to_json()}


def _calibrate(network: lab_jobs.Network, hosts: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path, words = Path(folder) / "links.json", ["bench", "collectives", "--numel", "1024", "--limit", "0.1"]
        words += ["--collective", "ring", "--compressor", "dense", "--calibrate", str(path)]
        lab_jobs.run(hosts, network, words, lambda line: None)
        return {"model": json.loads(path.read_text())}


def _cell(network: lab_jobs.Network, hosts: int, task: str, exchange: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        words = ["bench", "training", "--task", task, "--exchange", exchange, *_STEPS, "--json", str(path)]
        lab_jobs.run(hosts, network, [*words, "--warm-up", str(_EXCHANGES[exchange][1])], lambda line: None)
        [row] = json.loads(path.read_text())["rows"]
        return {name: row[name] for name in ("median_s", "mean_s", "ran", "link_bytes")}


def tables(measured: Rows, arguments: Namespace) -> None:
    alone = measured.find(_ONE_RANK, "")
    if alone is None:
        return
    job, hosts, lines = Job.from_json(alone["job"]), arguments.hosts, []
    for network in lab_jobs.read_networks(_STUDY, arguments.networks):
        nominal = Links(hosts, 1, parse_bandwidth(network.bandwidth), 1e-9 * parse_latency(network.latency))
        plans, saved = [plan(job, nominal, True)], measured.find(str(network), _LINKS)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(None if saved is None else saved["model"], file, indent=0)
            file.flush()
            plans += [plan(job, links, True) for links in (read_links(file.name, [hosts], 1) if saved else [])]
        costs: dict[str, float] = {}
        for exchange, (name, _) in _EXCHANGES.items():
            cell = measured.find(str(network), exchange)
            if cell is None:
                continue
            given, by_links = (next(row for row in each["rows"] if row["exchange"] == name) for each in (plans * 2)[:2])
            step_s = cell["mean_s" if exchange == "muon" else "median_s"]
            lines.append({
                "network": str(network), "exchange": exchange, "plan": given["plan"], "step_s|.4g": step_s,
                "predicted_s|.4g": given["step_s"], "error|+.1%": given["step_s"] / step_s - 1,
                "by_links_s|.4g": by_links["step_s"], "links_error|+.1%": by_links["step_s"] / step_s - 1,
            })  # fmt: skip
            costs |= {name: step_s * given["steps_ratio"]} if given["steps_ratio"] else {}
        if len(costs) == len(_EXCHANGES) - 1:  # all but none, of which one is recommended
            advised = recommended([Forecast(**row) for row in plans[0]["rows"] if row["exchange"] in costs]).exchange
            over = costs[advised] / min(costs.values()) - 1
            print(f"{network}: {advised} is recommended, {over:.0%} above the best; seconds to a quality: {costs}")
    notes = []
    for name in ("error", "links_error") if lines else ():
        errors = np.abs([line[f"{name}|+.1%"] for line in lines])
        within = np.count_nonzero(errors <= 0.15)
        notes.append(f"{name}: median {np.median(errors):.1%}, {within} of {errors.size} within 15 %")
    show("Seconds of a step, measured and predicted", lines, notes)


STUDY = Study(
    _STUDY, "Predict steps in labs from a run of one rank.", ("network", "exchange"), rows, tables,
    lab_jobs.options("50mbit/50us,200mbit/50us,1gbit/50us,2.5gbit/50us")
    | {"--task": ("text-gpt", "T", "as in mpicomp train")},
)  # fmt: skip

if __name__ == "__main__":
    STUDY.main()
