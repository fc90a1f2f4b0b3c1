"""The loop that carries packets between hosts, compiled: bytes cost hardly anything, packets some microseconds.

Times are integer nanoseconds of the monotonic clock. Imported only by the process that runs the loop.
"""

import heapq
from typing import Any

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


@cached
@njit(nogil=True)
def _now(spec: NDArray[np.int64]) -> int:
    _clock_gettime(_CLOCK_MONOTONIC, spec.ctypes.data)
    return spec[0] * 1_000_000_000 + spec[1]  # type: ignore[no-any-return]


@cached
@njit(nogil=True)
def _draw(lost: NDArray[np.uint64]) -> int:
    """Return 64 random bits: SplitMix64, Steele et al. 2014, doi:10.1145/2714064.2660195."""
    lost[1] += np.uint64(0x9E3779B97F4A7C15)
    word = lost[1]
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))  # type: ignore[no-any-return]


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
    hosts = devices.size
    count, room = slots.shape
    base = slots.ctypes.data
    spec = np.zeros(2, np.int64)
    sleep = np.zeros(2, np.int64)
    watched = np.zeros((hosts, 2), np.int32)

    length = np.zeros(count, np.int64)
    came = np.zeros(count, np.int64)
    last = np.zeros(count, np.int64)
    target = np.zeros(count, np.int64)
    after = np.full(count, _NONE, np.int64)
    free = np.arange(count - 1, -1, -1)
    left = count

    # Queues of slots, linked by `after`: at the sender's cable (out) and at the receiver's (into).
    out_first = np.full(hosts, _NONE, np.int64)
    out_last = np.full(hosts, _NONE, np.int64)
    into_first = np.full(hosts, _NONE, np.int64)
    into_last = np.full(hosts, _NONE, np.int64)
    out_free = np.zeros(hosts, np.int64)
    into_free = np.zeros(hosts, np.int64)
    flying = [(0, 0, 0) for _ in range(0)]
    due = [(0, 0, 0) for _ in range(0)]
    number = 0
    ready = 0

    while True:
        if ready > 0:
            for host in range(hosts):
                if watched[host, 1] >> 16 == 0:
                    continue
                for _ in range(_TURN):
                    if left == 0:
                        break
                    slot = free[left - 1]
                    size = _read(devices[host], base + slot * room, room)
                    if size <= 0:
                        break
                    packet = slots[slot]
                    # Only IPv4 from host to host: all else has no receiver here.
                    if size < HEADER + 20 or packet[HEADER] >> 4 != 4:
                        continue
                    whom = packet[HEADER + 19] - 1
                    if (
                        packet[HEADER + 16] != network[0]
                        or packet[HEADER + 17] != network[1]
                        or packet[HEADER + 18] != network[2]
                        or not 0 <= whom < hosts
                    ):
                        continue
                    left -= 1
                    length[slot] = size
                    target[slot] = whom
                    came[slot] = _now(spec)
                    after[slot] = _NONE
                    if out_first[host] == _NONE:
                        out_first[host] = slot
                    else:
                        after[out_last[host]] = slot
                    out_last[host] = slot

        now = _now(spec)
        horizon = now + _AHEAD
        following = now + _LONGEST

        for host in range(hosts):
            if picoseconds_a_byte[host] < 0:
                # It gets no credit for the time in which it was down.
                out_free[host], into_free[host] = max(out_free[host], now), max(into_free[host], now)
                following = min(following, now + _LOOK_AGAIN)
                continue
            while out_first[host] != _NONE and out_free[host] <= horizon:
                slot = out_first[host]
                out_first[host] = after[slot]
                begin = max(out_free[host], came[slot])
                out_free[host] = begin + (length[slot] - HEADER) * picoseconds_a_byte[host] // 1000
                latency = half_latency[host] + half_latency[target[slot]]
                last[slot] = out_free[host] + latency
                number += 1
                heapq.heappush(flying, (begin + latency, number, slot))
            if out_first[host] != _NONE:
                following = min(following, out_free[host] - _AHEAD // 2)

        while len(flying) > 0 and flying[0][0] <= horizon:
            begin, _, slot = heapq.heappop(flying)
            host = target[slot]
            if lost[0] > 0 and _draw(lost) < lost[0]:
                free[left] = slot
                left += 1
                continue
            came[slot] = begin
            after[slot] = _NONE
            if into_first[host] == _NONE:
                into_first[host] = slot
            else:
                after[into_last[host]] = slot
            into_last[host] = slot
        if len(flying) > 0:
            following = min(following, flying[0][0] - _AHEAD // 2)

        for host in range(hosts):
            if picoseconds_a_byte[host] < 0:
                continue
            while into_first[host] != _NONE and into_free[host] <= horizon:
                slot = into_first[host]
                into_first[host] = after[slot]
                begin = max(into_free[host], came[slot])
                end = begin + (length[slot] - HEADER) * picoseconds_a_byte[host] // 1000
                into_free[host] = max(end, last[slot])
                number += 1
                heapq.heappush(due, (into_free[host], number, slot))
            if into_first[host] != _NONE:
                following = min(following, into_free[host] - _AHEAD // 2)

        while len(due) > 0 and due[0][0] <= now:
            _, _, slot = heapq.heappop(due)
            # A packet for which the receiver has no memory is lost; TCP sends it again.
            _write(devices[target[slot]], base + slot * room, length[slot])
            free[left] = slot
            left += 1
            now = _now(spec)
        if len(due) > 0:
            following = min(following, due[0][0])

        for host in range(hosts):
            watched[host, 0] = devices[host]
            watched[host, 1] = _POLLIN if left > 0 else 0
        wait = max(0, following - _LATE - now)
        sleep[0] = wait // 1_000_000_000
        sleep[1] = wait % 1_000_000_000
        ready = _ppoll(watched.ctypes.data, hosts, sleep.ctypes.data, 0)


def prepare(arguments: tuple[Any, ...]) -> None:
    """Compile `forward` for such arguments, or load the compiled code."""
    forward.compile(tuple(_typeof(argument) for argument in arguments))
