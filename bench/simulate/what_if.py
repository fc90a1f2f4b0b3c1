"""What if the network were used to the full: the scaling of dense and of compressed training, by a published formula.

Zhang et al. 2020, "Is Network the Bottleneck of Distributed Training?", arXiv 2006.10103: backward fills a buffer that
is handed over when 5 ms have passed or it holds 64 MB, and buffers are summed one after the other by a ring that uses
the whole bandwidth. Latency, compression itself, contention and stragglers cost nothing; so these are upper bounds.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpicomp.bench.simulate.measured import Measured

_BUFFER_S = 5e-3
_BUFFER_BYTES = 64 << 20
BANDWIDTHS = (1e9, 10e9, 25e9, 40e9, 100e9)
"""Bits a second that the paper looks at."""
COMPRESSIONS = (1, 2, 5, 10, 50, 100)
"""Times fewer bytes that it looks at."""

_LENGTHS = tuple(1 << bits for bits in range(10, 25, 2))  # elements of the sums that are measured
_REPEATS = 5


def buffers(measured: Measured) -> list[tuple[float, int]]:
    """Return when each buffer is handed over, in seconds from the beginning of backward, and its bytes."""
    gradients = sorted((own for bucket in measured.buckets for own in bucket.gradients), key=lambda own: own.ready_s)
    found, nbytes, since = [], 0, 0.0
    for own in gradients:
        nbytes += 4 * own.numel
        if own.ready_s - since >= _BUFFER_S or nbytes >= _BUFFER_BYTES:
            found.append((own.ready_s, nbytes))
            nbytes, since = 0, own.ready_s
    if nbytes:
        found.append((measured.backward_s, nbytes))
    return found


def scaling(
    measured: Measured, ranks: int, bandwidth: float, compression: float, sums: Sequence[tuple[float, float]]
) -> float:
    """Return the scaling factor: seconds of a step alone over those among ranks.

    Parameters
    ----------
    measured : Measured
        The recorded backward.
    ranks : int
    bandwidth : float
        Bits a second.
    compression : float
        Times fewer bytes.
    sums : sequence of (float, float)
        Bytes of an array, ascending, and the seconds in which another one is added to it.
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


def what_if(measured: Measured, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each number of ranks, bandwidth and compression."""
    sums = measure_sums()
    return [
        {"ranks": own, "bandwidth": bandwidth, "compression": times,
         "scaling": scaling(measured, own, bandwidth, times, sums)}
        for own in ranks
        for bandwidth in BANDWIDTHS
        for times in COMPRESSIONS
    ]  # fmt: skip
