"""The addresses of a lab, and the settings of its two networks.

Control is a bridge that only the launcher uses, without any limit. Data goes through `mpicomp.bench.lab.forwarder`
between the hosts' ``eth0``, or, without TUN devices, a second bridge with the kernel's token buckets.
"""

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from mpicomp.bench.lab import namespaces
from mpicomp.bench.lab.lab_settings import Link

CONTROL_NETWORK = "10.99.1"
DATA_NETWORK = "10.99.0"
HEAD_ADDRESS = f"{CONTROL_NETWORK}.254"

_SBIN = "/usr/sbin:/sbin"
_ETHERNET_MTU = 1500
_LEAST_MTU = 9000  # bytes of a packet, at least
_MOST_MTU = 65000  # bytes of a packet, at most
_PACKET_S = 500e-6  # seconds that a packet takes on the fastest link, within these bounds
_LEAST_WINDOW = 2**18  # bytes of a TCP window for the time that a rank is off its core, at least
_MOST_WINDOW = 2**22  # the same, at most
# A rank that shares its core is away for some milliseconds; the bytes of the window keep flowing meanwhile. With
# 2 ms instead of 32 a ring at 1 Gbit/s took 1.6 times as long, and more than 32 gained nothing.
_WINDOW_S = 32e-3
MAX_PACKETS_BYTES = 2**31  # of all packets under way; memory is used only by those


def control_address(index: int) -> str:
    """Return the address on the control network of host number `index`."""
    return f"{CONTROL_NETWORK}.{index + 1}"


def choose_mtu(links: Sequence[Link], loss: float = 0.0) -> int:
    """Return the size of the largest packet: half a millisecond of the fastest link, or Ethernet's where some get lost.

    Every packet costs processor time that the ranks need as well, and no packet can overtake another on its cable:
    large ones suit fast links, small ones slow links.
    """
    if loss:
        return _ETHERNET_MTU
    most = max(link.bandwidth for link in links)
    return min(max(_LEAST_MTU, int(most / 8 * _PACKET_S)), _MOST_MTU)


def choose_window(links: Sequence[Link]) -> int:
    """Return the number of bytes that a connection may have under way.

    Enough for the bytes on the fastest and longest cable, twice, and for the time that a rank is off its core. More
    would only move the queue from the program into the network, where small messages wait behind large ones.
    """
    most = max(link.bandwidth for link in links)
    idle = min(max(_LEAST_WINDOW, int(most / 8 * _WINDOW_S)), _MOST_WINDOW)
    under_way = max(link.bandwidth / 8 * 2 * link.latency_ns * 1e-9 for link in links)
    return idle + 2 * int(under_way)


def packets_under_way(hosts: int, links: Sequence[Link], mtu: int) -> int:
    """Return the number of packets when all connections fill their windows."""
    return 64 * hosts + hosts * (hosts - 1) * (choose_window(links) // mtu + 1)


def sysctls(window: int) -> dict[str, str]:
    """Return the settings of a host's network, by their paths below ``/proc/sys/net``."""
    return {
        # Neighbour discovery would count as traffic.
        "ipv6/conf/all/disable_ipv6": "1",
        "ipv6/conf/default/disable_ipv6": "1",
        # A training step computes between its exchanges; each would start with a small window.
        "ipv4/tcp_slow_start_after_idle": "0",
        "ipv4/tcp_no_metrics_save": "1",
        # The kernel counts its own overhead as received.
        "ipv4/tcp_rmem": f"4096 {2 * window} {2 * window}",
        "ipv4/tcp_wmem": f"4096 {window} {window}",
    }


def find_program(name: str) -> str | None:
    """Return the path of a program, or None; those of administrators are not in the PATH of Debian's users."""
    return shutil.which(name) or shutil.which(name, path=_SBIN)


def _run(program: str, lines: Sequence[str], pid: int | None = None) -> None:
    done = subprocess.run(
        [find_program(program) or program, "-batch", "-"],
        input="\n".join(lines) + "\n",
        text=True,
        capture_output=True,
        preexec_fn=None if pid is None else lambda: namespaces.enter(pid, ("net",)),
        check=False,
    )
    if done.returncode:
        raise OSError(f"{program}: {' '.join(done.stderr.split())}")


def make_control(pids: Mapping[int, int]) -> None:
    """Join the hosts, given as index and process id, by the control network."""
    _run("ip", ["link set lo up", *_bridge(pids, "control", "control"), f"address add {HEAD_ADDRESS}/24 dev control"])


def _bridge(pids: Mapping[int, int], name: str, interface: str) -> list[str]:
    lines = [f"link add {name} type bridge forward_delay 0 mcast_snooping 0", f"link set {name} up"]
    for index, pid in pids.items():
        lines += [
            f"link add {name}{index} type veth peer name {interface} netns {pid}",
            f"link set {name}{index} master {name} up",
        ]
    return lines


def burst_bytes(mtu: int) -> int:
    """Return the bytes that a token bucket passes at once: more than a packet, as the kernel's timer is late."""
    return mtu + mtu // 4


class KernelLinks:
    """Links by the kernel's token buckets, which know rates alone: see `Forwarder`, whose place they take."""

    pid = None

    def __init__(self, pids: Mapping[int, int], links: Sequence[Link], mtu: int) -> None:
        self._pids = pids
        self._burst = burst_bytes(mtu)
        sizes = [f"link set {name} mtu {mtu}" for name in ("data", *(f"data{index}" for index in pids))]
        _run("ip", [*_bridge(pids, "data", "eth0"), *sizes])
        self.set_links(links)

    def set_links(self, links: Sequence[Link]) -> None:
        """Change all links now."""
        for index, pid in self._pids.items():
            shape = f"root tbf rate {links[index].bandwidth}bit burst {self._burst} limit {MAX_PACKETS_BYTES // 8}"
            _run("tc", [f"qdisc replace dev data{index} {shape}"])
            _run("tc", [f"qdisc replace dev eth0 {shape}"], pid)

    def wait(self) -> None:
        """Wait for nothing: the kernel is ready."""


def configure_host(index: int, pid: int, mtu: int) -> None:
    """Set the addresses of a host's interfaces."""
    _run(
        "ip",
        [
            "link set lo up",
            f"address add {control_address(index)}/24 dev control",
            "link set control up",
            f"address add {DATA_NETWORK}.{index + 1}/24 dev eth0",
            f"link set eth0 mtu {mtu} txqueuelen 10000 up",
        ],
        pid,
    )
