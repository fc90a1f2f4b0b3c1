"""Seconds of exchanges among the ranks of a topology."""

import math
from typing import Any

import numpy as np
from mpicomp.bench.simulate.clock import Clock
from mpicomp.bench.simulate.dense import Corrections
from mpicomp.bench.simulate.own_work import OwnWork
from mpicomp.bench.simulate.step import Seconds
from mpicomp.bench.simulate.topology import Topology

from mpicomp.collectives import Scheme


class Exchanges:
    """Predicts the seconds of exchanges."""

    def __init__(self, topology: Topology, own_work: OwnWork, corrections: Corrections) -> None:
        self._topology = topology
        self._own_work = own_work
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
                own = self._corrections.own_s(scheme, numel)
            else:
                own = self._own_work.seconds(scheme, numel, dtype, self._topology)
            self._known[key] = Seconds(own, rounds)
        return self._known[key]
