"""Measurement of the network before the first step, in about a second: links, and a factor for every operation."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.cost.formulas import terms
from mpicomp.cost.network import OPERATIONS, Network
from mpicomp.rounds import ACROSS, HOST, WORLD, Group, Round, Rounds, gather_rows
from mpicomp.transport.base import Transport

_SMALL = 64  # bytes that a rank sends where latency is measured
_MEDIUM = 1 << 14  # bytes: of shorter messages libraries make operations with other, fewer messages
_FIRST = 1 << 16  # bytes of the first look at the bandwidth
_FEW = 2  # repetitions of a first look, and of an operation that takes longer than _SLOW_S
_SLOW_S = 5e-3  # seconds from which on an operation is repeated less often
_SD = 0.1  # standard deviation of the logarithm of a measurement
_FACTORS = (0.1, 10.0)  # smallest and largest factor, whatever was measured

_BYTE = np.dtype(np.uint8)

Probing = Rounds[None]


@dataclass(frozen=True)
class Effort:
    """How much time probing takes.

    Parameters
    ----------
    large_s : float
        Seconds that a large message is to take.
    large : (int, int)
        Bytes of one, at least and at most.
    repeats, few : int
        Repetitions of an operation, and of one where a small message takes long.
    typical : callable
        Which of the repetitions counts: takes an array and an axis.
    apart : bool
        Whether all ranks meet before each round.
    """

    large_s: float
    large: tuple[int, int]
    repeats: int
    few: int
    typical: Callable[..., Any]
    apart: bool = False


QUICK = Effort(0.02, (1 << 16, 1 << 20), 4, _FEW, np.min)
"""About a second, before a training: the fastest repetition counts, since what disturbs only adds."""
THOROUGH = Effort(0.3, (1 << 18, 1 << 23), 5, 5, np.median, apart=True)
"""Messages as long as gradients are, some dozen seconds on a slow link: the median is what a step has to expect."""


def probe(network: Network, transport: Transport, effort: Effort = QUICK) -> Probing:
    """Measure links and every operation, and set the network's state. Collective over all ranks, as rounds.

    Each group that has more than one rank is measured. An operation's seconds are from the last rank's start to the
    last rank's end, by the ranks' common clock.
    """
    group = transport.group
    for name in (WORLD, HOST, ACROSS):
        if name != WORLD and group.hosts in (1, group.size):
            continue  # it is the world itself, or one rank alone
        # Every rank goes along: those that are in no such group, or alone in it, have nothing to do but to listen.
        yield from _probe_group(network, transport, name, effort)


def probe_link(network: Network, transport: Transport) -> Probing:
    """Measure the links between hosts anew, in some milliseconds. Collective over all ranks, as rounds.

    For when they are found to have changed: one plan's seconds do not tell whether it is the latency or the bandwidth.
    """
    latency, first = yield from _look(transport, transport.group, _FEW, QUICK)
    network.set_link(WORLD, latency, _rate(first, latency, _FIRST), _SD)


def _look(transport: Transport, busy: Group | None, repeats: int, effort: Effort) -> Rounds[tuple[float, float]]:
    """Return the seconds in which all ranks pass a small and a larger message to their neighbours."""
    tasks = [_ring(busy, _SMALL)] * (repeats + 1) + [_ring(busy, _FIRST)] * _FEW
    seconds = yield from _measure(transport, busy, tasks, effort.apart)
    return float(effort.typical(seconds[1 : repeats + 1])), float(seconds[repeats + 1 :].min())


def _rate(seconds: float, latency: float, nbytes: int) -> float:
    return max(seconds - latency, 0.05 * seconds) / nbytes


def _probe_group(network: Network, transport: Transport, name: str, effort: Effort) -> Probing:
    group = transport.group.part(name)
    largest = yield from _largest(0 if group is None else group.size, transport.group)
    if largest < 2:
        return
    busy = group if group is not None and group.size > 1 else None
    latency, first = yield from _look(transport, busy, 2 * effort.repeats, effort)
    repeats = effort.repeats if latency < _SLOW_S else effort.few
    nbytes = int(np.clip(_FIRST * effort.large_s / max(first, 1e-6), *effort.large))
    large = yield from _measure(transport, busy, [_ring(busy, nbytes)] * repeats, effort.apart)
    seconds_per_byte = _rate(float(effort.typical(large)), latency, nbytes)
    model = _as_all_see_it(name, largest, transport.group)
    if name == ACROSS:  # the link is the world's, and several ranks of a host have just shared it
        ring = terms(_ring(model, nbytes), model)
        slow = _clipped(latency / network.latency)
        volume = _clipped(nbytes * seconds_per_byte / (ring.volume * network.seconds_per_byte))
        network.set_factors(name, "sendrecv", slow, volume, _SD)
        latency, seconds_per_byte = network.latency, network.seconds_per_byte
    else:
        network.set_link(name, latency, seconds_per_byte, _SD)
        network.set_factors(name, "sendrecv", 1.0, 1.0, _SD)

    tasks = []
    others = [operation for operation in OPERATIONS if operation != "sendrecv"]
    for operation in others:
        for size in (_MEDIUM, nbytes):
            tasks += [_task(operation, busy, size)] * (repeats + 1)  # the first one opens connections and grows buffers
    each = (yield from _measure(transport, busy, tasks, effort.apart)).reshape(len(others), 2, repeats + 1)
    seconds = effort.typical(each[:, :, 1:], axis=2)
    for operation, (short, long) in zip(others, seconds, strict=True):
        few = terms(_task(operation, model, _MEDIUM), model)
        many = terms(_task(operation, model, nbytes), model)
        volume = _clipped((long - short) / ((many.volume - few.volume) * seconds_per_byte))
        slow = _clipped((short - volume * few.volume * seconds_per_byte) / (few.latency * latency))
        network.set_factors(name, operation, slow, volume, 2 * _SD)


def _measure(
    transport: Transport, group: Group | None, tasks: list[Round], apart: bool = False
) -> Rounds[NDArray[np.float64]]:
    """Run rounds one after the other; return the seconds of each, the same numbers on all ranks.

    A rank that is done early begins the next round early, which then seems to be shorter; ``apart`` has all ranks meet
    before each.
    """
    times = np.full((len(tasks), 2), -math.inf)
    if group is not None:
        for place, task in enumerate(tasks):
            if apart:
                yield _task("allgatherv", group, 1)
            times[place, 0] = transport.clock()
            yield task
            times[place, 1] = transport.clock()
    world = transport.group
    starts, ends = (yield from gather_rows(times, world)).max(axis=0).T
    seconds: NDArray[np.float64] = np.maximum(ends - starts, 1e-7)
    return seconds


def _as_all_see_it(name: str, size: int, world: Group) -> Group:
    """Return the largest group of a name as its first rank sees it: all ranks use the cost that it has."""
    if name == WORLD:
        return world.seen_by(0)
    if name == HOST:
        return Group(0, size, name=name)
    return Group(0, size, name=name, hosts=size, sharing=min(Counter(world.layout).values()))


def _largest(size: int, world: Group) -> Rounds[int]:
    return int((yield from gather_rows(np.int64(size), world)).max())


def _ring(group: Group | None, nbytes: int) -> Round:
    return _task("sendrecv", group, nbytes)


def _task(operation: str, group: Group | None, nbytes: int) -> Round:
    """Return a round in which about ``nbytes`` pass a link, with arrays of zeros."""
    if group is None:
        return Round(operation, (0,), _BYTE)
    size = group.size
    share = max(1, nbytes // (size - 1))
    match operation:
        case "allreduce":
            single = np.dtype(np.float32)
            return Round(
                operation, (nbytes // 4,), single, send=np.zeros(nbytes // 4, single),
                recv=np.zeros(nbytes // 4, single), group=group.name,
            )  # fmt: skip
        case "bcast":
            counts, sent, received = [nbytes], nbytes, nbytes
        case "sendrecv":
            counts, sent, received = [nbytes, nbytes], nbytes, nbytes
        case "alltoallv":
            counts, sent, received = [share] * size, share * size, share * size
        case _:
            counts, sent, received = [share] * size, share, share * size
    peers = ((group.rank + 1) % size, (group.rank - 1) % size) if operation == "sendrecv" else (None, None)
    return Round(
        operation, counts, _BYTE, send=np.zeros(sent, _BYTE), recv=np.zeros(received, _BYTE), group=group.name,
        peers=peers,
    )  # fmt: skip


def _clipped(factor: float) -> float:
    return min(max(factor, _FACTORS[0]), _FACTORS[1])
