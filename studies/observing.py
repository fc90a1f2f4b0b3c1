"""Study of what it costs to be watched: ``mpiexec -n 2 python studies/observing.py``."""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np
from inside import Inside, instead
from mpicomp.bench.measure.intervals import block_interval, median_interval
from mpicomp.bench.measure.metrics import MetricsWriter
from mpicomp.bench.tasks import get_task

import mpicomp
from mpicomp.cli import run_program
from mpicomp.cli.options import check_least
from mpicomp.rounds import Round
from mpicomp.transport.mpi import MPITransport

_WARM = 10  # steps that compile and agree


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
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
    own = np.array([*seconds[False], *seconds[True], *([own, 0.0] for own in calls)])
    own = own.reshape(3, -1, 2) / arguments.steps  # alone, watched and inside; turn; seconds and those of a processor
    recv = np.empty((group.size, *own.shape))
    task_ = Round("allgatherv", [own.size] * group.size, own.dtype, send=own.reshape(-1), recv=recv.reshape(-1))
    transport.perform(task_)
    alone, watched_, _ = recv.max(axis=0)  # the slowest rank's
    shares = recv[:, 2, :, 0].sum(axis=1) / recv[:, 1, :, 0].sum(axis=1)
    most = int(shares.argmax())
    optimizer.close()
    transport.close()
    if group.rank == 0:
        costs = watched_ / alone - 1
        low, high = median_interval(costs[:, 0].tolist()) or (None, None)
        between = block_interval(lambda own, all_: own.sum() / all_.sum(), recv[most, 2, :, 0], recv[most, 1, :, 0])
        told = {
            "task": arguments.task,
            "ranks": group.size,
            "steps": alone.shape[0] * arguments.steps,
            "median_step_s": np.median(alone[:, 0]),
            "median_watched_step_s": np.median(watched_[:, 0]),
            "cost": np.median(costs[:, 0]),
            "cost_low": low,
            "cost_high": high,
            "cost_of_processor": np.median(costs[:, 1]),
            "inside": shares[most],  # of the rank that has the largest share
            "inside_low": None if between is None else between[0],
            "inside_high": None if between is None else between[1],
            "trace_bytes_a_step_and_rank": size / arguments.steps / group.size,
        }
        print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
