"""Cables in user space: a rate without bursts, and a delay, which the kernel's shapers cannot do.

Every host's eth0 is a TUN device. A process of its own reads the packets of hosts, holds each for the time that
it takes on two cables and in between, and delivers it to its host.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Mapping, Sequence

from mpicomp.bench.lab import namespaces
from mpicomp.bench.lab.lab_settings import Link

TUN = "/dev/net/tun"
_PRIORITY = 20  # realtime priority of the process that carries packets
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM = 0x01  # packets arrive unchanged and need no checksum


class Forwarder:
    """The process that carries packets, and the links that it shares with this one."""

    def __init__(
        self,
        pids: Mapping[int, int],
        links: Sequence[Link],
        mtu: int,
        packets: int,
        network: str,
        loss: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._pids = [pids[index] for index in range(len(links))]
        self._mtu = mtu
        self._packets = packets
        self._network = network
        self._loss, self._seed = loss, seed
        self._shared = mmap.mmap(-1, 16 * len(links))
        self.set_links(links)
        self._reader, writer = os.pipe()

        def child() -> int:
            os.close(self._reader)
            namespaces.die_with_parent()
            self._forward(writer)
            return 1

        self.pid = namespaces.fork(child)
        os.close(writer)
        # The lab continues its setup while the process loads.
        self._await(b"made")

    def _await(self, word: bytes) -> None:
        if os.read(self._reader, len(word)) != word:
            raise OSError("the process that carries packets ended")

    def wait(self) -> None:
        self._await(b"runs")

    def set_links(self, links: Sequence[Link]) -> None:
        """Change all cables now; packets that wait are sent at the new rates."""
        picoseconds = [round(8e12 / link.bandwidth) if link.bandwidth else -1 for link in links]
        half_latencies = [link.latency_ns // 2 for link in links]
        self._shared[:] = struct.pack(f"{2 * len(links)}q", *picoseconds, *half_latencies)

    def _forward(self, ready: int) -> None:
        hosts = len(self._pids)
        descriptors = []
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        for pid in self._pids:
            namespaces.enter(pid, ("net",))
            descriptors.append(os.open(TUN, os.O_RDWR | os.O_NONBLOCK))
            fcntl.ioctl(descriptors[-1], _TUNSETIFF, struct.pack("16sH22x", b"eth0", flags))
            fcntl.ioctl(descriptors[-1], _TUNSETOFFLOAD, _TUN_F_CSUM)
        os.write(ready, b"made")
        # Only here: it takes half a second, and no other process of the lab needs it.
        os.environ.pop("NUMBA_DISABLE_JIT", None)
        import numpy as np
        from mpicomp.bench.lab import switch

        shared = np.frombuffer(self._shared, np.int64).reshape(2, hosts)
        prefix = np.array([int(part) for part in self._network.split(".")], np.uint8)
        room = (self._mtu + switch.HEADER + 63) // 64 * 64
        slots = np.empty((self._packets, room), np.uint8)
        lost = np.array([self._loss * 2.0**64 if self._loss else 0, self._seed], np.uint64)
        arguments = (np.array(descriptors, np.int32), shared[0], shared[1], prefix, slots, lost)
        switch.prepare(arguments)
        namespaces.run_realtime(_PRIORITY)
        os.write(ready, b"runs")
        switch.forward(*arguments)


def can_open_tun() -> bool:
    """Return whether this process may open TUN devices."""
    try:
        os.close(os.open(TUN, os.O_RDWR))
    except OSError:
        return False
    return True
