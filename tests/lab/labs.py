"""What the tests of the lab share."""

import subprocess
import sys
from pathlib import Path

from mpicomp.bench.lab import launch, run
from mpicomp.bench.lab.lab_settings import LabError

PROGRAMS = str(Path(__file__).with_name("programs.py"))


MAIN = "from mpicomp.cli import main; raise SystemExit(main())"


def lab_command(*options):
    return [sys.executable, "-c", MAIN, "lab", "run", *options]


USER = 54321  # no real one, for folders in /tmp are named after it
# The user of the tests becomes another one, who owns the same files and has no capabilities.
AS_A_USER = ["unshare", "--user", f"--map-user={USER}", f"--map-group={USER}"]
AS_ROOT_WITHOUT_TUN = ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs none /dev/net && exec "$@"', "sh"]
_FORBID = "echo 0 >/proc/sys/user/max_user_namespaces"
# A folder of /proc that cannot be read, as in a container, and no capabilities: no other /proc can be mounted there.
_MASK = f'mount -t tmpfs none /proc/irq && exec {" ".join(AS_A_USER)} "$@"'
MASKED = ["unshare", "-Urm", "sh", "-c", _MASK, "sh"]
FORBIDDEN = ["unshare", "-Ur", "sh", "-c", f'{_FORBID}; exec setpriv --bounding-set=-all --inh-caps=-all "$@"', "sh"]


def reason_without_lab():
    try:
        run.check_requirements()
        launch.find_launcher()
    except LabError as error:
        return f"a lab {error}"
    return None


def reason_without_user_namespaces():
    done = subprocess.run(["unshare", "-Ur", "true"], capture_output=True, text=True, check=False)
    return f"the kernel refuses user namespaces: {done.stderr.strip()}" if done.returncode else None
