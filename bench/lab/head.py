"""PID 1 of a lab: makes hosts and networks, runs the launcher, changes the links, reports, ends.

It runs in namespaces of its own. When it ends, for whatever reason, the kernel kills every process of the lab, and
with the last process of a namespace go its interfaces and mounts.
"""

import contextlib
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from mpicomp.bench.lab import launch, namespaces, network
from mpicomp.bench.lab.forwarder import Forwarder, can_open_tun
from mpicomp.bench.lab.lab_settings import Settings


def start_host(name: str, sysctls: Mapping[str, str], hosts_file: str) -> int:
    """Start a host and return the process id of its PID 1, as seen from here."""
    reader, writer = os.pipe()

    def first() -> int:
        namespaces.unshare(namespaces.ALL)
        pid = namespaces.fork(second)
        os.write(writer, f"{pid} ".encode())
        return 0

    def second() -> int:
        _furnish(name, sysctls, hosts_file)
        os.write(writer, b"ready")
        _keep_house()
        return 0

    intermediate = namespaces.fork(first)
    os.close(writer)
    os.waitpid(intermediate, 0)
    text = b""
    while b" " not in text or b"ready" not in text:
        piece = os.read(reader, 64)
        if not piece:
            raise OSError(f"host {name} could not be set up")
        text += piece
    os.close(reader)
    return int(text.replace(b"ready", b"").decode())


def _furnish(name: str, sysctls: Mapping[str, str], hosts_file: str) -> None:
    socket.sethostname(name)
    namespaces.mount("none", "/", None, namespaces.MS_REC | namespaces.MS_PRIVATE)
    if os.path.exists("/etc/hosts"):
        namespaces.mount(hosts_file, "/etc/hosts", None, namespaces.MS_BIND)
    tight = namespaces.MS_NOSUID | namespaces.MS_NODEV | namespaces.MS_NOEXEC
    namespaces.mount("proc", "/proc", "proc", tight)
    # UCX lists interfaces by /sys/class/net, which shows the network namespace that mounted it. Containers have it
    # read-only, and then it can only be mounted so.
    try:
        namespaces.mount("sysfs", "/sys", "sysfs", tight)
    except PermissionError:
        namespaces.mount("sysfs", "/sys", "sysfs", tight | namespaces.MS_RDONLY)
    namespaces.mount("tmpfs", "/dev/shm", "tmpfs", namespaces.MS_NOSUID | namespaces.MS_NODEV, "mode=1777")
    # Libraries that recognize a shared machine by its boot id would try shared memory between hosts.
    with contextlib.suppress(OSError):
        with open("/dev/shm/.boot_id", "w", encoding="ascii") as file:
            file.write(f"{uuid.uuid4()}\n")
        namespaces.mount("/dev/shm/.boot_id", str(launch.BOOT_ID), None, namespaces.MS_BIND)
    with contextlib.suppress(OSError):
        os.unlink("/dev/shm/.boot_id")
    for path, value in sysctls.items():
        with contextlib.suppress(OSError), open(f"/proc/sys/net/{path}", "w", encoding="ascii") as file:
            file.write(value)


def _keep_house() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.closerange(3, 256)
    empty = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(empty, descriptor)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        signal.sigwait({signal.SIGCHLD})
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


_SCRATCH = "/dev/shm/mpicomp-lab"
_GRACE_S = 2.0  # seconds that processes have to end before they are killed
_PRIORITY = 10  # realtime priority of the head process, below that of the process that carries packets
_STAND_BACK = 5  # niceness of ranks, where these processes may have no realtime priority


class Head:
    """Runs one lab in the namespaces of this process."""

    def __init__(self, settings: Settings, mpi: str, launcher: Path) -> None:
        self.settings = settings
        self.mpi = mpi
        self.launcher = launcher
        self.pids: dict[int, int] = {}

    def make(self) -> None:
        namespaces.mount("none", "/", None, namespaces.MS_REC | namespaces.MS_PRIVATE)
        tight = namespaces.MS_NOSUID | namespaces.MS_NODEV | namespaces.MS_NOEXEC
        namespaces.mount("proc", "/proc", "proc", tight)
        # Whatever the launcher and the lab have to write down goes where it vanishes with the lab.
        namespaces.mount("tmpfs", "/dev/shm", "tmpfs", namespaces.MS_NOSUID | namespaces.MS_NODEV, "mode=1777")
        os.mkdir(_SCRATCH, 0o700)
        socket.sethostname("lab")
        settings = self.settings
        names = [f"host{index}" for index in range(settings.hosts)]
        hosts_file = f"{_SCRATCH}/hosts"
        lines = ["127.0.0.1 localhost", *(f"{network.DATA_NETWORK}.{i + 1} {name}" for i, name in enumerate(names))]
        Path(hosts_file).write_text("\n".join(lines) + "\n")
        mtu = network.choose_mtu(settings.all_links, settings.loss)
        window = network.choose_window(settings.all_links)
        for index, name in enumerate(names):
            self.pids[index] = start_host(name, network.sysctls(window), hosts_file)
        under_way = network.packets_under_way(settings.hosts, settings.all_links, mtu)
        packets = min(under_way, network.MAX_PACKETS_BYTES // mtu)
        self.forwarder: Forwarder | network.KernelLinks
        if can_open_tun():
            self.forwarder = Forwarder(
                self.pids, settings.links, mtu, packets, network.DATA_NETWORK, settings.loss, settings.seed
            )
        else:
            self.forwarder = network.KernelLinks(self.pids, settings.links, mtu)
        network.make_control(self.pids)
        for index, pid in self.pids.items():
            network.configure_host(index, pid, mtu)
        self.forwarder.wait()

    def write_agent(self) -> str:
        """Write the agent that the launcher calls in place of ssh, and return its path."""
        table = f"{_SCRATCH}/table"
        rows = [f"{network.control_address(i)} host{i} {pid}" for i, pid in self.pids.items()]
        Path(table).write_text("\n".join(rows) + "\n")
        agent = f"{_SCRATCH}/agent"
        script = Path(__file__).with_name("agent.py")
        words = shlex.join([sys.executable, "-I", "-S", str(script), table])
        Path(agent).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        os.chmod(agent, 0o700)
        return agent

    def run(self, life: int) -> int:
        """Run the command; `life` brings signals to pass on, and its end means that the lab's caller is gone."""
        environment = launch.environment(self.mpi, self.settings.hosts, self.settings.ppn, os.environ)
        # An ordinary user's lab has no priority over its ranks, so these stand back.
        nice = os.nice(0) if namespaces.run_realtime(_PRIORITY) else min(os.nice(0) + _STAND_BACK, 19)
        line = launch.command_line(self.mpi, self.launcher, self.write_agent(), self.settings, nice)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        waker, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        begin = time.monotonic()
        pending = list(self.settings.schedule)
        while pending and pending[0].at_s == 0:
            self.forwarder.set_links(pending.pop(0).links)

        def prepare() -> None:
            # The lab's own signal handling ends here; a background job inherits SIGINT ignored.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            if self.mpi == "openmpi":
                # It warns when the agent it starts is faster than itself.
                namespaces.run_realtime(1)

        job = subprocess.Popen(line, env=environment, preexec_fn=prepare)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        deadline = None
        while True:
            ended = _reap()
            now = time.monotonic()
            if job.pid in ended:
                return ended[job.pid]
            if self.forwarder.pid in ended:
                print("lab: the process that carries packets has ended, and so has the lab", file=sys.stderr)
                return 1
            if deadline is not None and now >= deadline:
                return 137
            while pending and begin + pending[0].at_s <= now:
                self.forwarder.set_links(pending.pop(0).links)
                now = time.monotonic()
            times = [begin + pending[0].at_s] if pending else []
            times += [deadline] if deadline is not None else []
            timeout = max(0.0, min(times) - now) if times else None
            readable, _, _ = select.select([life, waker], (), (), timeout)
            if waker in readable:
                os.read(waker, 4096)
            if life in readable:
                numbers = os.read(life, 1)
                if not numbers or deadline is not None:
                    return 137
                deadline = time.monotonic() + _GRACE_S
                with contextlib.suppress(ProcessLookupError):
                    os.kill(job.pid, numbers[0])


def _reap() -> dict[int, int]:
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            code = os.waitstatus_to_exitcode(status)
            ended[pid] = code if code >= 0 else 128 - code
    return ended


def main(settings: Settings, mpi: str, launcher: Path, life: int, report: int) -> int:
    """Run a lab as PID 1 of new namespaces.

    `life` is the read end of a pipe from the caller: a byte for each signal to pass on, closed when the caller is gone.
    `report` is the write end of one to the caller, for the text of an error.
    """
    # The caller receives signals and forwards them by `life`.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    head = Head(settings, mpi, launcher)
    try:
        head.make()
    except OSError as error:
        with contextlib.suppress(BrokenPipeError):
            os.write(report, str(error).encode())
        return 2
    return head.run(life)
