"""Seconds of a step: backward as it was recorded, and exchanges among the ranks of a topology."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpicomp.bench.simulate.clock import Clock
from mpicomp.bench.simulate.compute_time import ComputeTime
from mpicomp.bench.simulate.dense_timing import Corrections
from mpicomp.bench.simulate.measured import Measured
from mpicomp.bench.simulate.topology import Topology

from mpicomp.collectives import Scheme


@dataclass(frozen=True)
class Seconds:
    """Seconds of one bucket's exchange: computation of the slowest rank, and rounds."""

    compute: float
    rounds: float

    @property
    def whole(self) -> float:
        """Both, one after the other."""
        return self.compute + self.rounds


def ends(measured: Measured, exchanges: Sequence[float], overlap: bool) -> tuple[list[float], list[float]]:
    """Return when buckets are ready and when each has been exchanged, one after the other, since the step began."""
    over = measured.forward_s + measured.backward_s
    ready = [measured.forward_s + bucket.ready_s if overlap else over for bucket in measured.buckets]
    ready[-1] = over  # what only then is known goes with it
    now, finished = 0.0, []
    for start, seconds in zip(ready, exchanges, strict=True):
        now = max(now, start) + seconds
        finished.append(now)
    return ready, finished


def step_seconds(measured: Measured, exchanges: Sequence[float], overlap: bool) -> float:
    """Return the seconds of a step; see `ends`."""
    return ends(measured, exchanges, overlap)[1][-1] + measured.update_s


class Exchanges:
    """Predicts the seconds of exchanges."""

    def __init__(self, topology: Topology, compute_time: ComputeTime, corrections: Corrections) -> None:
        self._topology = topology
        self._compute_time = compute_time
        self._corrections = corrections
        self._clock = Clock(topology)
        self._known: dict[tuple[Scheme[Any], int, np.dtype[Any]], Seconds] = {}

    def seconds(self, scheme: Scheme[Any], numel: int, dtype: np.dtype[Any], most: float = math.inf) -> Seconds | None:
        """Return the seconds of an exchange; None where its rounds take at least ``most``."""
        key = scheme, numel, dtype
        if key not in self._known:
            timed = self._corrections.knows(scheme)
            factor = self._corrections.factor(scheme, numel) if timed else 1.0
            rounds = factor * self._clock.seconds(scheme, numel, dtype, most / factor)
            if rounds >= most:
                return None
            if timed:
                compute = self._corrections.own_s(scheme, numel)
            else:
                compute = self._compute_time.seconds(scheme, numel, dtype, self._topology)
            self._known[key] = Seconds(compute, rounds)
        return self._known[key]
