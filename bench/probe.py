"""How long an exchange takes here and now, by itself: so that schemes are compared under the same conditions."""

import time
from dataclasses import dataclass

import numpy as np

from mpicomp.collectives import Round, fitting
from mpicomp.compressors import Compressor, Dense
from mpicomp.reducer import Reducer
from mpicomp.transport import Transport

_REPEATS = 5
_LIMIT_S = 6.0  # of measuring one collective


@dataclass(frozen=True)
class Probe:
    """A collective, and its median seconds for one whole exchange on the slowest rank."""

    collective: str
    seconds: float
    repeats: int


def probe(compressor: Compressor, collective: str, numel: int, transport: Transport) -> Probe:
    """Exchange ``numel`` float32 some times, the ranks starting together. Collective.

    A slow network is measured fewer times: what has taken several seconds is not repeated.
    """
    rng = np.random.default_rng(transport.group.rank)
    gradient = {"probe": rng.standard_normal(numel, np.float32)}
    reducer = Reducer(compressor, collective, comm=transport)
    warm = time.perf_counter()
    for _ in range(3):  # agrees, compiles, grows buffers and finds bounds
        reducer.reduce(gradient)
        if _largest(transport, time.perf_counter() - warm) > _LIMIT_S / 2:
            break
    samples: list[float] = []
    while len(samples) < _REPEATS and sum(samples) < _LIMIT_S:
        _largest(transport, 0.0)  # nobody starts before the others are there
        start = time.perf_counter()
        reducer.reduce(gradient)
        samples.append(_largest(transport, time.perf_counter() - start))
    return Probe(collective, float(np.median(samples)), len(samples))


def probe_dense(numel: int, transport: Transport) -> Probe:
    """Measure every dense collective and give the fastest. Collective."""
    probes = [probe(Dense(), name, numel, transport) for name in fitting(Dense)]
    return min(probes, key=lambda measured: measured.seconds)


def _largest(transport: Transport, seconds: float) -> float:
    size = transport.group.size
    task = Round("allgatherv", [1] * size, np.dtype(float), send=np.array([seconds]), recv=np.empty(size))
    return float(transport.perform(task).max())
