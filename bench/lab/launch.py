"""Launch commands of MPICH and Open MPI for the hosts of a lab."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpicomp.bench.lab.lab_settings import LabError, Settings
from mpicomp.bench.lab.network import HEAD_ADDRESS, control_address

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # leave for Open MPI


def find_launcher() -> Path:
    """Return the mpiexec next to the running Python."""
    launcher = Path(sys.executable).parent / "mpiexec"
    if not os.access(launcher, os.X_OK):
        raise LabError(
            f"needs the MPI launcher next to Python, and there is no {launcher}; "
            "install one with: pip install 'mpicomp[mpich]'"
        )
    return launcher


def find_mpi(launcher: Path) -> str:
    """Return whose launcher it is: mpich or openmpi."""
    try:
        words, leave = [str(launcher), "--version"], os.environ | AS_ROOT
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False, env=leave)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"needs a working MPI launcher, and {launcher} --version failed: {error}") from None
    return "openmpi" if "Open MPI" in done.stdout + done.stderr else "mpich"


def environment(mpi: str, hosts: int, ppn: int, caller: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the job: the caller's, with MPI held to eth0, whatever that has set."""
    result = dict(caller)
    result["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), caller.get("PATH", os.defpath)])
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "FI_TCP_IFACE"):
        result[name] = "eth0"
    # Programs that know nothing of the lab find it out by these.
    result["MPICOMP_LAB"] = "1"
    if mpi == "mpich":
        result["UCX_NET_DEVICES"] = "eth0"
        # Shared memory cannot reach another host, whose mounts and IPC objects are its own; leaving it out where it
        # has no use saves UCX from trying.
        defaults = {
            "UCX_TLS": "tcp,self" if ppn == 1 else "posix,sysv,tcp,self",
            "UCX_WARN_UNUSED_ENV_VARS": "n",
            # Hydra would write the topology to /tmp and leave it there when it is killed; hwloc takes the empty name
            # for none and looks for itself.
            "HWLOC_XMLFILE": "",
        }
    else:
        result |= AS_ROOT | {"OMPI_MCA_btl_tcp_if_include": "eth0"}
        defaults = {
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "tcp,self" if ppn == 1 else "tcp,self,sm",
            # Ranks share cores, which Open MPI cannot tell from one host: 0.1 ms instead of 3.9 for a small Allreduce.
            "OMPI_MCA_mpi_yield_when_idle": "1",
            # When the other side connects first, Open MPI 5.0.11 does not count the connection and looks for its
            # messages only every 10 ms: in 7 of 30 jobs of two ranks, and in 0 of 30 with this.
            "OMPI_MCA_mpi_event_tick_rate": "1",
        }
    # Every host sees all the cores of this machine: no program in there can tell that it has to share them.
    cores, ranks = len(os.sched_getaffinity(0)), hosts * ppn
    defaults["OMP_NUM_THREADS"] = str(max(1, cores // ranks))
    if ranks > cores:
        defaults["MPICOMP_NAPS"] = "1"
    # Hosts have boot ids of their own, and would each compile kernels that this machine has already.
    if BOOT_ID.exists():
        defaults["MPICOMP_BOOT_ID"] = BOOT_ID.read_text().strip()
    for name, value in defaults.items():
        result.setdefault(name, value)
    return result


def command_line(mpi: str, launcher: Path, agent: str, settings: Settings, nice: int) -> list[str]:
    """Return the launcher's command line; `agent` stands in for ssh, and ranks run at the niceness `nice`."""
    hosts = [control_address(index) for index in range(settings.hosts)]
    ranks = str(settings.hosts * settings.ppn)
    if mpi == "mpich":
        line: Sequence[str] = [
            *(str(launcher), "-localhost", HEAD_ADDRESS, "-launcher", "ssh", "-launcher-exec", agent),
            *("-hosts", ",".join(hosts), "-ppn", str(settings.ppn), "-n", ranks),
        ]
    else:
        line = [
            *(str(launcher), "--prtemca", "plm_ssh_agent", agent, "--prtemca", "plm_ssh_no_tree_spawn", "1"),
            *("--prtemca", "prte_if_include", "control", "--prtemca", "prte_tmpdir_base", "/dev/shm"),
            *("-H", ",".join(f"{host}:{settings.ppn}" for host in hosts), "-n", ranks),
            *("--map-by", f"ppr:{settings.ppn}:node:OVERSUBSCRIBE", "--bind-to", "none"),
        ]
    more = nice - os.nice(0)
    priority = ["nice", "-n", str(more)] if more else []
    if nice != 0 and os.path.exists("/proc/self/autogroup"):
        # Launchers start a session for each rank, and where the kernel groups by session (sched_autogroup), niceness
        # only counts inside one: without this, ``nice -n -15 mpicomp lab run`` changes nothing on a busy machine. A
        # command in the caller's session does not change the priority of everything else there.
        leads = '[ "$(cut -d" " -f6 /proc/$$/stat)" = $$ ]'  # the session that it is in
        priority += ["/bin/sh", "-c", f'{leads} && echo {nice} 2>&- >/proc/self/autogroup; exec "$@"', "sh"]
    return [*line, *priority, *settings.command]
