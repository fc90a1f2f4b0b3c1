"""Private copies of the network, the process table and the mounts, by the calls that Python lacks before 3.12.

Nothing here is named or persistent: a namespace lives as long as a process inside it, so the kernel cleans up
whatever way the lab ends.
"""

import ctypes
import os
import signal
import struct
from collections.abc import Callable, Iterable

CLONE_NEWUSER = 0x10000000
ALL = 0x6C020000  # CLONE_NEWNS, NEWUTS, NEWIPC, NEWPID and NEWNET

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000

_PR_SET_PDEATHSIG = 1
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2
_CAPABILITY_VERSION = 0x20080522
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_RESET_ON_FORK = 1
_TURN_NS = 100_000  # the kernel's least
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Move this process (for CLONE_NEWPID: its children) into new namespaces."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def _capabilities(kind: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith(kind))


def is_privileged() -> bool:
    """Return whether this process may make networks and mounts without a user namespace."""
    needed = 1 << _CAP_NET_ADMIN | 1 << _CAP_SYS_ADMIN
    return _capabilities("CapEff") & needed == needed


def enter_user_namespace() -> None:
    """Move this process into a user namespace in which it stays who it is and has root's capabilities.

    As ambient ones they stay with the programs that it starts, `ip` and the launcher's agent among them.
    """
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    low, high = (_capabilities("CapPrm") >> shift & 0xFFFFFFFF for shift in (0, 32))
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)(low, low, low, high, high, high)), "capset")
    for number in (number for number in range(64) if (low | high << 32) >> number & 1):
        _check(_libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, number, 0, 0), "prctl")


def enter(pid: int, kinds: Iterable[str]) -> None:
    """Move this process into namespaces of the process `pid`, named as in ``/proc/PID/ns``."""
    # All are opened first: entering the mount namespace changes /proc.
    descriptors = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds]
    for descriptor in descriptors:
        _check(_libc.setns(ctypes.c_int(descriptor), ctypes.c_int(0)), "setns")
        os.close(descriptor)


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    """Call mount(2)."""
    result = _libc.mount(
        source.encode(),
        os.fsencode(target),
        None if kind is None else kind.encode(),
        ctypes.c_ulong(flags),
        None if data is None else data.encode(),
    )
    _check(result, f"mount {target}")


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that forked it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0), "prctl")


def fork(child: Callable[[], int]) -> int:
    """Run `child` in a forked process that ends with its return value; return the process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        status = child()
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        # No clean-up of the parent's: exit handlers, buffered output and pytest belong to it.
        os._exit(status)


def run_realtime(priority: int) -> bool:
    """Run before every ordinary process, or ask the kernel (6.12 and later) for short turns; return success."""
    try:
        policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(priority))
    except OSError:
        number = _SCHED_SETATTR.get(os.uname().machine)
        if number is not None:
            values = 48, os.SCHED_OTHER, _RESET_ON_FORK, os.nice(0), 0, _TURN_NS, 0, 0
            _libc.syscall(number, 0, struct.pack("IIQiIQQQ", *values), 0)
        return False
    return True
