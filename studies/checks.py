"""What the checks cost that are on by default: ``mpiexec -n 2 python studies/checks.py``."""

import argparse
import contextlib
import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
from mpicomp.bench.measure.intervals import block_interval, ratio_interval
from mpicomp.bench.measure.timings import gather
from mpicomp.bench.replica import threads_of_rank
from mpicomp.bench.tasks import get_task
from mpicomp.bench.tasks.updating import Updater
from numpy.typing import NDArray

from mpicomp.arrays import SpecCache
from mpicomp.cli import run_program
from mpicomp.cli.options import add_task, check_writable
from mpicomp.collectives import allgather, is_finite, packed_allgather, parameter_server
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.reducer.layout import Layout
from mpicomp.reducer.telemetry import Telemetry
from mpicomp.setting_checks import check_least
from mpicomp.system import whole_file

_STUDY = "checks"
_FIRST = 10  # steps that compile, agree and grow buffers
_COMPARISONS = 20  # of replicas, that are timed
_CHECKED = allgather, packed_allgather, parameter_server  # what delivers a mean that is checked


class Inside:
    """Counts the wall-clock seconds that calls take, on all threads; a call within another one counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._one_at_a_time = threading.Lock()
        self._thread = _Thread()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        outer, self._thread.within = self._thread.within, True
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._add(begin, outer)

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and is counted."""
        thread, clock = self._thread, time.perf_counter

        # A call that takes a microsecond is not to be counted as two: what is around it is kept short.
        @functools.wraps(function)
        def counted(*words: Any, **named: Any) -> Any:
            outer, thread.within = thread.within, True
            begin = clock()
            try:
                return function(*words, **named)
            finally:
                self._add(begin, outer)

        return counted

    def of_rounds(self, function: Callable[..., Generator[Any, Any, Any]]) -> Callable[..., Generator[Any, Any, Any]]:
        """Return rounds that are the same, and are counted, waiting included."""

        @functools.wraps(function)
        def counted(*words: Any, **named: Any) -> Generator[Any, Any, Any]:
            with self.counted():
                return (yield from function(*words, **named))

        return counted

    def _add(self, begin: float, outer: bool) -> None:
        seconds = time.perf_counter() - begin
        self._thread.within = outer
        if not outer:
            with self._one_at_a_time:
                self.seconds += seconds


class _Thread(threading.local):
    within = False  # a call that is counted


@contextlib.contextmanager
def instead(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes until the end of the block."""
    with contextlib.ExitStack() as stack:
        for owner, name, other in changes:
            stack.enter_context(patch.object(owner, name, other))
        yield


def largest_share(
    inside: NDArray[np.float64], seconds: NDArray[np.float64]
) -> tuple[float, tuple[float, float] | None]:
    """Return the share of seconds, shape (ranks, turns), inside of calls on the rank with the largest; its interval."""
    shares = inside.sum(axis=1) / seconds.sum(axis=1)
    rank = int(shares.argmax())
    return float(shares[rank]), block_interval(lambda part, all_: part.sum() / all_.sum(), inside[rank], seconds[rank])


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="studies/checks.py",
        description="Train, with the checks on and off from step to step, and print the ratio of the medians: the "
        "watch for ranks that do not come, the comparison of names, shapes and dtypes, the look for NaN, and who is "
        "slow. In as many further steps the calls of these checks are timed, as a share of the step. The comparison of "
        "replicas is timed by itself, and counts once in as many steps as it is made in.",
    )
    add_task(parser)
    parser.add_argument("--compressor", default="topk", help="a name from `mpicomp list` (%(default)s)")
    parser.add_argument("--collective", default="allgather", help="that carries it (%(default)s)")
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="of each of the three (%(default)s)")
    parser.add_argument("--json", metavar="F", help="write the outcome to F as one JSON object")
    return parser


def _nothing(*_: Any) -> Iterator[None]:
    """Make no round."""
    return
    yield


@contextlib.contextmanager
def _without(reducer: Any) -> Iterator[None]:
    """Turn the checks off that are made in every step."""
    transport, layout = reducer.transport, reducer.layout
    watch = transport._watch
    with instead(
        (SpecCache, "describe", lambda self, gradients: layout.members),
        (Layout, "knows", lambda self, members: True),
        (GradientWithResidual, "finite", True),
        (Telemetry, "note_work", lambda *words: None),
        (Telemetry, "share_work", _nothing),
    ):
        transport._watch = None
        try:
            yield
        finally:
            transport._watch = watch


@contextlib.contextmanager
def _counted(reducer: Any, inside: Inside) -> Iterator[None]:
    """Count the seconds inside of the same checks, and of the check of the mean."""

    def finite(accumulated: GradientWithResidual) -> bool:
        accumulated.device_moments  # noqa: B018, the sum is made whether or not it is checked
        with inside.counted():
            return accumulated.moments.finite

    watch = type(reducer.transport._watch)
    with instead(
        (SpecCache, "describe", inside.of(SpecCache.describe)),
        (Layout, "knows", inside.of(Layout.knows)),
        (GradientWithResidual, "finite", property(finite)),
        *((module, "is_finite", inside.of(is_finite)) for module in _CHECKED),
        (Telemetry, "note_work", inside.of(Telemetry.note_work)),
        (Telemetry, "share_work", inside.of_rounds(Telemetry.share_work)),
        *((watch, name, inside.of(getattr(watch, name))) for name in ("begin", "end", "look")),
    ):
        yield


def run(arguments: argparse.Namespace) -> int:
    """Train, and print the ratio and the share on rank 0."""
    check_least(_STUDY, "--steps", arguments.steps, _FIRST)
    if arguments.json is not None:
        check_writable(_STUDY, arguments.json)
    import torch

    from mpicomp.torch import DistributedOptimizer, broadcast_parameters
    from mpicomp.torch.replica_checks import COMPARE_EVERY, Fingerprint
    from mpicomp.transport.mpi import MPITransport

    transport = MPITransport()
    group = transport.group
    torch.set_num_threads(threads_of_rank(transport.cores))
    task = get_task(arguments.task, 0, None, arguments.shards)
    model = task.model()
    broadcast_parameters(model, comm=transport)
    optimizer = DistributedOptimizer(
        task.optimizer(model), model.named_parameters(), arguments.compressor, arguments.collective,
        comm=transport, warmup=0, overlap=False, compare_every=0,
    )  # fmt: skip
    updater = Updater(task, optimizer, 3 * arguments.steps + _FIRST)
    inside = Inside()
    kinds: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
        "on": contextlib.nullcontext,
        "off": lambda: _without(optimizer.reducer),
        "counted": lambda: _counted(optimizer.reducer, inside),
    }
    checked: list[float] = []
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    order = np.random.default_rng(0)  # the same on all ranks
    for turn in range(-_FIRST, arguments.steps):
        for kind in order.permutation(list(kinds)) if turn >= 0 else ["on"]:
            begin = time.perf_counter()
            optimizer.zero_grad(set_to_none=False)
            loss = task.loss(model, task.batch(turn + _FIRST, group.rank, group.size))
            loss.backward()  # type: ignore[no-untyped-call]
            before = inside.seconds
            with kinds[kind]():
                optimizer.synchronize()
            updater.update()
            if turn >= 0:
                seconds[kind].append(time.perf_counter() - begin)
                if kind == "counted":
                    checked.append(inside.seconds - before)
    fingerprint, named = Fingerprint(1, _STUDY, same_batches=True), dict(model.named_parameters())
    transport.run(fingerprint.compare(named, group))  # before the first step nothing is compared
    comparisons = []
    for _ in range(_COMPARISONS):
        begin = time.perf_counter()
        transport.run(fingerprint.compare(named, group))
        comparisons.append(time.perf_counter() - begin)
    rows = np.array([*seconds["on"], *seconds["off"], *seconds["counted"], *checked, *comparisons])
    rows = gather(rows, transport)
    on, off, counted, calls = np.split(rows[:, :-_COMPARISONS], 4, axis=1)
    transport.close()
    if group.rank == 0:
        replicas_s = float(np.median(rows[:, -_COMPARISONS:].max(axis=0))) / COMPARE_EVERY
        on_s, off_s = on.max(axis=0).tolist(), off.max(axis=0).tolist()
        _print(arguments, group.size, on_s, off_s, replicas_s, *largest_share(calls, counted))
    return 0


def _print(
    arguments: argparse.Namespace, ranks: int, on: list[float], off: list[float], replicas_s: float, inside: float,
    inside_interval: tuple[float, float] | None,
) -> None:  # fmt: skip
    step_s = float(np.median(off))
    share, interval = replicas_s / step_s, ratio_interval(on, off)
    outcome: dict[str, Any] = {"schema": 1}
    outcome |= {name: getattr(arguments, name) for name in ("task", "compressor", "collective")}
    outcome |= {"ranks": ranks, "steps": arguments.steps, "off_s": step_s, "on_s": float(np.median(on)) + replicas_s}
    outcome["ratio"] = float(np.median(on)) / step_s + share
    outcome["interval"] = None if interval is None else [end + share for end in interval]
    outcome |= {"replicas": share, "inside": inside + share}
    outcome["inside_interval"] = None if inside_interval is None else [end + share for end in inside_interval]
    between = "" if interval is None else f" (95 %: {interval[0] + share:.4f} to {interval[1] + share:.4f})"
    print(
        f"{arguments.task}, {arguments.compressor} by {arguments.collective}, {ranks} ranks: a step takes "
        f"{1e3 * step_s:.2f} ms without checks, and {outcome['ratio']:.4f} times as long with them{between}; "
        f"{share:.1e} of that is the comparison of replicas",
        flush=True,
    )
    around = "" if inside_interval is None else f" (95 %: {inside_interval[0]:.3%} to {inside_interval[1]:.3%})"
    print(f"inside of the checks' calls: {inside:.3%} of a step{around}, and {share:.3%} of replicas", flush=True)
    if arguments.json is not None:
        with whole_file(arguments.json) as file:
            json.dump(outcome, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
