"""Dense exchange and gloo's, of one long array: ``mpicomp lab run --hosts 4 .. -- python studies/gloo_sums.py``."""

import argparse
import json
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from mpicomp.bench.gloo import process_group
from mpicomp.bench.measure.intervals import median_interval
from mpicomp.bench.measure.timings import gather
from torch import distributed

import mpicomp
from mpicomp.cli import run_program
from mpicomp.setting_checks import check_least
from mpicomp.transport.mpi import MPITransport

_STUDY = "gloo_sums"
_WARM = 6  # turns that do not count, in which mpicomp finds its collective


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"studies/{_STUDY}.py",
        description="Sum an array of float32 by mpicomp's dense exchange and by gloo's allreduce, in turn.",
    )
    parser.add_argument("--numel", type=int, default=25_600_000, metavar="N", help="elements (%(default)s)")
    parser.add_argument("--turns", type=int, default=9, metavar="N", help="that count (%(default)s)")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print an object: median seconds of both on the slowest rank, and the median of their ratios with its interval."""
    check_least(_STUDY, "--numel", arguments.numel)
    check_least(_STUDY, "--turns", arguments.turns)
    transport = MPITransport()
    reducer = mpicomp.Reducer(mpicomp.Dense(), comm=transport)
    ours = np.random.default_rng(transport.group.rank).standard_normal(arguments.numel, np.float32)
    theirs = torch.from_numpy(ours.copy())
    with process_group(transport):
        calls: list[Callable[[], object]] = [
            lambda: reducer.reduce({"array": ours}),
            lambda: distributed.all_reduce(theirs),
        ]
        rows = []
        for turn in range(-_WARM, arguments.turns):
            took = []
            for call in calls:
                gather(np.zeros(1), transport)  # all begin at once
                begin = time.perf_counter()
                call()
                took.append(time.perf_counter() - begin)
            theirs.mul_(1 / transport.group.size)
            if turn >= 0:
                rows.append(gather(np.array(took), transport).max(axis=0))
    record = reducer.last_step
    assert record is not None
    seconds = np.array(rows)
    ratios = seconds[:, 0] / seconds[:, 1]
    if transport.group.rank == 0:
        median_s, gloo_s = np.median(seconds, axis=0)
        row = {"numel": arguments.numel, "ranks": transport.group.size, "collective": record.buckets[0].collective}
        row |= {"median_s": median_s, "gloo_s": gloo_s, "ratio": np.median(ratios)}
        print(json.dumps(row | {"interval": median_interval(ratios.tolist())}))
    reducer.close()
    transport.close()
    return 0


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
