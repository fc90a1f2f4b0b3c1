"""How a report reads."""

from golden import check_golden

from mpicomp.doctor import render

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
