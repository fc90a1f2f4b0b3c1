"""What the tests of the lab share."""

import os
import shutil
import sys
from pathlib import Path

PROGRAMS = str(Path(__file__).with_name("programs.py"))


MAIN = "from mpicomp.cli import main; raise SystemExit(main())"


def lab_command(*options):
    return [sys.executable, "-c", MAIN, "lab", "run", *options]


def reason_without_lab():
    if sys.platform != "linux":
        return "a lab needs Linux"
    if os.geteuid() != 0:
        return "a lab needs root"
    if shutil.which("ip") is None:
        return "a lab needs the command ip"
    if not os.path.exists("/dev/net/tun"):
        return "a lab needs /dev/net/tun"
    if not (Path(sys.executable).parent / "mpiexec").exists():
        return "a lab needs mpiexec next to Python"
    return None
