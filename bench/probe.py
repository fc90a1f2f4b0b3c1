"""How long an exchange takes here and now, by itself: so that schemes are compared under the same conditions."""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import Round, fitting
from mpicomp.compressors import Compressor, Dense
from mpicomp.reducer import Reducer
from mpicomp.transport import Transport

_REPEATS = 5
_LIMIT_S = 6.0  # of measuring one collective


@dataclass(frozen=True)
class Probe:
    """A collective and how long it took.

    Attributes
    ----------
    collective : str
        Its name.
    seconds : float
        One whole exchange on the slowest rank: median.
    rounds_s : float
        Its rounds alone, on the rank that came last and waited for nobody: median.
    repeats : int
        Exchanges measured.
    """

    collective: str
    seconds: float
    rounds_s: float
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
        if _of_all(transport, time.perf_counter() - warm).max() > _LIMIT_S / 2:
            break
    samples: list[float] = []
    rounds: list[float] = []
    while len(samples) < _REPEATS and sum(samples) < _LIMIT_S:
        _of_all(transport, 0.0)  # nobody starts before the others are there
        start = time.perf_counter()
        reducer.reduce(gradient)
        samples.append(float(_of_all(transport, time.perf_counter() - start).max()))
        assert reducer.last_step is not None
        rounds.append(float(_of_all(transport, reducer.last_step.phases_s["exchange"]).min()))
    return Probe(collective, float(np.median(samples)), float(np.median(rounds)), len(samples))


def probe_dense(numel: int, transport: Transport) -> Probe:
    """Measure every dense collective and give the fastest. Collective."""
    probes = [probe(Dense(), name, numel, transport) for name in fitting(Dense)]
    return min(probes, key=lambda measured: measured.seconds)


def _of_all(transport: Transport, seconds: float) -> NDArray[np.float64]:
    size = transport.group.size
    task = Round("allgatherv", [1] * size, np.dtype(float), send=np.array([seconds]), recv=np.empty(size))
    return transport.perform(task)
