"""Timing of exchanges by themselves, after a training, so that schemes are compared under the same conditions."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpicomp.bench.measure.timings import gather
from numpy.typing import NDArray

from mpicomp.collectives import fitting
from mpicomp.compressors import Compressor, Dense
from mpicomp.cost import CostModel
from mpicomp.mpi import Transport
from mpicomp.reducer import Reducer

_WARM = 3  # exchanges before the timed ones
_REPEATS = 5  # timed exchanges of a collective
_LIMIT_S = 6.0  # seconds of measuring one collective
_TOO_SLOW = 3.0  # times the best collective so far: a slower one is not measured further


@dataclass(frozen=True)
class Probe:
    """A collective and the seconds that it took."""

    collective: str
    seconds: float  # one whole exchange on the slowest rank: median
    rounds_s: float  # its rounds alone, on the rank that came last and waited for no other: median
    repeats: int  # exchanges measured


def probe(
    compressor: Compressor,
    collective: str,
    numel: int,
    transport: Transport,
    best_s: float = math.inf,
    cost: CostModel | None = None,
    bring: Callable[[NDArray[np.float32]], Any] = np.asarray,
    wait: Callable[[], None] = lambda: None,
) -> Probe:
    """Exchange ``numel`` float32 some times, all ranks starting at once. Collective.

    A slow network is measured fewer times: an exchange of several seconds is not repeated. Nor is one that takes three
    times as long as ``best_s``, the same on all ranks, when it is warm. ``cost`` is the model by which a collective
    is chosen. ``bring`` brings the array to where gradients are, and ``wait`` waits until all that was begun
    there is done.
    """
    rng = np.random.default_rng(transport.group.rank)
    gradient = {"probe": bring(rng.standard_normal(numel, np.float32))}
    reducer = Reducer(compressor, collective, comm=transport, policy={"cost": cost, "warmup": 0})
    samples: list[float] = []
    rounds: list[float] = []

    def exchange() -> None:
        gather(np.zeros(1), transport)  # all ranks start together
        start = time.perf_counter()
        reducer.reduce(gradient)
        wait()
        whole_s = time.perf_counter() - start
        assert reducer.last_step is not None
        everyones = gather(np.array([whole_s, reducer.last_step.phases_s["exchange"]]), transport)
        samples.append(float(everyones[:, 0].max()))
        rounds.append(float(everyones[:, 1].min()))

    for _ in range(_WARM):  # agrees, compiles, grows buffers and finds bounds
        exchange()
        slow = len(samples) > 1 and samples[-1] > _TOO_SLOW * best_s
        if slow or sum(samples) > _LIMIT_S / 2:
            break
    if slow:
        del samples[:-1], rounds[:-1]
    else:
        samples.clear()
        rounds.clear()
        while len(samples) < _REPEATS and sum(samples) < _LIMIT_S:
            exchange()
    reducer.close()
    return Probe(collective, float(np.median(samples)), float(np.median(rounds)), len(samples))


def probe_dense(numel: int, transport: Transport, **there: Any) -> Probe:
    """Measure every dense collective and return the fastest; ``there`` as for `probe`. Collective."""
    found: list[Probe] = []
    for name in fitting(Dense):
        best_s = min((one.seconds for one in found), default=math.inf)
        found.append(probe(Dense(), name, numel, transport, best_s, **there))
    return min(found, key=lambda one: one.seconds)
