"""Cables in user space: what the kernel's shapers cannot do, a delay.

Every host's eth0 is a TUN device; this process reads what hosts send, holds each packet for the time that it
takes on two cables and in between, and gives it to its host. The rates are kept by clocks rather than by buckets:
a cable that has been idle gains no credit.
"""

import fcntl
import heapq
import json
import os
import select
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from time import monotonic

from mpicomp.bench.lab import namespaces
from mpicomp.bench.lab.settings import Link

# One write carries a whole message of 64 KiB less its last bytes: packets cost time here, bytes hardly any.
MTU = 65000
PRIORITY = 20

_TUNSETIFF = 0x400454CA
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000
# Packets are put on a cable so long before they may leave, which saves a wake-up for each.
_AHEAD_S = 200e-6
# A sleeping process is woken late by about so much; the last stretch is spent awake.
_AWAKE_S = 60e-6


def start(pids: Mapping[int, int], links: Sequence[Link]) -> int:
    """Make eth0 on every host, start the process that joins them, and return where to write changes.

    Parameters
    ----------
    pids : mapping
        Process id of each host's PID 1.
    links : sequence of Link
        One a host.

    Returns
    -------
    int
        A file descriptor that takes lines made by `describe`.
    """
    reader, writer = os.pipe()
    ready_reader, ready_writer = os.pipe()

    def child() -> int:
        os.close(writer)
        os.close(ready_reader)
        namespaces.die_with_parent()
        devices = {index: _open_device(pid) for index, pid in pids.items()}
        namespaces.run_realtime(PRIORITY)
        os.write(ready_writer, b"ready")
        os.close(ready_writer)
        _Switch(devices, links, reader).run()
        return 0

    namespaces.fork(child)
    os.close(reader)
    os.close(ready_writer)
    if os.read(ready_reader, 16) != b"ready":
        raise OSError("the user-space network could not be made")
    os.close(ready_reader)
    return writer


def _open_device(pid: int) -> int:
    namespaces.enter(pid, ("net",))
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN | _IFF_NO_PI))
    return descriptor


def describe(links: Sequence[Link]) -> bytes:
    """Return links as the forwarder reads them."""
    return json.dumps([[link.bandwidth, link.latency_ns] for link in links]).encode() + b"\n"


class _Switch:
    """All cables and what is on them.

    A packet waits at its host (`waiting`) until the cable there is free, is under way for the latency
    (`flying`), waits at the switch (`landing`) until the cable of the receiver is free, and is handed over when
    its last byte would have come (`due`). The switch cuts through: it passes on the first byte before the last
    has come, so that an idle path costs the time of one cable.
    """

    def __init__(self, devices: Mapping[int, int], links: Sequence[Link], changes: int) -> None:
        self.devices = dict(devices)
        self.changes = changes
        self.pending = b""
        count = len(links)
        self.waiting: list[deque[tuple[float, int, bytes]]] = [deque() for _ in range(count)]
        self.landing: list[deque[tuple[float, float, bytes]]] = [deque() for _ in range(count)]
        self.out_free = [0.0] * count
        self.in_free = [0.0] * count
        self.flying: list[tuple[float, int, int, float, bytes]] = []
        self.due: list[tuple[float, int, int, bytes]] = []
        self.number = 0
        self.set_links(links)

    def set_links(self, links: Sequence[Link]) -> None:
        self.seconds_a_byte = [8 / link.bandwidth for link in links]
        self.half_latency = [link.latency_ns * 0.5e-9 for link in links]

    def run(self) -> None:
        """Forward until the lab ends."""
        indices = {descriptor: index for index, descriptor in self.devices.items()}
        watched = [self.changes, *indices]
        while True:
            now = monotonic()
            wait = self.advance(now) - now
            timeout = 0.0 if wait <= _AWAKE_S else wait - _AWAKE_S
            readable, _, _ = select.select(watched, (), (), min(timeout, 10.0))
            for descriptor in readable:
                if descriptor == self.changes:
                    if not self.read_changes():
                        watched.remove(self.changes)
                else:
                    self.read_packets(descriptor, indices[descriptor])

    def read_changes(self) -> bool:
        data = os.read(self.changes, 65536)
        *lines, self.pending = (self.pending + data).split(b"\n")
        if lines:
            self.set_links([Link(*values) for values in json.loads(lines[-1])])
        return bool(data)

    def read_packets(self, descriptor: int, host: int) -> None:
        waiting = self.waiting[host]
        hosts = len(self.waiting)
        # Not until it is empty: one busy sender must not hold up what is due for others.
        for _ in range(8):
            try:
                packet = os.read(descriptor, 65536)
            except BlockingIOError:
                return
            # IPv4 to 10.99.0.x; all else (IPv6, multicast) has no receiver here.
            if packet[0] >> 4 == 4 and packet[16:19] == b"\x0a\x63\x00" and 1 <= packet[19] <= hosts:
                waiting.append((monotonic(), packet[19] - 1, packet))

    def advance(self, now: float) -> float:
        """Move packets as far as time allows, and return when there is something to do again."""
        horizon = now + _AHEAD_S
        following = now + 3600.0
        out_free, in_free, seconds_a_byte = self.out_free, self.in_free, self.seconds_a_byte

        for host, waiting in enumerate(self.waiting):
            while waiting and out_free[host] <= horizon:
                came, target, packet = waiting.popleft()
                begin = out_free[host] if out_free[host] > came else came
                end = begin + len(packet) * seconds_a_byte[host]
                out_free[host] = end
                latency = self.half_latency[host] + self.half_latency[target]
                self.number += 1
                heapq.heappush(self.flying, (begin + latency, self.number, target, end + latency, packet))
            if waiting and out_free[host] - _AHEAD_S < following:
                following = out_free[host] - _AHEAD_S

        flying = self.flying
        while flying and flying[0][0] <= horizon:
            begin, _, target, end, packet = heapq.heappop(flying)
            self.landing[target].append((begin, end, packet))
        if flying and flying[0][0] - _AHEAD_S < following:
            following = flying[0][0] - _AHEAD_S

        due = self.due
        for host, landing in enumerate(self.landing):
            while landing and in_free[host] <= horizon:
                begin, end, packet = landing.popleft()
                begin = in_free[host] if in_free[host] > begin else begin
                finish = begin + len(packet) * seconds_a_byte[host]
                if finish < end:
                    finish = end
                in_free[host] = finish
                self.number += 1
                heapq.heappush(due, (finish, self.number, host, packet))
            if landing and in_free[host] - _AHEAD_S < following:
                following = in_free[host] - _AHEAD_S

        while due and due[0][0] <= now:
            _, _, host, packet = heapq.heappop(due)
            try:
                os.write(self.devices[host], packet)
            except OSError:
                # The device refuses what the kernel has no memory for; TCP sends it again.
                pass
        if due and due[0][0] < following:
            following = due[0][0]
        return following
