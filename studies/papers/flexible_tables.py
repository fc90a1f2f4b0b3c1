"""Table VI of Flexible Communication, and its schedules: ``python studies/papers/flexible_tables.py``."""

import itertools
import json
import sys
import time
from argparse import Namespace
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))  # where the other studies are

import lab_jobs
import numpy as np
import paper_runs
from flexible_search import COLLECTIVES, sparse_sum
from mpicomp.bench.measure.timings import gather
from study_rows import Rows, Study, show

from mpicomp import TopK
from mpicomp.cli import run_program
from mpicomp.collectives import bind
from mpicomp.compressors import Compressor
from mpicomp.job import launcher
from mpicomp.mpi import Transport
from mpicomp.mpi.rounds import Group, Round, Rounds

_CELL_S = 8.0  # of timing a cell, at least three turns
_TURNS = 3, 30
_LONG_S = 60.0  # after which a cell has been timed enough with fewer turns
_SLOW_S = 2.0  # compared with which connections take no time to be made

_FAR, _NEAR = 50, 1  # milliseconds
SCHEDULES: dict[str, list[tuple[int, float, float]]] = {
    "C1": [(12, _NEAR, 25), (12, _NEAR, 1), (12, _FAR, 1), (14, _FAR, 25)],
    "C2": [(12, _NEAR, 25), (8, 25, 13), (8, _FAR, 1), (8, 25, 13), (14, _NEAR, 25)],
}
"""Phases: epochs, milliseconds and Gbit/s; moderate ones are not printed, and here between the two."""
_PRINTED_TOP1 = {"dense": 90.8, "C1": 89.88, "C2": 90.1}  # ResNet18 on CIFAR100
_SCALE = 43  # parameters of ResNet-18 over those of ResNet-20
_COMPUTE_S = 0.01  # a dense step of the paper's ResNet-18, less the ring's formula

MODELS = {"ResNet18": 11_689_512, "ResNet50": 25_557_032, "AlexNet": 61_100_840, "ViT": 133_000_000}
"""Parameters; of ViT those that the printed figures imply."""

PUBLISHED = tuple(COLLECTIVES.values())  # allgather, and AR-Topk by a ring and by a tree
_OTHERS = ("var-topk:ring", "star-topk", "allgather coded")
PRINTED_VI: dict[tuple[str, float], tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]] = {
    ("ResNet18", 10): ((54, 7.66, 3.28), (35, 18.1, 16.7), (43.2, 12.2, 9)),
    ("ResNet18", 1): ((526.3, 51.93, 8.86), (194.7, 34.1, 19.5), (345.6, 41.9, 12.8)),
    ("ResNet50", 10): ((115.1, 14.35, 4.65), (52.9, 20.3, 18.1), (83.4, 15.9, 10)),
    ("ResNet50", 1): ((1148, 126.5, 14.35), (405.5, 58.8, 21), (745, 83.7, 16.1)),
    ("AlexNet", 10): ((271.8, 32.73, 6), (106.8, 25.2, 18.6), (180.4, 25.8, 11.1)),
    ("AlexNet", 1): ((2718.7, 282.7, 31.33), (964.4, 111.8, 27), (1778, 186.8, 27.3)),
    ("ViT", 10): ((592.77, 68.48, 9.15), (238.6, 36.2, 19.2), (401.2, 46.2, 12.9)),
    ("ViT", 1): ((5973, 601.8, 59.68), (2047, 222.8, 36.7), (3852, 385.2, 44.4)),
}
"""Milliseconds of table VI at 1 ms, by model and Gbit/s: of each of `PUBLISHED` at the ratios."""
RATIOS = (0.1, 0.01, 0.001)


@dataclass(frozen=True)
class Cell:
    """A place in the table: a model's gradients on one of the paper's networks."""

    table: str  # "VI"
    model: str
    gbps: float
    latency_ms: float
    ratio: float
    scale: int  # the paper's elements and bandwidth over those here

    @property
    def key(self) -> tuple[Any, ...]:
        return self.table, self.model, self.gbps, self.latency_ms, self.ratio, 0

    @property
    def network(self) -> lab_jobs.Network:
        return lab_jobs.Network(f"{1000 * self.gbps / self.scale:g}mbit", f"{self.latency_ms:g}ms")


def cells(scale: int) -> list[Cell]:
    """Return all places, the printed ones first."""
    places = itertools.product((1, 10), (10, 1), MODELS, RATIOS)
    return [Cell("VI", model, gbps, latency_ms, ratio, scale) for latency_ms, gbps, model, ratio in places]


def _plans(cell: Cell) -> dict[str, tuple[Compressor, str]]:
    """Return the plans that a cell times: those of the paper send indices of 32 bits."""
    plain, coded = TopK(ratio=cell.ratio, indices="plain"), TopK(ratio=cell.ratio)
    found = {name: (plain, name) for name in (*PUBLISHED, "var-topk:ring")}
    return {**found, "star-topk": (coded, "star-topk"), "allgather coded": (coded, "allgather")}


def filled(task: Round, group: Group) -> Round:
    """Return a round with arrays of zeros."""
    counts, rank = task.counts, group.rank
    sent = got = counts[0]
    if task.operation == "allgatherv":
        sent, got = counts[rank], sum(counts)
    elif task.operation == "sendrecv":
        got = counts[1]
    else:
        assert task.operation in ("allreduce", "bcast"), f"nothing here sends by {task.operation}"
    task.send = np.zeros(sent, task.dtype) if task.operation != "bcast" or rank == task.root else None
    task.recv = np.empty(got, task.dtype)
    return task


def communicate(tasks: Sequence[Round]) -> Rounds[None]:
    """Make rounds one after the other; of those in the background two at a time, as the ring does. As rounds."""
    under_way: deque[Any] = deque()
    for task in tasks:
        if len(under_way) == 2:
            yield under_way.popleft()
        reply = yield task
        if task.background:
            under_way.append(reply)
    while under_way:
        yield under_way.popleft()


def time_cell(cell: Cell, transport: Transport, limit_s: float) -> dict[str, Any]:
    """Time the announced rounds of all plans of a cell, in turn. Collective."""
    numel, group = max(1, MODELS[cell.model] // cell.scale), transport.group
    dtype = np.dtype(np.float32)
    found: dict[str, list[float]] = {}
    rounds = {}
    for name, (compressor, collective) in _plans(cell).items():
        scheme = bind(compressor.bind([""], [numel]), collective)
        rounds[name] = [filled(task, group) for task in scheme.rounds(numel, dtype, group)]
    begin = time.monotonic()
    for turn in range(_TURNS[1] + 1):
        for name, tasks in rounds.items():
            gather(np.zeros(1), transport)
            start = transport.clock()
            transport.run(communicate(tasks))
            clocks = gather(np.array([start, transport.clock(), time.monotonic() - begin]), transport)
            took = float(clocks[:, 1].max() - clocks[:, 0].max())
            if turn > 0 or took > _SLOW_S:  # the first makes connections
                found.setdefault(name, []).append(took)
        passed = float(clocks[:, 2].max())
        if len(found) == len(rounds) and passed > (limit_s if turn >= _TURNS[0] else _LONG_S):
            break
    times = {name: 1e3 * float(np.median(seconds)) for name, seconds in found.items()}
    turns = min(map(len, found.values()))
    row = {"hosts": group.size, "numel": numel, "ms": times, "turns": turns, "seed": 0}
    return asdict(cell) | row


def tables(measured: Rows, arguments: Namespace) -> None:
    places, lines = {cell.key: cell for cell in cells(arguments.scale)}, []
    for row in measured.made:
        cell = places.get(tuple(row[name] for name in measured.key))
        if cell is None:
            continue
        size, link, ms = 4 * MODELS[cell.model] * cell.ratio, (cell.latency_ms / 1e3, 8e-9 / cell.gbps), row["ms"]
        formula = {
            name: 1e3 * sparse_sum(kind, row["hosts"], size).seconds(*link) for kind, name in COLLECTIVES.items()
        }
        printed = PRINTED_VI.get((cell.model, cell.gbps)) if cell.latency_ms == 1 else None
        paper = [times[RATIOS.index(cell.ratio)] for times in printed or ()]
        here = {name: ms[name] for name in PUBLISHED}
        rule, best = here[min(formula, key=formula.__getitem__)], min(here.values())
        lines.append({
            "model": cell.model, "network": f"{cell.gbps:g} Gbit/s, {cell.latency_ms:g} ms", "ratio|g": cell.ratio,
            "paper: AG, ring, tree": _three(paper), "formula": _three(list(formula.values())),
            "here: AG, ring, tree": _three(list(here.values())), "same best": "yes" if rule == best else "no",
            "rule costs|.2f": rule / best, **{f"{name}|.4g": ms[name] for name in _OTHERS},
        })  # fmt: skip
    show("Table VI: milliseconds of communication", lines, [
        f"here: {arguments.hosts} hosts of a lab; elements and bandwidth are {arguments.scale} times fewer, "
        "latency is the paper's, so every term of the cost equals that at full size",
        "tree: recursive doubling here, log2(N) rounds of everything; the paper's tree makes twice as many",
        "milliseconds of communication alone; * is the fastest of a row's three",
        "rule costs: time of the formulas' choice over the fastest of the three",
        "var-topk:ring has indices of 32 bits too; star-topk (the library's sum) and allgather coded send them coded",
    ])  # fmt: skip
    _show_schedules(measured.made)


def _three(ms: Sequence[float]) -> str:
    return ", ".join(f"{each:.4g}{'*' * (each == min(ms))}" for each in ms)


def rows(measured: Rows, arguments: Namespace) -> Iterator[tuple[Any, ...]]:
    if arguments.parts != ["schedule"]:
        lab_jobs.check_lab("flexible_tables")
    only = [tuple(key) for key in json.loads(arguments.cells)] if arguments.cells else None
    wanted = [cell for cell in cells(arguments.scale) if cell.table in arguments.parts]
    missing = [cell for cell in wanted if (only is None or cell.key in only) and measured.find(*cell.key) is None]
    for network, of_network in paper_runs.grouped(missing, "network").items():
        if time.monotonic() < measured.end:
            print(f"{network}: {len(of_network)} cells", flush=True)
            _in_lab(arguments.hosts, network, of_network, measured)
        else:
            measured.late += [str(cell.key) for cell in of_network]
    schedules = arguments.schedules if "schedule" in arguments.parts else []
    for seed, schedule, arm in itertools.product(arguments.seeds, schedules, arguments.arms):
        key = ("schedule", schedule, 0.0, 0.0, arm, seed)
        yield key, train, schedule, arm, arguments.steps, arguments.ranks, seed


def _in_lab(hosts: int, network: lab_jobs.Network, missing: Sequence[Cell], measured: Rows) -> None:
    def watch(line: str) -> None:
        if line.startswith("{"):
            row = json.loads(line)
            measured.keep(row)
            print(f"  {row['model']} {row['ratio']}: {row['ms']}", flush=True)

    words = ["--cells", json.dumps([asdict(cell) for cell in missing])]
    lab_jobs.run(hosts, network, words, watch, [sys.executable, str(Path(__file__).resolve())])


def _among_ranks(asked: Sequence[Mapping[str, Any]]) -> int:
    from mpicomp.mpi.comm import MPITransport  # it loads MPI

    transport = MPITransport()
    for words in asked:
        row = time_cell(Cell(**words), transport, _CELL_S)
        if transport.group.rank == 0:
            print(json.dumps(row), flush=True)
    transport.close()
    return 0


def arms(steps: int) -> dict[str, paper_runs.Arm]:
    """Return the exchanges of schedules; as five of the paper's fifty epochs, a tenth of the steps is a ramp."""
    published = {"ramp": steps // 10}
    return {
        "dense": paper_runs.DENSE,
        **{f"top-k {ratio:g} by allgather": paper_runs.Arm({"id": "topk", "ratio": ratio}, "allgather")
           for ratio in (0.01, 0.033)},
        **{f"ramp, then 0.011 by {name}": paper_runs.Arm({"id": "topk"}, name, {
            "id": "schedule", "begin": 1.0, "end": 0.011, "steps": steps // 10, "shape": "linear",
        }) for name in ("allgather", "star-topk:ring")},
        "as published": paper_runs.Arm(search=published),
        "as published, averages left": paper_runs.Arm(search=published, buffers=False),
        "here": paper_runs.Arm(policy={"id": "flexible", "every": 50}),
    }  # fmt: skip


def phases(schedule: str, steps: int) -> list[tuple[str, paper_runs.Link]]:
    """Return the network of each step, with a name.

    >>> [name for name, _ in phases("C1", 4)]
    ['1 ms, 25 Gbit/s', '1 ms, 1 Gbit/s', '50 ms, 1 Gbit/s', '50 ms, 25 Gbit/s']
    """
    of_epoch = []
    for epochs, latency_ms, gbps in SCHEDULES[schedule]:
        link = paper_runs.Link(latency_ms / 1e3, gbps * 1e9 / _SCALE)
        of_epoch += [(f"{latency_ms:g} ms, {gbps:g} Gbit/s", link)] * epochs
    return [of_epoch[step * len(of_epoch) // steps] for step in range(steps)]


def train(schedule: str, arm: str, steps: int, ranks: int, seed: int = 0) -> dict[str, Any]:
    """Train ResNet-20 on a simulated network that changes; return the row."""
    networks = phases(schedule, steps)
    simulated = paper_runs.Simulated(lambda step: networks[step][1], _COMPUTE_S)
    row = paper_runs.train(arms(steps)[arm], "resnet20", steps, ranks, seed, simulated)
    found: dict[str, dict[str, Any]] = {}
    done = 0
    for seconds, kept, collective, reason in row.pop("plans"):
        name, _ = networks[done]
        phase = found.setdefault(name, {"trials": 0, "seconds": 0.0, "ratios": [], "ran": Counter[str]()})
        phase["seconds"] += seconds
        if paper_runs.TRIAL in reason:
            phase["trials"] += 1
        else:
            done += 1
            phase["ratios"].append(kept)
            phase["ran"][collective] += 1
    for phase in found.values():
        ratios = phase.pop("ratios")
        phase["ratio"] = float(np.median(ratios)) if ratios else None
    return row | {"phases": found, "ranks": ranks}


def _show_schedules(made: Sequence[Mapping[str, Any]]) -> None:
    lines, parts = [], []
    by_arm = paper_runs.grouped([row for row in made if row["table"] == "schedule"], "model", "ratio")
    for (schedule, arm), same in by_arm.items():
        dense = {row["seed"]: _whole(row) for row in by_arm.get((schedule, "dense"), ())}
        over = [dense[row["seed"]] / _whole(row) for row in same if row["seed"] in dense]
        printed = {"dense": _PRINTED_TOP1["dense"], "as published": _PRINTED_TOP1[schedule]}
        lines.append({
            "schedule": schedule, "arm": arm, "seeds|d": len(same), "paper|.2f": printed.get(arm),
            "accuracy": paper_runs.of_seeds([100 * row["quality"] for row in same], ".1f"),
            "seconds|.1f": fmean(map(_whole, same)), "over dense|.2f": fmean(over) if over else None,
            "trials": ", ".join(str(sum(phase["trials"] for phase in row["phases"].values())) for row in same),
        })  # fmt: skip
        for name in same[0]["phases"]:
            of_seeds = [row["phases"][name] for row in same]
            ran = sum((Counter[str](phase["ran"]) for phase in of_seeds), Counter[str]())
            trials, steps = sum(phase["trials"] for phase in of_seeds), ran.total()
            parts.append({
                "schedule": schedule, "arm": arm, "network": name,
                "step|.0f": 1e3 * sum(phase["seconds"] for phase in of_seeds) / (trials + steps),
                "ratio": paper_runs.of_seeds([phase["ratio"] for phase in of_seeds], ".3g"),
                "steps|d": steps, "trials|d": trials,
                "by": ", ".join(f"{other} {count}" for other, count in ran.most_common()),
            })  # fmt: skip
    show("Schedules C1 and C2, means over seeds, with the range", lines, [
        "paper: ResNet18 on CIFAR100, 8 GPUs; here: ResNet-20 on 5,000 images of MNIST on a simulated network, whose "
        f"bandwidths are {_SCALE} times lower, as the model is smaller",
        f"seconds: of rounds, by formulas, and {1e3 * _COMPUTE_S:g} ms of computing in each step; trials: steps of "
        "searches, which are undone and come besides, of each seed",
    ])  # fmt: skip
    show("Schedules C1 and C2 by network: mean milliseconds of a step, median ratio, collectives", parts)


def _whole(row: Mapping[str, Any]) -> float:
    return float(sum(phase["seconds"] for phase in row["phases"].values()))


_OPTIONS = {
    "--hosts": (8, "N", "of the labs of table VI"), "--scale": (20, "X", "divides lengths and bandwidths"),
    "--parts": ("VI,schedule", "P[,..]", "tables"), "--schedules": ("C1,C2", "C[,..]", "trained on"),
    "--cells": ("", "JSON", "keys of the only cells of table VI that are measured"),
}  # fmt: skip
STUDY = Study(
    "papers/flexible_tables", "Measure table VI of Flexible Communication in labs, and simulate its schedules.",
    ("table", "model", "gbps", "latency_ms", "ratio", "seed"), rows, tables,
    paper_runs.options("", 400, 4, "a scheduled training") | paper_runs.ARMS | _OPTIONS,
    {"steps": 50, "ranks": 1, "hosts": 2, "scale": 1},
    {"arms": lambda arguments: arms(arguments.steps)},
)  # fmt: skip

if __name__ == "__main__":
    if launcher.detect() is None:
        STUDY.main()
    sys.exit(run_program(Namespace, lambda _: _among_ranks(json.loads(sys.argv[-1]))))
