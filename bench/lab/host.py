"""One emulated host: namespaces of its own, held open by its PID 1."""

import contextlib
import os
import signal
import uuid
from collections.abc import Mapping

from mpicomp.bench.lab import launch, namespaces


def start(name: str, sysctls: Mapping[str, str], hosts_file: str) -> int:
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
    namespaces.set_hostname(name)
    namespaces.mount("none", "/", None, namespaces.MS_REC | namespaces.MS_PRIVATE)
    if os.path.exists("/etc/hosts"):
        namespaces.mount(hosts_file, "/etc/hosts", None, namespaces.MS_BIND)
    tight = namespaces.MS_NOSUID | namespaces.MS_NODEV | namespaces.MS_NOEXEC
    namespaces.mount("proc", "/proc", "proc", tight)
    # UCX lists interfaces by /sys/class/net, which shows the network namespace that mounted it.
    namespaces.mount("sysfs", "/sys", "sysfs", tight)
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
    """Reap the processes left to PID 1, until the lab ends."""
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
