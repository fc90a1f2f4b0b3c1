"""How long a dense exchange takes here and now: what compression is compared with."""

import time
from dataclasses import dataclass

import numpy as np

from mpicomp.collectives import Round, fitting
from mpicomp.compressors import Dense
from mpicomp.reducer import Reducer
from mpicomp.transport import Transport

_REPEATS = 3
_LIMIT_S = 6.0  # of measuring one collective


@dataclass(frozen=True)
class DenseProbe:
    """The best dense collective and its median seconds for one whole exchange on the slowest rank."""

    collective: str
    seconds: float
    repeats: int


def probe_dense(numel: int, transport: Transport) -> DenseProbe:
    """Exchange ``numel`` float32 by every dense collective, some times, and give the fastest. Collective.

    A slow network is measured fewer times: what has taken several seconds is not repeated.
    """
    gradient = {"probe": np.zeros(numel, np.float32)}
    best: DenseProbe | None = None
    for name in fitting(Dense):
        reducer = Reducer(Dense(), name, comm=transport)
        reducer.reduce(gradient)  # agrees, compiles and grows buffers
        samples: list[float] = []
        while len(samples) < _REPEATS and sum(samples) < _LIMIT_S:
            _largest(transport, 0.0)  # nobody starts before the others are there
            start = time.perf_counter()
            reducer.reduce(gradient)
            samples.append(_largest(transport, time.perf_counter() - start))
        seconds = float(np.median(samples))
        if best is None or seconds < best.seconds:
            best = DenseProbe(name, seconds, len(samples))
    assert best is not None
    return best


def _largest(transport: Transport, seconds: float) -> float:
    size = transport.group.size
    task = Round("allgatherv", [1] * size, np.dtype(float), send=np.array([seconds]), recv=np.empty(size))
    return float(transport.perform(task).max())
