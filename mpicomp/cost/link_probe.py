"""Measure the network before the first step, in about a second: links, and a factor for every operation."""

import math
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from mpicomp.cost.formulas import terms
from mpicomp.cost.network_model import OPERATIONS, Network
from mpicomp.mpi.rounds import ACROSS, HOST, WORLD, Group, Round, Rounds, gather_rows
from mpicomp.mpi.transport import Transport

_SMALL_BYTES = 64  # of a message that measures latency
_MEDIUM_BYTES = 1 << 14  # libraries send shorter messages by algorithms with fewer messages
_FIRST_BYTES = 1 << 16  # of the first estimate of bandwidth
_REPEATS = 4  # of an operation, of which the fastest counts: disturbances only add time
_FEW_REPEATS = 2  # of a first estimate, and of an operation on a slow link
_LARGE_S = 0.02  # seconds that a large message should take
_LARGE_BYTES = 1 << 16, 1 << 20  # least and most of a large message
_SLOW_S = 5e-3  # latency from which on an operation is repeated less often
_SD = 0.1  # standard deviation of the logarithm of a measurement
_FACTOR_RANGE = (0.1, 10.0)

_BYTE = np.dtype(np.uint8)


def probe(network: Network, transport: Transport) -> Rounds[None]:
    """Measure links and every operation, and set the network's state. Collective over all ranks, as rounds."""
    group = transport.group
    for name in (WORLD, HOST, ACROSS):
        if name != WORLD and group.hosts in (1, group.size):
            continue  # the group is the world itself, or a single rank
        # All ranks take part: those outside of the group only receive the results.
        yield from _probe_group(network, transport, name)


def probe_link(network: Network, transport: Transport) -> Rounds[None]:
    """Measure links again: plans do not show whether latency or bandwidth has changed. Collective, as rounds."""
    latency, first_s = yield from _time_ring(transport, transport.group, _FEW_REPEATS)
    network.set_link(WORLD, latency, _seconds_per_byte(first_s, latency, _FIRST_BYTES), _SD)


def _time_ring(transport: Transport, group: Group | None, repeats: int) -> Rounds[tuple[float, float]]:
    small, first = (_task("sendrecv", group, nbytes) for nbytes in (_SMALL_BYTES, _FIRST_BYTES))
    tasks = [small] * (repeats + 1) + [first] * _FEW_REPEATS
    seconds = yield from _measure(transport, group, tasks)
    return float(seconds[1 : repeats + 1].min()), float(seconds[repeats + 1 :].min())


def _seconds_per_byte(seconds: float, latency: float, nbytes: int) -> float:
    return max(seconds - latency, 0.05 * seconds) / nbytes


def _probe_group(network: Network, transport: Transport, name: str) -> Rounds[None]:
    group = transport.group.part(name)
    sizes = yield from gather_rows(np.int64(0 if group is None else group.size), transport.group)
    largest = int(sizes.max())
    if largest < 2:
        return
    busy = group if group is not None and group.size > 1 else None
    latency, first_s = yield from _time_ring(transport, busy, 2 * _REPEATS)
    repeats = _REPEATS if latency < _SLOW_S else _FEW_REPEATS
    nbytes = int(np.clip(_FIRST_BYTES * _LARGE_S / max(first_s, 1e-6), *_LARGE_BYTES))
    others = [operation for operation in OPERATIONS if operation != "sendrecv"]
    tasks = []
    for operation in others:
        for size in (_MEDIUM_BYTES, nbytes):
            tasks += [_task(operation, busy, size)] * (repeats + 1)  # the first opens connections and allocates
    # The link comes last, and more often: TCP sends little at once on connections that have carried little. A link that
    # seems slow makes rings look slow, too, and a plan that looks slow is not tried.
    of_links = [_task("sendrecv", busy, nbytes)] * (2 * repeats)
    measured = yield from _measure(transport, busy, tasks + of_links)
    seconds = measured[: len(tasks)].reshape(len(others), 2, repeats + 1)[:, :, 1:].min(axis=2)
    seconds_per_byte = _seconds_per_byte(float(measured[len(tasks) :].min()), latency, nbytes)
    model = _model_group(name, largest, transport.group)
    if name == ACROSS:  # the link is the world's, and several ranks of a host have shared it here
        ring = terms(_task("sendrecv", model, nbytes), model)
        latency_factor = _clip_factor(latency / network.latency)
        volume_factor = _clip_factor(nbytes * seconds_per_byte / (ring.volume * network.seconds_per_byte))
        network.set_factors(name, "sendrecv", latency_factor, volume_factor, _SD)
        latency, seconds_per_byte = network.latency, network.seconds_per_byte
    else:
        network.set_link(name, latency, seconds_per_byte, _SD)
        network.set_factors(name, "sendrecv", 1.0, 1.0, _SD)
    for operation, (short_s, long_s) in zip(others, seconds, strict=True):
        few = terms(_task(operation, model, _MEDIUM_BYTES), model)
        many = terms(_task(operation, model, nbytes), model)
        volume_factor = _clip_factor((long_s - short_s) / ((many.volume - few.volume) * seconds_per_byte))
        volume_s = volume_factor * few.volume * seconds_per_byte
        latency_factor = _clip_factor((short_s - volume_s) / (few.latency * latency))
        network.set_factors(name, operation, latency_factor, volume_factor, 2 * _SD)


def _measure(transport: Transport, group: Group | None, tasks: list[Round]) -> Rounds[NDArray[np.float64]]:
    """Run rounds one after the other; return the seconds from last start to last end of each, the same on all ranks."""
    times = np.full((len(tasks), 2), -math.inf)
    if group is not None:
        for row, task in enumerate(tasks):
            times[row, 0] = transport.clock()
            yield task
            times[row, 1] = transport.clock()
    world = transport.group
    starts, ends = (yield from gather_rows(times, world)).max(axis=0).T
    seconds: NDArray[np.float64] = np.maximum(ends - starts, 1e-7)
    return seconds


def _model_group(name: str, size: int, world: Group) -> Group:
    """Return the largest group of a name as its first rank sees it: all ranks use its cost."""
    if name == WORLD:
        return world.seen_by(0)
    if name == HOST:
        return Group(0, size, name=name)
    return Group(0, size, name=name, hosts=size, sharing=min(Counter(world.layout).values()))


def _task(operation: str, group: Group | None, nbytes: int) -> Round:
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


def _clip_factor(factor: float) -> float:
    return min(max(factor, _FACTOR_RANGE[0]), _FACTOR_RANGE[1])
