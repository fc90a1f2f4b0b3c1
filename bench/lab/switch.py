"""The loop that carries packets between hosts, compiled: bytes cost hardly anything, packets some microseconds.

Times are integer nanoseconds of the monotonic clock. Imported only by the process that runs the loop.
"""

import heapq
from typing import Any, NamedTuple

import numpy as np
from mpicomp.kernels.cache import cached
from numba import njit, typeof, types
from numpy.typing import NDArray

# Called by name, for a compiled function that holds the address of one cannot be cached on disk.
_read: Any = types.ExternalFunction("read", types.intp(types.int32, types.intp, types.uintp))
_write: Any = types.ExternalFunction("write", types.intp(types.int32, types.intp, types.uintp))
_ppoll: Any = types.ExternalFunction("ppoll", types.int32(types.intp, types.uintp, types.intp, types.intp))
_typeof: Any = typeof
_clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))

# Bytes before each packet on a TUN device with IFF_VNET_HDR; they reach the receiver unchanged.
HEADER = 10

_CLOCK_MONOTONIC = 1
_POLLIN = 1
# Nanoseconds by which packets are put on a cable before they may leave, which saves a wake-up for each.
_AHEAD = 100_000
# Nanoseconds by which a sleeping process wakes late, about.
_LATE = 10_000
_LONGEST = 1_000_000_000
# Packets taken from one host before the next has its turn.
_TURN = 8
_NONE = -1
# Nanoseconds until a cable that is down is tried again.
_LOOK_AGAIN = 1_000_000


class Packets(NamedTuple):
    """Packets under way, each in a slot."""

    data: NDArray[np.uint8]
    length: NDArray[np.int64]
    came: NDArray[np.int64]  # when the first byte was at the cable that is next
    last: NDArray[np.int64]  # when the last byte is at the switch
    target: NDArray[np.int64]
    after: NDArray[np.int64]  # the next slot of the same queue
    free: NDArray[np.int64]
    counts: NDArray[np.int64]  # of free slots, and of packets put on a cable


class Cables(NamedTuple):
    """The cables of all hosts in one direction, each with a queue of slots."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    free_at: NDArray[np.int64]


@cached
@njit(nogil=True)
def _now(spec: NDArray[np.int64]) -> int:
    _clock_gettime(_CLOCK_MONOTONIC, spec.ctypes.data)
    return spec[0] * 1_000_000_000 + spec[1]  # type: ignore[no-any-return]


@cached
@njit(nogil=True)
def _draw(lost: NDArray[np.uint64]) -> int:
    # SplitMix64, Steele et al. 2014, doi:10.1145/2714064.2660195.
    lost[1] += np.uint64(0x9E3779B97F4A7C15)
    word = lost[1]
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))  # type: ignore[no-any-return]


@cached
@njit(nogil=True)
def _append(cables: Cables, after: NDArray[np.int64], host: int, slot: int) -> None:
    after[slot] = _NONE
    if cables.first[host] == _NONE:
        cables.first[host] = slot
    else:
        after[cables.last[host]] = slot
    cables.last[host] = slot


@cached
@njit(nogil=True)
def _release(packets: Packets, slot: int) -> None:
    packets.free[packets.counts[0]] = slot
    packets.counts[0] += 1


@cached
@njit(nogil=True)
def _receiver_of(packet: NDArray[np.uint8], size: int, network: NDArray[np.uint8], hosts: int) -> int:
    # Only IPv4 from host to host has a receiver here.
    if size < HEADER + 20 or packet[HEADER] >> 4 != 4:
        return _NONE
    for place in range(3):
        if packet[HEADER + 16 + place] != network[place]:
            return _NONE
    host = int(packet[HEADER + 19]) - 1
    return host if 0 <= host < hosts else _NONE


@cached
@njit(nogil=True)
def _take_packets(
    host: int, device: int, network: NDArray[np.uint8], packets: Packets, out: Cables, spec: NDArray[np.int64]
) -> None:
    room = packets.data.shape[1]
    for _ in range(_TURN):
        if packets.counts[0] == 0:
            break
        slot = packets.free[packets.counts[0] - 1]
        size = _read(device, packets.data.ctypes.data + slot * room, room)
        if size <= 0:
            break
        receiver = _receiver_of(packets.data[slot], size, network, out.first.size)
        if receiver == _NONE:
            continue
        packets.counts[0] -= 1
        packets.length[slot] = size
        packets.target[slot] = receiver
        packets.came[slot] = _now(spec)
        _append(out, packets.after, host, slot)


@cached
@njit(nogil=True)
def _leave_hosts(
    now: int,
    out: Cables,
    into: Cables,
    packets: Packets,
    flying: Any,
    picoseconds_a_byte: NDArray[np.int64],
    half_latency: NDArray[np.int64],
) -> int:
    # Puts packets on the senders' cables, and returns when to look at these again.
    following = now + _LONGEST
    for host in range(half_latency.size):
        if picoseconds_a_byte[host] < 0:
            # It gets no credit for the time in which it was down.
            out.free_at[host], into.free_at[host] = max(out.free_at[host], now), max(into.free_at[host], now)
            following = min(following, now + _LOOK_AGAIN)
            continue
        while out.first[host] != _NONE and out.free_at[host] <= now + _AHEAD:
            slot = out.first[host]
            out.first[host] = packets.after[slot]
            begin = max(out.free_at[host], packets.came[slot])
            out.free_at[host] = begin + (packets.length[slot] - HEADER) * picoseconds_a_byte[host] // 1000
            latency = half_latency[host] + half_latency[packets.target[slot]]
            packets.last[slot] = out.free_at[host] + latency
            packets.counts[1] += 1
            heapq.heappush(flying, (begin + latency, packets.counts[1], slot))
        if out.first[host] != _NONE:
            following = min(following, out.free_at[host] - _AHEAD // 2)
    return following


@cached
@njit(nogil=True)
def _reach_switch(horizon: int, into: Cables, packets: Packets, flying: Any, lost: NDArray[np.uint64]) -> None:
    while len(flying) > 0 and flying[0][0] <= horizon:
        begin, _, slot = heapq.heappop(flying)
        if lost[0] > 0 and _draw(lost) < lost[0]:
            _release(packets, slot)
            continue
        packets.came[slot] = begin
        _append(into, packets.after, packets.target[slot], slot)


@cached
@njit(nogil=True)
def _leave_switch(
    horizon: int, following: int, into: Cables, packets: Packets, due: Any, picoseconds_a_byte: NDArray[np.int64]
) -> int:
    for host in range(picoseconds_a_byte.size):
        if picoseconds_a_byte[host] < 0:
            continue
        while into.first[host] != _NONE and into.free_at[host] <= horizon:
            slot = into.first[host]
            into.first[host] = packets.after[slot]
            begin = max(into.free_at[host], packets.came[slot])
            end = begin + (packets.length[slot] - HEADER) * picoseconds_a_byte[host] // 1000
            into.free_at[host] = max(end, packets.last[slot])
            packets.counts[1] += 1
            heapq.heappush(due, (into.free_at[host], packets.counts[1], slot))
        if into.first[host] != _NONE:
            following = min(following, into.free_at[host] - _AHEAD // 2)
    return following


@cached
@njit(nogil=True)
def _deliver(now: int, devices: NDArray[np.int32], packets: Packets, due: Any, spec: NDArray[np.int64]) -> int:
    while len(due) > 0 and due[0][0] <= now:
        _, _, slot = heapq.heappop(due)
        place = packets.data.ctypes.data + slot * packets.data.shape[1]
        # A packet for which the receiver has no memory is lost; TCP sends it again.
        _write(devices[packets.target[slot]], place, packets.length[slot])
        _release(packets, slot)
        now = _now(spec)
    return now


@cached
@njit(nogil=True)
def forward(
    devices: NDArray[np.int32],
    picoseconds_a_byte: NDArray[np.int64],
    half_latency: NDArray[np.int64],
    network: NDArray[np.uint8],
    slots: NDArray[np.uint8],
    lost: NDArray[np.uint64],
) -> Any:
    """Forward packets for ever.

    A packet waits at its host until the cable there is free, is under way for the latency, waits at the switch until
    the cable of the receiver is free, and is handed over when its last byte would have come. The switch passes on the
    first byte before the last has come, so that an idle path costs the time of one cable. The clocks of the cables give
    no credit for idle time, unlike a token bucket.

    ``devices`` are TUN devices, non-blocking, with IFF_VNET_HDR. Another process may change the cables at any time;
    below 0 picoseconds one is down, and packets wait. Host i has the address ``network`` and i + 1. ``slots`` are room
    for packets under way; ``lost`` is the share of packets that get lost, times 2**64, and the state of random numbers.
    """
    hosts, count = devices.size, slots.shape[0]
    spec = np.zeros(2, np.int64)
    sleep = np.zeros(2, np.int64)
    watched = np.zeros((hosts, 2), np.int32)

    packets = Packets(
        slots, np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64),
        np.zeros(count, np.int64), np.full(count, _NONE, np.int64), np.arange(count - 1, -1, -1), np.array([count, 0]),
    )  # fmt: skip
    out = Cables(np.full(hosts, _NONE, np.int64), np.full(hosts, _NONE, np.int64), np.zeros(hosts, np.int64))
    into = Cables(np.full(hosts, _NONE, np.int64), np.full(hosts, _NONE, np.int64), np.zeros(hosts, np.int64))
    flying = [(0, 0, 0) for _ in range(0)]
    due = [(0, 0, 0) for _ in range(0)]
    ready = 0

    while True:
        if ready > 0:
            for host in range(hosts):
                if watched[host, 1] >> 16 != 0:
                    _take_packets(host, devices[host], network, packets, out, spec)

        now = _now(spec)
        horizon = now + _AHEAD
        following = _leave_hosts(now, out, into, packets, flying, picoseconds_a_byte, half_latency)
        _reach_switch(horizon, into, packets, flying, lost)
        if len(flying) > 0:
            following = min(following, flying[0][0] - _AHEAD // 2)
        following = _leave_switch(horizon, following, into, packets, due, picoseconds_a_byte)
        now = _deliver(now, devices, packets, due, spec)
        if len(due) > 0:
            following = min(following, due[0][0])

        for host in range(hosts):
            watched[host, 0] = devices[host]
            watched[host, 1] = _POLLIN if packets.counts[0] > 0 else 0
        wait = max(0, following - _LATE - now)
        sleep[0] = wait // 1_000_000_000
        sleep[1] = wait % 1_000_000_000
        ready = _ppoll(watched.ctypes.data, hosts, sleep.ctypes.data, 0)


def prepare(arguments: tuple[Any, ...]) -> None:
    """Compile `forward` for such arguments, or load the compiled code."""
    forward.compile(tuple(_typeof(argument) for argument in arguments))
