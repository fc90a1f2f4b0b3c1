"""The two networks of a lab, made by ``ip`` and shaped by ``tc``.

Control is a bridge without shaping that only the launcher uses. Data is a bridge of virtual cables ``eth0``,
each with a token bucket at both ends: at the host for what it sends, at the switch for what it receives.
"""

import subprocess
from collections.abc import Mapping, Sequence

from mpicomp.bench.lab import namespaces
from mpicomp.bench.lab.settings import Link
from mpicomp.bench.lab.units import format_bandwidth

CONTROL_NETWORK = "10.99.1"
DATA_NETWORK = "10.99.0"
HEAD_ADDRESS = f"{CONTROL_NETWORK}.254"

MTU = 9000
_FRAME = MTU + 14
# A shaper has to make up for a timer that comes late, or the rate is missed; what it may make up passes at once,
# so it is kept small against the time that a message of 64 KiB takes.
_BURST_S = 150e-6


def host_name(index: int) -> str:
    """Return the name of host number `index`."""
    return f"host{index}"


def control_address(index: int) -> str:
    """Return the address on the control network of host number `index`."""
    return f"{CONTROL_NETWORK}.{index + 1}"


def data_address(index: int) -> str:
    """Return the address on the data network of host number `index`."""
    return f"{DATA_NETWORK}.{index + 1}"


def burst(bandwidth: int) -> int:
    """Return the bytes that may pass at once at `bandwidth`.

    Examples
    --------
    >>> burst(50_000_000), burst(1_000_000_000)
    (9014, 27764)
    """
    return _FRAME + max(0, int(bandwidth / 8 * _BURST_S))


def _batch(tool: str, lines: Sequence[str], pid: int | None = None) -> None:
    """Run lines of `ip` or `tc`, in the network of the process `pid` or here."""
    if not lines:
        return
    command = [tool, "-batch", "-"]
    done = subprocess.run(
        command,
        input="\n".join(lines) + "\n",
        text=True,
        capture_output=True,
        preexec_fn=None if pid is None else lambda: namespaces.enter(pid, ("net",)),
        check=False,
    )
    if done.returncode:
        raise OSError(f"{tool}: {' '.join(done.stderr.split())}")


def sysctls(links: Sequence[Link]) -> dict[str, str]:
    """Return the settings of a host's network that suit these links."""
    # A window of twice what is under way, and enough for the messages of one collective: larger only moves the
    # queue from the program into the switch.
    most = max(int(link.bandwidth / 8 * 2 * link.latency_ns * 1e-9) for link in links)
    window = 2 * most + 2**20
    return {
        "ipv6/conf/all/disable_ipv6": "1",
        "ipv6/conf/default/disable_ipv6": "1",
        "ipv4/tcp_slow_start_after_idle": "0",
        "ipv4/tcp_no_metrics_save": "1",
        "ipv4/tcp_rmem": f"4096 {2 * window} {2 * window}",
        "ipv4/tcp_wmem": f"4096 {window} {window}",
    }


def make_control(pids: Mapping[int, int]) -> None:
    """Join the hosts, given as index and process id, by the control network."""
    lines = [
        "link set lo up",
        "link add control type bridge forward_delay 0 mcast_snooping 0",
        f"address add {HEAD_ADDRESS}/24 dev control",
        "link set control up",
    ]
    for index, pid in pids.items():
        lines += [
            f"link add control{index} type veth peer name control netns {pid}",
            f"link set control{index} master control up",
        ]
    _batch("ip", lines)
    for index, pid in pids.items():
        inside = [
            "link set lo up",
            f"address add {control_address(index)}/24 dev control",
            "link set control up",
        ]
        _batch("ip", inside, pid)


def make_data(pids: Mapping[int, int], links: Sequence[Link]) -> None:
    """Join the hosts by cables that the kernel shapes."""
    lines = ["link add data type bridge forward_delay 0 mcast_snooping 0", f"link set data mtu {MTU} up"]
    for index, pid in pids.items():
        lines += [
            f"link add data{index} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {pid}",
            f"link set data{index} gso_max_segs 1 master data up",
        ]
    _batch("ip", lines)
    for index, pid in pids.items():
        inside = [
            f"address add {data_address(index)}/24 dev eth0",
            f"link set eth0 gso_max_segs 1 mtu {MTU} up",
        ]
        _batch("ip", inside, pid)
    shape(pids, links, "add")


def configure_eth0(index: int, pid: int, mtu: int) -> None:
    """Give an eth0 that exists on the host its address."""
    lines = [
        f"address add {data_address(index)}/24 dev eth0",
        f"link set eth0 mtu {mtu} txqueuelen 10000 up",
    ]
    _batch("ip", lines, pid)


def shape(pids: Mapping[int, int], links: Sequence[Link], action: str = "change") -> None:
    """Set the rates of all cables (`action` is tc's: add or change)."""

    def bucket(device: str, link: Link) -> str:
        # The limit is beyond what the windows of TCP let wait: a loss would cost a timeout of 200 ms, which no
        # real switch with flow control does.
        return (
            f"qdisc {action} dev {device} root tbf rate {format_bandwidth(link.bandwidth)} "
            f"burst {burst(link.bandwidth)} limit {256 * 2**20}"
        )

    _batch("tc", [bucket(f"data{index}", links[index]) for index in pids])
    for index, pid in pids.items():
        _batch("tc", [bucket("eth0", links[index])], pid)


def read_counters(pid: int) -> dict[str, int]:
    """Return bytes and packets that passed eth0 on the host of `pid`."""
    with open(f"/proc/{pid}/net/dev", encoding="ascii") as file:
        for line in file:
            name, _, values = line.partition(":")
            if name.strip() == "eth0":
                numbers = [int(value) for value in values.split()]
                return {
                    "tx_bytes": numbers[8],
                    "rx_bytes": numbers[0],
                    "tx_packets": numbers[9],
                    "rx_packets": numbers[1],
                }
    raise OSError("eth0 is gone")
