"""The command that the MPI launcher calls in place of ssh: ``AGENT TABLE [options] HOST COMMAND...``.

Run as a script by path and without site-packages, because one starts for every host: it imports nothing of
mpicomp. TABLE is a file of lines ``address name pid``.
"""

import ctypes
import os
import signal
import sys

_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_KINDS = ("net", "uts", "ipc", "pid", "mnt")


def main(table: str, arguments: list[str]) -> int:
    """Run the rest of `arguments` by a shell on the host they name, and return its status."""
    while arguments and arguments[0].startswith("-"):
        # Launchers give ssh options without values only (-x, -T).
        arguments = arguments[1:]
    if len(arguments) < 2:
        print("lab: the launcher called its agent without a host and a command", file=sys.stderr)
        return 255
    host, command = arguments[0], " ".join(arguments[1:])
    with open(table, encoding="ascii") as lines:
        rows = [line.split() for line in lines]
    pids = {key: int(pid) for address, name, pid in rows for key in (address, name)}
    if host not in pids:
        print(f"lab: the launcher asked for the unknown host {host!r}", file=sys.stderr)
        return 255

    libc = ctypes.CDLL(None, use_errno=True)
    folder = os.getcwd()
    descriptors = [os.open(f"/proc/{pids[host]}/ns/{kind}", os.O_RDONLY) for kind in _KINDS]
    for descriptor in descriptors:
        if libc.setns(descriptor, 0) != 0:
            print(f"lab: cannot enter host {host}: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
            return 255
        os.close(descriptor)
    # Entering a mount namespace moves to its root.
    os.chdir(folder)

    # Only children enter a process namespace.
    child = os.fork()
    if child == 0:
        libc.prctl(1, signal.SIGKILL, 0, 0, 0)
        # Without root the lab's capabilities are ambient; the job has those of its caller.
        libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.execv("/bin/sh", ["/bin/sh", "-c", command])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, frame: os.kill(child, received))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
