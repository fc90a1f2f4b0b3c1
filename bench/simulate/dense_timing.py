"""Dense exchanges, timed by themselves in the recorded run: what the rounds' formulas leave out of them."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
from mpicomp.bench.measure.timings import gather
from mpicomp.bench.simulate.clock import Clock
from mpicomp.bench.simulate.topology import Topology

from mpicomp.collectives import Scheme, bind
from mpicomp.compressors import Dense
from mpicomp.cost import Network
from mpicomp.policies.plan_selector import collectives_for
from mpicomp.reducer import Reducer
from mpicomp.rounds import Round
from mpicomp.rounds.reports import from_one
from mpicomp.transport import Transport

_COLD = 2  # exchanges before the timed ones: they agree, open connections, grow buffers
_TIMED = 3  # exchanges whose median counts
_NAP_S = 0.01  # seconds between two looks whether the others are done
_LIMIT_S = 4.0  # seconds of one exchange at one length, from which on it is not repeated
_TOO_SLOW = 3.0  # times the fastest of a length: an exchange that is slower, and takes so long, is left out
_SHORTER = 4  # times shorter than the longest bucket is the other length
_DTYPE = np.dtype(np.float32)


@dataclass(frozen=True)
class Timed:
    """A dense exchange that was timed."""

    collective: str
    ranks: int  # that took part
    numel: int  # elements of the array
    own_s: float  # median over exchanges of the slowest rank's computation
    rounds_s: float  # median of the rest, from the last rank's start to the last rank's end

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        numbers = float(content["own_s"]), float(content["rounds_s"])
        return cls(str(content["collective"]), int(content["ranks"]), int(content["numel"]), *numbers)


def time_dense(longest: int, transport: Transport) -> list[Timed]:
    """Time every dense exchange at some lengths, among all ranks and among fewer, one a host. Collective."""
    group = transport.group
    found: list[Timed] = []
    for ranks in range(2, group.size) if group.hosts == group.size else ():
        some = transport.subgroup(ranks)
        if some is not None:
            found += _time(longest, some)
            some.close()
        _meet(transport)
    return _of_first(found, transport) + (_time(longest, transport) if group.size > 1 else [])


def _time(longest: int, transport: Transport) -> list[Timed]:
    found = []
    for numel in sorted({max(1, longest // _SHORTER), longest}):
        gradient = {"gradient": np.random.default_rng(transport.group.rank).standard_normal(numel, np.float32)}
        best = math.inf
        for name in collectives_for(Dense(), transport.group):
            reducer = Reducer(Dense(), name, comm=transport, bucket_bytes=4 * numel)
            rows: list[tuple[float, float]] = []
            while len(rows) < _COLD + _TIMED and (len(rows) < _COLD or np.sum(rows) < _LIMIT_S):
                rows.append(_exchange(reducer, gradient, transport))
                if sum(rows[0]) > max(_LIMIT_S, _TOO_SLOW * best):
                    break
            reducer.close()
            if len(rows) > 1:
                own_s, rounds_s = np.median(rows[min(_COLD, len(rows) - 1) :], axis=0).tolist()
                found.append(Timed(name, transport.group.size, numel, own_s, rounds_s))
                best = min(best, own_s + rounds_s)
    return found


def _meet(transport: Transport) -> None:
    """Wait for all ranks without keeping a core from those that are busy."""
    ranks = transport.group.size
    byte = np.dtype(np.uint8)
    task = Round("allgatherv", [1] * ranks, byte, send=np.zeros(1, byte), recv=np.zeros(ranks, byte))
    pending = transport.start(replace(task, background=True))
    while not pending.test():
        time.sleep(_NAP_S)
    transport.wait(pending)


def _of_first(found: list[Timed], transport: Transport) -> list[Timed]:
    shared = transport.run(from_one({"timed": [timed.to_json() for timed in found]}, transport.group, "simulate"))
    return [Timed.from_json(content) for content in shared["timed"]]


def _exchange(reducer: Reducer, gradient: dict[str, Any], transport: Transport) -> tuple[float, float]:
    """Return the seconds of the slowest rank's computation and those of the rest."""
    gather(np.zeros(1), transport)  # nobody starts before the others are there
    began = time.perf_counter()
    reducer.reduce(gradient)
    seconds = time.perf_counter() - began
    record = reducer.last_step
    assert record is not None
    phases = record.buckets[0].phases_s
    compute, whole = gather(np.array([phases["compress"] + phases["decode"], seconds]), transport).max(axis=0).tolist()
    return compute, max(whole - compute, 0.0)


class Corrections:
    """Ratios of measured to predicted seconds of dense exchanges, by ranks: powers of two differ from others."""

    def __init__(self, timed: Sequence[Timed], network: Network, measured_ranks: int, hosts: int, ranks: int) -> None:
        self._timed: dict[str, list[Timed]] = {}
        for timing in sorted(timed, key=lambda timing: timing.numel):
            self._timed.setdefault(timing.collective, []).append(timing)
        per_host = -(-measured_ranks // hosts)
        self._factors: dict[str, list[float]] = {}
        for name, of_name in self._timed.items():
            nearest = _nearest(ranks, {timing.ranks for timing in of_name})
            self._timed[name] = [timing for timing in of_name if timing.ranks == nearest]
            clock = Clock(Topology(nearest, per_host, network, measured_ranks))
            scheme = bind(Dense(), name)
            self._factors[name] = [
                timing.rounds_s / clock.seconds(scheme, timing.numel, _DTYPE) for timing in self._timed[name]
            ]

    def knows(self, scheme: Scheme[Any]) -> bool:
        return scheme.compressor == Dense() and scheme.id in self._timed

    def own_s(self, scheme: Scheme[Any], numel: int) -> float:
        """Return the seconds of computation, with as many an element as at the nearest length."""
        return numel * self._at(numel, scheme, (timing.own_s / timing.numel for timing in self._timed[scheme.id]))

    def factor(self, scheme: Scheme[Any], numel: int) -> float:
        """Return how many times longer rounds take than is predicted."""
        return self._at(numel, scheme, self._factors[scheme.id])

    def _at(self, numel: int, scheme: Scheme[Any], values: Iterable[float]) -> float:
        lengths = [math.log(timing.numel) for timing in self._timed[scheme.id]]
        return float(np.interp(math.log(max(1, numel)), lengths, list(values)))


def _nearest(ranks: int, known: Iterable[int]) -> int:
    """Return the known number of ranks that is most like another.

    >>> _nearest(16, [2, 3, 4, 5]), _nearest(6, [2, 3, 4, 5]), _nearest(8, [5])
    (4, 5, 5)
    """
    return min(
        known, key=lambda other: (_is_power_of_two(other) != _is_power_of_two(ranks), abs(math.log(other / ranks)))
    )


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
