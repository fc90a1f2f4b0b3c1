"""How a report reads."""

from mpicomp.doctor import render


def report(**changes):
    binding = [
        {"rank": rank, "host": f"n{rank // 2}", "cpus": "0-3", "threads": 4, "reason": "OMP_NUM_THREADS=4"}
        for rank in range(4)
    ]
    ordinary = {
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
        "gpus": ["none"] * 4,
        "binding": binding,
        "transports": {"library": "ucx", "inside": "shared memory", "between": "tcp", "reason": "said"},
        "link": {"between": "hosts", "latency_s": 5.2471e-3, "bytes_per_s": 11.83e6},
        "clocks": {"error_s": 24e-6, "wall_difference_s": 12.0},
        "fork": {"method": "fork", "dangerous": True, "reason": "seen"},
        "launcher": {"name": "slurm", "size": 4},
        "python": {"version": "3.11", "executable": "python"},
        "packages": {"mpicomp": "1", "cupy": None},
        "problems": [],
        "notes": [],
    }
    return ordinary | changes


def lines(**changes):
    return [line.rstrip() for line in render(report(**changes)).splitlines()]


def test_ranks_that_are_bound_alike_share_a_line():
    found = lines()
    assert "binding     ranks 0-1: cpus 0-3 of n0, 4 threads each" in found
    assert "            ranks 2-3: cpus 0-3 of n1, 4 threads each" in found


def test_what_is_between_the_ranks():
    found = lines()
    assert "transports  shared memory inside a host, tcp between hosts (said)" in found
    assert "link        5250 us, 11.8 MB/s between hosts, measured with all ranks sending" in found
    assert "clocks      compared to 24 us; wall clocks differ by 12 s" in found
    assert "fork        dangerous with live MPI (seen)" in found


def test_what_was_not_measured_is_not_written():
    found = lines(link=None, clocks=None)
    assert not any(line.startswith(("link", "clocks")) for line in found)


def test_each_rank_has_its_gpu():
    found = lines(gpus=["0: A", "1: A", "0: B", "none"])
    assert found[found.index("GPUs        rank 0: 0: A") :][3] == "            rank 3: none"


def test_problems_come_last_and_no_report_is_without_a_verdict():
    assert lines()[-1] == "no problem found"
    wrong = {"problems": [{"what": "bad", "fix": "do"}], "notes": [{"what": "slow", "fix": "wait"}]}
    assert lines(**wrong)[-5:] == ["note: slow", "    fix: wait", "", "problem: bad", "    fix: do"]


def test_without_mpi_what_is_known_is_written():
    empty = dict.fromkeys(("mpi", "transports", "link", "clocks", "fork"))
    found = lines(**empty, ranks=0, hosts=[], gpus=[], binding=[])
    assert "launcher    slurm, 4 processes" in found
    assert "cupy        not installed" in found
