"""How training would scale if the network were used to the full: ``python studies/what_if.py --from F``.

Zhang et al. 2020, "Is Network the Bottleneck of Distributed Training?", arXiv 2006.10103: backward fills a buffer that
is handed over when 5 ms have passed or it holds 64 MB, and buffers are summed one after the other by a ring that uses
the whole bandwidth. Latency, compression itself, contention and stragglers cost nothing; so these are upper bounds.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpicomp.bench.measure import results
from mpicomp.bench.simulate.measured import Measured, read

from mpicomp.cli import run_program
from mpicomp.cli.options import check_writable, read_list
from mpicomp.setting_checks import check_least

_STUDY = "what_if"
_BUFFER_S = 5e-3
_BUFFER_BYTES = 64 << 20
BANDWIDTHS = (1e9, 10e9, 25e9, 40e9, 100e9)
"""The paper's, in bits a second."""
COMPRESSIONS = (1, 2, 5, 10, 50, 100)
"""The paper's: times fewer bytes."""

_LENGTHS = tuple(1 << bits for bits in range(10, 25, 2))  # elements of the sums that are measured
_REPEATS = 5


def buffers(measured: Measured) -> list[tuple[float, int]]:
    """Return when each buffer is handed over, in seconds from the beginning of backward, and its bytes."""
    gradients = [gradient for bucket in measured.buckets for gradient in bucket.gradients]
    found, nbytes, since = [], 0, 0.0
    for gradient in sorted(gradients, key=lambda gradient: gradient.ready_s):
        nbytes += 4 * gradient.numel
        if gradient.ready_s - since >= _BUFFER_S or nbytes >= _BUFFER_BYTES:
            found.append((gradient.ready_s, nbytes))
            nbytes, since = 0, gradient.ready_s
    if nbytes:
        found.append((measured.backward_s, nbytes))
    return found


def scaling(
    measured: Measured, ranks: int, bandwidth: float, compression: float, sums: Sequence[tuple[float, float]]
) -> float:
    """Return seconds of a step alone over those among ranks, with ``compression`` times fewer bytes.

    ``sums`` are bytes of an array, ascending, and the seconds in which another one is added to it.
    """
    lengths, seconds = zip(*sums, strict=True)
    end = 0.0
    for ready, nbytes in buffers(measured):
        pass_s = 8 * nbytes * (ranks - 1) / ranks / bandwidth / compression
        add_s = float(np.interp(nbytes / ranks, (0.0, *lengths), (0.0, *seconds)))
        end = max(ready, end) + 2 * pass_s + (ranks - 1) * add_s
    overhead = max(0.0, end - measured.backward_s)
    return measured.compute_s / (measured.compute_s + overhead)


def measure_sums() -> list[tuple[float, float]]:
    """Return the seconds in which arrays are added on this machine, by their bytes."""
    found = []
    for length in _LENGTHS:
        total, other = np.zeros(length, np.float32), np.ones(length, np.float32)
        seconds = []
        for _ in range(_REPEATS):
            start = time.thread_time()
            np.add(total, other, out=total)
            seconds.append(time.thread_time() - start)
        found.append((4.0 * length, min(seconds)))
    return found


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"studies/{_STUDY}.py", description=__doc__)
    parser.add_argument("--from", dest="known", metavar="F", required=True, help="from `mpicomp train --measured F`")
    parser.add_argument("--ranks", default="2,4,8,16,32,64", metavar="N[,..]", help="(%(default)s)")
    parser.add_argument("--json", metavar="F", help="write a row for each rank, bandwidth and compression to F")
    parser.set_defaults(alone=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each number of ranks and bandwidth, with a column for each compression."""
    if arguments.json is not None:
        check_writable(_STUDY, arguments.json)
    measured, sums = read(arguments.known), measure_sums()
    rows, lines = [], []
    for ranks in [check_least(_STUDY, "--ranks", int(word), 2) for word in read_list(arguments.ranks)]:
        for bandwidth in BANDWIDTHS:
            line: dict[str, Any] = {"ranks": ranks, "gbit/s": bandwidth / 1e9}
            for times in COMPRESSIONS:
                line[f"{times}x"] = scaling(measured, ranks, bandwidth, times, sums)
                key = {"ranks": ranks, "bandwidth": bandwidth, "compression": times}
                rows.append(key | {"scaling": line[f"{times}x"]})
            lines.append(line)
    print("seconds of a step alone over those among ranks, with so many times fewer bytes")
    columns = [f"{times}x" for times in COMPRESSIONS]
    results.show(lines, {"ranks": "d", "gbit/s": "g"} | dict.fromkeys(columns, ".1%"))
    if arguments.json is not None:
        results.write(arguments.json, rows, 1)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
