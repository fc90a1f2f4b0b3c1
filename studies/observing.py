"""What traces and metrics cost: ``mpiexec -n 2 python studies/observing.py``."""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np
from inside import Inside, instead, largest_share, of_all_ranks
from mpicomp.bench.measure.intervals import median_interval
from mpicomp.bench.measure.metrics import MetricsWriter
from mpicomp.bench.tasks import get_task

import mpicomp
from mpicomp.cli import run_program
from mpicomp.setting_checks import check_least
from mpicomp.transport.mpi import MPITransport

_WARM = 10  # steps that compile and agree


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="studies/observing.py",
        description="Train a task, in turns with a trace and metrics that are written and without, and compare the "
        "seconds of a turn, and those of a processor, with those of the turn before: all that is written in it counts. "
        "The calls that note and write are timed as well, as a share of the turn.",
    )
    parser.add_argument("--task", default="digits", help="as of mpicomp train (%(default)s)")
    parser.add_argument("--compressor", default="topk", help="its name (%(default)s)")
    parser.add_argument("--steps", type=int, default=25, metavar="N", help="in a turn (%(default)s)")
    parser.add_argument("--turns", type=int, default=80, metavar="N", help="half of them with both (%(default)s)")
    return parser


@contextlib.contextmanager
def _counted(inside: Inside) -> Iterator[None]:
    """Count the seconds inside of the calls that note and write."""
    with instead(
        *((mpicomp.trace, name, inside.of(getattr(mpicomp.trace, name))) for name in ("step", "flush")),
        *((MetricsWriter, name, inside.of(getattr(MetricsWriter, name))) for name in ("write", "flush")),
    ):
        yield


def run(arguments: argparse.Namespace) -> int:
    """Train, and print on rank 0."""
    check_least("observing", "--steps", arguments.steps)
    check_least("observing", "--turns", arguments.turns, 2)
    from mpicomp.torch import DistributedOptimizer, broadcast_parameters

    transport = MPITransport()
    group = transport.group
    task = get_task(arguments.task, 0, None, False)
    model = task.model()
    broadcast_parameters(model, comm=transport)
    named = model.named_parameters()
    optimizer = DistributedOptimizer(
        task.optimizer(model), named, arguments.compressor, "allgather", comm=transport, overlap=False, warmup=0
    )
    seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    step, size, inside = 0, 0, Inside()
    calls: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        for turn in range(-1, 2 * (arguments.turns // 2)):
            watched = turn % 2 == 1
            with contextlib.ExitStack() as stack:
                writer, trace = None, None
                if watched:
                    trace = stack.enter_context(mpicomp.trace(path, comm=transport))
                    writer = stack.enter_context(MetricsWriter(f"{path}l"))
                    stack.enter_context(_counted(inside))
                noted = inside.seconds
                start, used = time.perf_counter(), time.process_time()
                for _ in range(_WARM if turn < 0 else arguments.steps):
                    optimizer.zero_grad()
                    task.loss(model, task.batch(step, group.rank, group.size)).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    if writer is not None:
                        writer.write(optimizer.reducer.last_step.to_json)
                    step += 1
                if trace is not None and writer is not None:
                    trace.flush()
                    writer.flush()
                if turn >= 0:
                    seconds[watched].append((time.perf_counter() - start, time.process_time() - used))
                    if watched:
                        calls.append(inside.seconds - noted)
            if watched and group.rank == 0:
                size = os.path.getsize(path)
    rows = np.array([*seconds[False], *seconds[True], *([inside_s, 0.0] for inside_s in calls)])
    rows = rows.reshape(3, -1, 2) / arguments.steps  # alone, watched and inside; turn; seconds and those of a processor
    rows = of_all_ranks(rows, transport)
    optimizer.close()
    transport.close()
    if group.rank == 0:
        alone, watched_, _ = rows.max(axis=0)  # the slowest rank's
        share, between = largest_share(rows[:, 2, :, 0], rows[:, 1, :, 0])
        costs = watched_ / alone - 1
        row = {
            "task": arguments.task,
            "ranks": group.size,
            "steps": alone.shape[0] * arguments.steps,
            "median_step_s": np.median(alone[:, 0]),
            "median_watched_step_s": np.median(watched_[:, 0]),
            "cost": np.median(costs[:, 0]),
            **_ends("cost", median_interval(costs[:, 0].tolist())),
            "cost_of_processor": np.median(costs[:, 1]),
            "inside": share,
            **_ends("inside", between),
            "trace_bytes_a_step_and_rank": size / arguments.steps / group.size,
        }
        print(json.dumps(row))
    return 0


def _ends(name: str, interval: tuple[float, float] | None) -> dict[str, float | None]:
    low, high = interval or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
