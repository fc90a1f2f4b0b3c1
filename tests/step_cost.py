"""Count what one steady step does on the host: files, functions, Python calls, microseconds.

    mpiexec -n 2 python tests/step_cost.py [--json F] [--steps N] [--large [N ...] [--gloo]]

One bucket of 1,000 floats: dense by allreduce, top-k by allgather, and `auto`, next to MPI's Allreduce alone. Files and
functions are those of mpicomp and its kernels. Calls are of functions, Python's and C's, as cProfile counts them: the
median over steps. Microseconds are the median and, as machines are shared, the fastest tenth of steps that take turns.

With ``--large`` instead: dense sums of one large array, in turn with MPI's Allreduce, or with PyTorch's over gloo, and
the ratios of medians.
"""

import argparse
import contextlib
import cProfile
import functools
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpicomp

ROOT = Path(mpicomp.__file__).resolve().parent
KERNELS = ROOT.parent / "kernels"
NUMEL = 1000
SETTINGS = {
    "dense": {"compressor": "dense", "collective": "allreduce"},
    "topk": {"compressor": "topk", "collective": "allgather"},
    "auto": {"policy": "auto"},
}
LARGE = (100_000, 250_000, 1_000_000, 4_000_000)
LARGE_SETTINGS = {"dense": {"compressor": "dense"}, "auto": {"policy": {"id": "auto", "fidelity": 1}}}
WARM_STEPS = 400
TRACED_STEPS = 20


def functions_of(step):
    """Return the functions of mpicomp and its kernels that a step visits, as (file, name)."""
    found = set()

    def trace(frame, event, argument):
        if event == "call":
            path = Path(frame.f_code.co_filename)
            for root in (ROOT, KERNELS):
                if path.is_relative_to(root) and not frame.f_code.co_name.startswith("<"):
                    found.add((str(path.relative_to(ROOT.parent)), frame.f_code.co_qualname))

    sys.setprofile(trace)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


def calls_of(step):
    """Return the number of calls of a step: of Python functions, and of all."""
    profile = cProfile.Profile()
    profile.enable()
    step()
    profile.disable()
    python = everything = 0
    for entry in profile.getstats():
        everything += entry.callcount
        python += 0 if isinstance(entry.code, str) else entry.callcount
    return python, everything


def seconds_in_turn(steps, count):
    """Return the seconds of steps that take turns, by name."""
    seconds = {name: [] for name in steps}
    for _ in range(count):
        for name, step in steps.items():
            MPI.COMM_WORLD.Barrier()
            begin = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


@contextlib.contextmanager
def sum_of(library):
    """Give a function that sums an array of ranks by the library, to another one; gloo only sums in place."""
    if library == "MPI":
        yield MPI.COMM_WORLD.Allreduce
        return
    import torch
    from mpicomp.bench.peers import process_group

    from mpicomp.mpi.comm import MPITransport

    with contextlib.closing(MPITransport()) as transport, process_group(transport):
        yield lambda _, total: torch.distributed.all_reduce(torch.from_numpy(total))


def compare_large_sums(lengths, count, library, add):
    """Print the medians of dense sums, and their ratios to a library's."""
    for numel in lengths:
        gradients = {"w": np.random.default_rng(MPI.COMM_WORLD.rank).standard_normal(numel).astype(np.float32)}
        reducers = {name: mpicomp.Reducer(**settings) for name, settings in LARGE_SETTINGS.items()}
        steps = {name: functools.partial(reducer.reduce, gradients) for name, reducer in reducers.items()}
        steps[library] = functools.partial(add, gradients["w"], np.zeros(numel, np.float32))
        seconds_in_turn(steps, min(count, WARM_STEPS // 4))
        medians = {name: statistics.median(times) for name, times in seconds_in_turn(steps, count).items()}
        if MPI.COMM_WORLD.rank == 0:
            least = medians[library]
            row = [f"{name} {1e6 * median:.0f} us ({median / least:.2f})" for name, median in medians.items()]
            print(f"{numel:9} floats: {', '.join(row)}", flush=True)
        for reducer in reducers.values():
            reducer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="write all numbers, and the files, to this file")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--large", nargs="*", type=int, help="compare sums of so many elements with MPI's")
    parser.add_argument("--gloo", action="store_true", help="... or with gloo's")
    options = parser.parse_args()
    if options.large is not None:
        library = "gloo" if options.gloo else "MPI"
        with sum_of(library) as add:
            compare_large_sums(options.large or LARGE, options.steps // 10, library, add)
        return
    rank = MPI.COMM_WORLD.rank
    gradients = {"w": np.random.default_rng(rank).standard_normal(NUMEL).astype(np.float32)}
    reducers = {name: mpicomp.Reducer(**settings) for name, settings in SETTINGS.items()}
    steps = {name: lambda reducer=reducer: reducer.reduce(gradients) for name, reducer in reducers.items()}
    recv = np.empty(NUMEL, np.float32)
    steps["Allreduce"] = lambda: MPI.COMM_WORLD.Allreduce(gradients["w"], recv)
    for step in steps.values():
        for _ in range(WARM_STEPS):
            step()
    table = {}
    for name, step in steps.items():
        visits = [functions_of(step) for _ in range(TRACED_STEPS)]
        calls = [calls_of(step) for _ in range(TRACED_STEPS)]
        visited = sorted(visits, key=len)[TRACED_STEPS // 2]
        table[name] = {
            "files": len({file for file, _ in visited}),
            "functions": len(visited),
            "python_calls": statistics.median(python for python, _ in calls),
            "calls": statistics.median(everything for _, everything in calls),
            "visited": sorted(visited),
        }
    for name, durations in seconds_in_turn(steps, options.steps).items():
        table[name]["median_us"] = 1e6 * statistics.median(durations)
        table[name]["fastest_tenth_us"] = 1e6 * statistics.quantiles(durations, n=10)[0]
    if rank == 0:
        columns = ["files", "functions", "python_calls", "calls", "median_us", "fastest_tenth_us"]
        print(f"{'':10}" + "".join(f"{column:>18}" for column in columns))
        for name, row in table.items():
            print(f"{name:10}" + "".join(f"{row[column]:18.0f}" for column in columns))
        if options.json:
            Path(options.json).write_text(json.dumps(table, indent=1))
    for reducer in reducers.values():
        reducer.close()


if __name__ == "__main__":
    main()
