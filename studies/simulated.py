"""What `mpicomp simulate` predicts for labs that it has not seen, and what they take: ``python studies/simulated.py``.

A run in one lab measures the network's operations and records backward. Steps in other labs are predicted from it, and
then made: every rank sleeps as long as backward took, and exchanges gradients for which it sleeps.

Measuring, predicting and each lab is a piece with a file of its own, in that order; ``--pieces`` makes some of them,
and the same command goes on with the next ones.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from lab_jobs import Network, check_lab, run_in_lab
from mpicomp.bench.lab.lab_settings import parse_bandwidth, parse_latency
from mpicomp.bench.simulate.compute_time import ComputeTime
from mpicomp.bench.simulate.measured import Measured, read
from mpicomp.bench.simulate.rows import Plan, Simulation
from mpicomp.bench.simulate.topology import Links, Topology

from mpicomp.cli import run_program
from mpicomp.compressors import get_compressor
from mpicomp.cost import CostModel
from mpicomp.errors import ConfigurationError
from mpicomp.setting_checks import check_least
from mpicomp.system import launcher

_STUDY = "simulated"
_PREDICTED = "predicted.json"
FITTED = 5, Network("100mbit", "100us")  # hosts and links of the lab that all predictions start from
UNSEEN = (
    (2, Network("50mbit", "1ms")),
    (3, Network("100mbit", "200us")),
    (4, Network("200mbit", "500us")),
    (8, Network("200mbit", "50us")),
)
"""The labs that are predicted: chosen before anything was measured, and never fitted on."""
PLANS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"id": "dense"}, "allreduce"),
    ({"id": "dense"}, "ring"),
    ({"id": "dense"}, "scatter-reduce"),
    ({"id": "topk", "ratio": 0.01}, "allgather"),
    ({"id": "topk", "ratio": 0.05}, "allgather"),
    ({"id": "topk", "ratio": 0.01}, "star-topk:allreduce"),
    ({"id": "qsgd", "rounding": "nearest"}, "two-phase"),
)
_ROUNDS = 2  # times that all plans have their turn, so that what disturbs for a while disturbs not all steps of one
_STEPS = 2  # timed steps of each plan in a turn, with and without overlap
_BUCKET_BYTES = 8 << 20  # so that there is something to overlap


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"studies/{_STUDY}.py", description=__doc__)
    parser.add_argument("--folder", default="simulated", help="where results are kept; what is there is not run again")
    parser.add_argument("--pieces", type=int, metavar="N", help="stop after N of those that are not there yet")
    parser.add_argument("--task", default="text-lstm", help="what backward is recorded of (%(default)s)")
    parser.add_argument("--steps", type=int, default=24, help="steps of the recorded run (%(default)s)")
    parser.add_argument("--replay", metavar="F", help=argparse.SUPPRESS)  # the part that runs in a lab
    parser.add_argument("--json", metavar="F", help=argparse.SUPPRESS)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Make pieces, and print the table when all are there; or, in a lab, make the steps."""
    if arguments.replay is not None:
        return _replay(read(arguments.replay).cut(_BUCKET_BYTES), arguments.json)
    if arguments.pieces is not None:
        check_least(_STUDY, "--pieces", arguments.pieces)
    if launcher.detect() is not None:
        raise ConfigurationError(f"{_STUDY}: starts its own labs; run it without mpiexec")
    check_lab(_STUDY)
    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    pieces = _pieces(folder, arguments.task, arguments.steps)
    if not make(pieces, arguments.pieces):
        done = sum(path.exists() for path in pieces)
        print(f"{_STUDY}: {done} of {len(pieces)} pieces are in {folder}; the same command goes on")
        return 0
    rows = json.loads((folder / _PREDICTED).read_text())
    took = {hosts: json.loads((folder / f"{hosts}.json").read_text()) for hosts, _ in UNSEEN}
    for row, seconds in zip(rows, chain.from_iterable(took[hosts] for hosts, _ in UNSEEN), strict=True):
        row["measured_s"] = statistics.median(seconds)
        row["error"] = row["predicted_s"] / row["measured_s"] - 1
    (folder / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(table(rows)))
    return 0


def _pieces(folder: Path, task: str, steps: int) -> dict[Path, Callable[[Path], None]]:
    """Return what makes each piece's file, in the order in which they are made."""
    source = folder / "measured.json"

    def measure(path: Path) -> None:
        words = ["train", "--task", task, "--steps", str(steps), "--no-verdict", "--measured", str(path)]
        run_in_lab(*FITTED, words)

    def predict_all(path: Path) -> None:
        measured = read(str(source)).cut(_BUCKET_BYTES)
        rows = [
            {"hosts": hosts, "network": str(network), **row}
            for hosts, network in UNSEEN
            for row in predict(measured, hosts, network)
        ]
        path.write_text(json.dumps(rows, indent=1) + "\n")

    def step_in(hosts: int, network: Network, path: Path) -> None:
        words = ["--replay", str(source), "--json", str(path)]
        run_in_lab(hosts, network, words, program=[sys.executable, __file__])

    # Of labs the largest is the first: what takes most memory and cores shows at once whether it can be run.
    labs = {folder / f"{hosts}.json": partial(step_in, hosts, network) for hosts, network in reversed(UNSEEN)}
    return {source: measure, folder / _PREDICTED: predict_all, **labs}


def make(pieces: dict[Path, Callable[[Path], None]], most: int | None = None) -> bool:
    """Make the files that are not there, so many of them at most; return whether all are there."""
    missing = [path for path in pieces if not path.exists()]
    for path in missing[:most]:
        part = path.with_suffix(".part")
        pieces[path](part)
        part.replace(path)
    return all(path.exists() for path in pieces)


def predict(measured: Measured, hosts: int, network: Network) -> list[dict[str, Any]]:
    """Return the predicted seconds of every plan in a lab, with and without overlap."""
    fitted = FITTED[1]
    # What MPI and the emulation add to a latency, and how much of a bandwidth they leave, is as where it was measured.
    added = measured.cost.network.latency - parse_latency(fitted.latency) * 1e-9
    share = 8 / parse_bandwidth(fitted.bandwidth) / measured.cost.network.seconds_per_byte
    links = Links(8 / parse_bandwidth(network.bandwidth) / share, parse_latency(network.latency) * 1e-9 + added)
    topology = Topology(hosts, 1, measured.cost.network, measured.ranks, links)
    # Ranks of a lab share the cores of one machine, which is this one, and sleep where a training computes: computation
    # takes what it takes here, as many times longer as there are ranks for a core.
    crowd = max(1.0, hosts / len(os.sched_getaffinity(0)))
    simulation = Simulation(measured, topology, ComputeTime(CostModel(measured.cost.network), crowd))
    rows = []
    for config, collective in PLANS:
        plan = Plan(get_compressor(config), collective)
        for overlap in (False, True):
            row = simulation.row(plan, overlap)
            seconds = {"predicted_s": row["step_s"], "own_work_s": row["own_work_s"]}
            rows.append({"plan": plan.title, "overlap": overlap, **seconds})
    return rows


def _replay(measured: Measured, path: str) -> int:
    """Make the steps of every plan among the ranks of this job; rank 0 writes their seconds."""
    from mpicomp.bench.measure.timings import gather

    from mpicomp.reducer import Reducer
    from mpicomp.transport.mpi import MPITransport
    from mpicomp.transport.scheduler import ProgressThread

    transport = MPITransport()
    rank = transport.group.rank
    random = np.random.default_rng(rank)
    gradients = [gradient for bucket in measured.buckets for gradient in bucket.gradients]
    arrays = {gradient.name: random.laplace(size=gradient.shape).astype(np.float32) for gradient in gradients}
    thread = ProgressThread(transport, channels=1).start()

    def step(reducer: Reducer, overlap: bool) -> float:
        gather(np.zeros(1), transport)  # all ranks begin at once
        began = time.perf_counter()
        if overlap:
            stream = reducer.stream(thread)
            assert stream is not None, "the first step has no overlap"
            for gradient in sorted(gradients, key=lambda gradient: gradient.ready_s):
                _sleep_until(began + measured.forward_s + gradient.ready_s)
                stream.put(gradient.name, arrays[gradient.name])
            _sleep_until(began + measured.forward_s + measured.backward_s)
            stream.finish(arrays)
        else:
            _sleep_until(began + measured.forward_s + measured.backward_s)
            reducer.reduce(arrays)
        time.sleep(measured.update_s)
        return float(gather(np.array([time.perf_counter() - began]), transport).max())

    seconds: dict[tuple[int, bool], list[float]] = {}
    for _ in range(_ROUNDS):
        for place, (config, collective) in enumerate(PLANS):
            reducer = Reducer(
                get_compressor(config),
                collective,
                policy={"warmup": 0},
                comm=transport,
                bucket_bytes=measured.bucket_bytes,
            )
            for overlap in (False, True):
                step(reducer, overlap)  # agrees, compiles, grows buffers
            for overlap in (False, True):
                took = [step(reducer, overlap) for _ in range(_STEPS)]
                seconds.setdefault((place, overlap), []).extend(took)
            reducer.close()
            if rank == 0:
                print(f"{config['id']} {collective}: {took[-1]:.3f} s", flush=True)
    thread.stop()
    if rank == 0:
        Path(path).write_text(json.dumps(list(seconds.values())) + "\n")
    transport.close()
    return 0


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a table in Markdown, and of the medians of errors below it."""
    lines = ["| hosts | links | plan | overlap | predicted s | measured s | error |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['hosts']} | {row['network']} | {row['plan']} | {'yes' if row['overlap'] else 'no'} | "
            f"{row['predicted_s']:.3f} | {row['measured_s']:.3f} | {row['error']:+.1%} |"
        )
    for hosts in [*dict.fromkeys(row["hosts"] for row in rows), None]:
        errors = [abs(row["error"]) for row in rows if hosts in (None, row["hosts"])]
        name = "all" if hosts is None else f"{hosts} hosts"
        lines.append(f"\n{name}: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    return lines


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
