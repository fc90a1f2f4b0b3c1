"""Four Slurm nodes on this machine, in namespaces of their own: with the process that starts them, all of it goes."""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sinfo", "srun", "sbatch", "scontrol")
NODES = 4
GPUS = 2  # a node; each is /dev/null, which Slurm hands out like any other device
REQUEUE_S = 5  # how long a job that was requeued waits before it starts again; two minutes unless one says so
_UNSHARE = ("unshare", "--pid", "--mount", "--fork", "--mount-proc")

_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue_s}
SlurmUser=root
SlurmdUser=root
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
GresTypes=gpu
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=2
MessageTimeout=30
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port={node_ports} CPUs=4 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

_GRES = "NodeName=n[1-{nodes}] Name=gpu File={folder}/gpu[0-{last}]\n"

_START = """\
set -e
mungekey --create --keyfile="$1/munge.key"
munged --force --key-file="$1/munge.key" --socket="$1/munge.socket" --pid-file="$1/munged.pid" \
    --log-file="$1/munged.log" --seed-file="$1/munged.seed"
slurmctld -c
for node in $(seq "$2"); do slurmd -N "n$node"; done
exec sleep infinity
"""


def reason_without_slurm():
    """Return why there can be no cluster here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    missing = [name for name in (*PROGRAMS, "unshare") if shutil.which(name) is None]
    if missing:
        return f"needs Slurm (Debian: apt-get install slurm-wlm munge); there is no {', '.join(missing)}"
    done = subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False)
    return None if done.returncode == 0 else f"needs namespaces: {done.stderr.decode().strip()}"


def _free_ports(number):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Cluster:
    """A running cluster; `environment` is that of a user who has logged in."""

    def __init__(self, folder, process, environment):
        self.folder = folder
        self.environment = environment
        self._process = process

    def run(self, *command, timeout=60, cwd=None, **variables):
        """Run a command as on a login node and return its CompletedProcess, as text.

        Slurm's pmi2 plugin now and then loses its place in what a process sends it, and the job hangs; users of other
        MPI libraries see the same (ufs-community/ufs-weather-model#1732). Such a job is started once more.
        """
        try:
            return self._run(command, timeout, cwd, variables)
        except subprocess.TimeoutExpired as late:
            if b"mpi/pmi2: value not properly terminated" not in (late.stderr or b""):
                raise
        return self._run(command, timeout, cwd, variables)

    def _run(self, command, timeout, cwd, variables):
        return subprocess.run(
            [str(word) for word in command],
            env={**self.environment, **variables},
            cwd=cwd or self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def logs(self):
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files)

    def wait(self, limit_s=30):
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and self._process.poll() is None:
            states = self.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()
            if states == ["idle"] * NODES:
                return
            time.sleep(0.1)
        raise TimeoutError(f"Slurm did not come up within {limit_s} s\n{self.logs()}")


@contextlib.contextmanager
def cluster(environ):
    """Start a cluster, and leave nothing of it behind."""
    # Not pytest's folder: sockets are made below, whose paths may have no more than 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="mpicomp-slurm-", dir="/tmp"))
    (folder / "state").mkdir()
    ports = _free_ports(NODES + 1)
    host = socket.gethostname()
    node_ports = ",".join(map(str, ports[1:]))
    for gpu in range(GPUS):
        (folder / f"gpu{gpu}").symlink_to("/dev/null")
    values = {"folder": folder, "nodes": NODES, "gpus": GPUS, "last": GPUS - 1, "requeue_s": REQUEUE_S}
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(host=host, ports=ports, node_ports=node_ports, **values))
    (folder / "gres.conf").write_text(_GRES.format(**values))
    environment = {**environ, "SLURM_CONF": str(config)}
    with (folder / "start.log").open("w") as log:
        process = subprocess.Popen(
            [*_UNSHARE, "--kill-child", "bash", "-c", _START, "start", str(folder), str(NODES)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=_die_with_parent,
        )
    try:
        running = Cluster(folder, process, environment)
        running.wait()
        yield running
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
