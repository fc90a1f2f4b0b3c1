"""What the checks cost that are on by default: ``mpiexec -n 2 python studies/checks.py``."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
from mpicomp.bench.measure.intervals import ratio_interval
from mpicomp.bench.tasks import get_task
from mpicomp.bench.tasks.updating import Updater
from mpicomp.bench.train import threads_of_rank

from mpicomp.cli import run_program
from mpicomp.cli.options import add_task, check_least, check_writable
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.reducer import step as reducer_step
from mpicomp.reducer.layout import Layout
from mpicomp.reducer.pace import Pace
from mpicomp.rounds import Round
from mpicomp.system.files import whole_file

_STUDY = "checks"
_FIRST = 10  # steps that compile, agree and grow buffers
_LOOKS = 20  # comparisons of replicas that are timed


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        prog="studies/checks.py",
        description="Train, with the checks on and off from step to step, and print the ratio of the medians: the "
        "watch for ranks that do not come, the comparison of names, shapes and dtypes, the look for NaN, and who is "
        "slow. The comparison of replicas is timed by itself, and counts once in as many steps as it is made in.",
    )
    add_task(parser)
    parser.add_argument("--compressor", default="topk", help="a name from `mpicomp list` (%(default)s)")
    parser.add_argument("--collective", default="allgather", help="that carries it (%(default)s)")
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="of each of the two (%(default)s)")
    parser.add_argument("--json", metavar="F", help="write the outcome to F as one JSON object")
    return parser


def _nothing(*_: Any) -> Iterator[None]:
    """Make no round."""
    return
    yield


@contextlib.contextmanager
def _without(reducer: Any) -> Iterator[None]:
    """Turn the checks off that are made in every step."""
    transport, layout = reducer.transport, reducer._core.layout
    watch = transport._watch
    with (
        patch.object(reducer_step, "describe", lambda gradients: layout.members),
        patch.object(Layout, "knows", lambda self, members: True),
        patch.object(Accumulated, "finite", True),
        patch.object(Pace, "note", lambda *words: None),
        patch.object(Pace, "tell", _nothing),
    ):
        transport._watch = None
        try:
            yield
        finally:
            transport._watch = watch


def run(arguments: argparse.Namespace) -> int:
    """Train, and print the ratio on rank 0."""
    check_least(_STUDY, "--steps", arguments.steps, _FIRST)
    if arguments.json is not None:
        check_writable(_STUDY, arguments.json)
    import torch

    from mpicomp.torch import DistributedOptimizer, broadcast_parameters
    from mpicomp.torch.comparing import COMPARE_EVERY, Fingerprint
    from mpicomp.transport.mpi import MPITransport

    transport = MPITransport()
    group = transport.group
    torch.set_num_threads(threads_of_rank(transport.cores))
    task = get_task(arguments.task, 0, None, arguments.shards)
    model = task.model()
    broadcast_parameters(model, comm=transport)
    optimizer = DistributedOptimizer(
        task.optimizer(model),
        model.named_parameters(),
        arguments.compressor,
        arguments.collective,
        comm=transport,
        warmup=0,
        overlap=False,
        compare_every=0,
    )
    updater = Updater(task, optimizer, 2 * arguments.steps + _FIRST)
    kinds: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
        "on": contextlib.nullcontext,
        "off": lambda: _without(optimizer.reducer),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    order = np.random.default_rng(0)  # the same on all ranks
    for turn in range(-_FIRST, arguments.steps):
        for kind in order.permutation(list(kinds)) if turn >= 0 else ["on"]:
            begin = time.perf_counter()
            optimizer.zero_grad(set_to_none=False)
            loss = task.loss(model, task.batch(turn + _FIRST, group.rank, group.size))
            loss.backward()  # type: ignore[no-untyped-call]
            with kinds[kind]():
                optimizer.synchronize()
            updater.update()
            if turn >= 0:
                seconds[kind].append(time.perf_counter() - begin)
    fingerprint, named = Fingerprint(1), dict(model.named_parameters())
    looks = []
    for _ in range(_LOOKS):
        begin = time.perf_counter()
        transport.run(fingerprint.look(named, group, _STUDY))
        looks.append(time.perf_counter() - begin)
    rows = np.array([*seconds["on"], *seconds["off"], *looks])
    recv = np.empty(group.size * rows.size)
    slowest = transport.perform(Round("allgatherv", [rows.size] * group.size, rows.dtype, send=rows, recv=recv))
    slowest = slowest.reshape(group.size, -1).max(axis=0)
    on, off = (slowest[start : start + arguments.steps].tolist() for start in (0, arguments.steps))
    transport.close()
    if group.rank == 0:
        _tell(arguments, group.size, on, off, float(np.median(slowest[-_LOOKS:])) / COMPARE_EVERY)
    return 0


def _tell(arguments: argparse.Namespace, ranks: int, on: list[float], off: list[float], replicas_s: float) -> None:
    step_s = float(np.median(off))
    share, interval = replicas_s / step_s, ratio_interval(on, off)
    outcome = {
        "schema": 1,
        "task": arguments.task,
        "compressor": arguments.compressor,
        "collective": arguments.collective,
        "ranks": ranks,
        "steps": arguments.steps,
        "off_s": step_s,
        "on_s": float(np.median(on)) + replicas_s,
        "ratio": float(np.median(on)) / step_s + share,
        "interval": None if interval is None else [own + share for own in interval],
        "replicas": share,
    }
    between = "" if interval is None else f" (95 %: {interval[0] + share:.4f} to {interval[1] + share:.4f})"
    print(
        f"{arguments.task}, {arguments.compressor} by {arguments.collective}, {ranks} ranks: a step takes "
        f"{1e3 * step_s:.2f} ms without checks, and {outcome['ratio']:.4f} times as long with them{between}; "
        f"{share:.1e} of that is the comparison of replicas",
        flush=True,
    )
    if arguments.json is not None:
        with whole_file(arguments.json) as file:
            json.dump(outcome, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
