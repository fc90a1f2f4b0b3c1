"""Private copies of the network, the process table and the mounts, by the calls that Python lacks before 3.12.

Nothing here is named or persistent: a namespace lives as long as a process inside it, so the kernel cleans up
whatever way the lab ends.
"""

import ctypes
import os
import signal
from collections.abc import Callable, Iterable

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
ALL = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Move this process (for CLONE_NEWPID: its children) into new namespaces."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def enter(pid: int, kinds: Iterable[str]) -> None:
    """Move this process into namespaces of the process `pid`, named as in ``/proc/PID/ns``."""
    # All are opened first: entering the mount namespace changes what /proc is.
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


def set_hostname(name: str) -> None:
    """Name the host of this UTS namespace."""
    encoded = name.encode()
    _check(_libc.sethostname(encoded, ctypes.c_size_t(len(encoded))), "sethostname")


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
    """Run before every ordinary process, but not the processes that this one starts; say whether it worked."""
    try:
        policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(priority))
    except OSError:
        return False
    return True
