"""Runs a command on an emulated cluster, and removes all of it afterwards."""

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from mpicomp.bench.lab import head, launch, namespaces, network
from mpicomp.bench.lab.forwarder import TUN, can_open_tun
from mpicomp.bench.lab.lab_settings import LabError, Settings

_MAX_GBIT = 10.0  # a second, that leave all hosts together
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


# Settings of the kernel that keep user namespaces from a user: the value that does, and the one to set.
_SYSCTLS = {
    "user.max_user_namespaces": ("0", "15000"),
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
}
_IN_A_CONTAINER = (
    "in a container, start that with --privileged, or with --security-opt for each of seccomp=unconfined, "
    "apparmor=unconfined and systempaths=unconfined"
)


def check_requirements() -> None:
    """Raise LabError, with advice, when this machine cannot run the lab."""
    if sys.platform != "linux":
        raise LabError(f"needs Linux, whose network namespaces are the hosts, and this is {sys.platform}")
    if network.find_program("ip") is None:
        raise LabError("needs the command ip (package iproute2 on Debian and Ubuntu), and it is not installed")
    missing = [kind for kind in ("net", "pid", "mnt", "uts", "ipc") if not os.path.exists(f"/proc/self/ns/{kind}")]
    if missing:
        raise LabError(f"needs a kernel with namespaces, and this one lacks {', '.join(missing)}")
    if not namespaces.is_privileged():
        _check_user_namespaces()


def _check_user_namespaces() -> None:
    # To make networks in, and with a /proc.

    def attempt() -> int:
        try:
            namespaces.enter_user_namespace()
            namespaces.unshare(namespaces.ALL)
        except OSError as error:
            return error.errno or 1
        return _wait(namespaces.fork(mount_proc))

    def mount_proc() -> int:
        try:
            namespaces.mount("proc", "/proc", "proc")
        except OSError as error:  # where parts of /proc are masked, as in containers
            return error.errno or 1
        return 0

    code = _wait(_fork(attempt))
    if not code:
        return
    needs = "needs user namespaces, or root, to make networks, and "
    for name, (refusing, leave) in _SYSCTLS.items():
        with contextlib.suppress(OSError):
            if Path("/proc/sys", *name.split(".")).read_text().strip() == refusing:
                raise LabError(
                    f"{needs}the kernel refuses them by {name}={refusing}; type: sudo sysctl {name}={leave}, or run it "
                    "with sudo"
                )
    raise LabError(f"{needs}this user may not make them ({os.strerror(code)}); run it with sudo; {_IN_A_CONTAINER}")


def _check_kernel_links(settings: Settings) -> None:
    if can_open_tun():
        return
    leave = f"{TUN}, which this user cannot open; type: sudo modprobe tun && sudo chmod 666 {TUN}"
    if network.find_program("tc") is None:
        raise LabError("needs the command tc (package iproute2 on Debian and Ubuntu), and it is not installed")
    if settings.loss or any(link.latency_ns or not link.bandwidth for link in settings.all_links):
        raise LabError(f"needs for latency, loss and links that are down {leave}")
    burst = network.burst_bytes(network.choose_mtu(settings.all_links))
    print(
        f"lab: warning: links are the kernel's token buckets, each of which lets {burst:,} bytes pass at once after a "
        f"pause; better ones need {leave}",
        file=sys.stderr,
    )


def _warn_of_limits(settings: Settings) -> None:
    states = [settings.links, *(change.links for change in settings.schedule)]
    gbit = max(sum(link.bandwidth for link in links) for links in states) / 1e9
    if gbit > _MAX_GBIT:
        print(
            f"lab: warning: links of {gbit:g}gbit in all are more than the {_MAX_GBIT:g}gbit that the emulation was "
            "measured to carry; "
            "times may be the processor's, not the network's",
            file=sys.stderr,
        )
    links = settings.all_links
    mtu = network.choose_mtu(links, settings.loss)
    if network.packets_under_way(settings.hosts, links, mtu) > network.MAX_PACKETS_BYTES // mtu:
        print(
            "lab: warning: bandwidth times latency times hosts is more than the emulation holds under way; "
            "with traffic between all hosts at once the rate will be lower than asked for",
            file=sys.stderr,
        )


def run_lab(settings: Settings) -> int:
    """Run a lab from beginning to end, from the main thread, for the sake of signals."""
    check_requirements()
    _check_kernel_links(settings)
    _warn_of_limits(settings)
    launcher = launch.find_launcher()
    mpi, asked = launch.find_mpi(launcher), settings.mpi
    if asked not in (None, mpi):
        raise LabError(
            f"--mpi must name the MPI next to Python, which is {mpi}, got {asked!r}; leave --mpi out, or run the "
            f"Python of an environment with {asked}"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    life_reader, life_writer = os.pipe()
    report_reader, report_writer = os.pipe()
    caller = os.getpid()

    def supervise() -> int:
        """Stand between the caller and PID 1: a process cannot move itself into a new process namespace."""
        namespaces.die_with_parent()
        os.close(life_writer)
        os.close(report_reader)
        if os.getppid() != caller:
            return 137
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        try:
            if not namespaces.is_privileged():
                namespaces.enter_user_namespace()
            namespaces.unshare(namespaces.ALL)
        except OSError as error:
            os.write(report_writer, str(error).encode())
            return 2
        first = namespaces.fork(begin)
        os.close(report_writer)
        return _wait(first)

    def begin() -> int:
        # Should the supervisor have died before this line, the end of `life` shows it.
        namespaces.die_with_parent()
        return head.main(settings, mpi, launcher, life_reader, report_writer)

    supervisor = _fork(supervise)
    os.close(life_reader)
    os.close(report_writer)
    with _passing_on(life_writer) as received:
        problem = b""
        while piece := os.read(report_reader, 65536):
            problem += piece
        status = _wait(supervisor)
    os.close(report_reader)
    os.close(life_writer)
    if problem:
        raise LabError(
            f"needs a kernel with namespaces, veth, bridge and tun, and leave to use them: {problem.decode()}; "
            f"{_IN_A_CONTAINER}"
        )
    return 128 + received[0] if received else status


def _wait(pid: int) -> int:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def _fork(child: Callable[[], int]) -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, which numpy has started; the child uses none.
        warnings.simplefilter("ignore", DeprecationWarning)
        return namespaces.fork(child)


@contextlib.contextmanager
def _passing_on(life: int) -> Iterator[list[int]]:
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        with contextlib.suppress(BrokenPipeError):
            os.write(life, bytes([number]))

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
