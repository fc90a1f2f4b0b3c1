"""What ranks find out about each other at the start, and the log of rounds."""

import os

import numpy as np
import pytest

pytestmark = pytest.mark.mpi


@pytest.fixture(params=[None, 9], ids=["whole", "cut to 9 bytes"])
def transport(comm, request):
    from mpicomp.mpi.comm import COUNT_LIMIT, MPITransport

    end = MPITransport(comm, count_limit=request.param or COUNT_LIMIT)
    yield end
    end.close()
    end.close()


def test_sums_have_the_same_bits_or_are_not_used(transport, comm):
    """What the transport found out at its start holds for other sizes, too."""
    for size in (1, 100, 5000, 300_000):
        send = np.random.default_rng(comm.rank).normal(size=size).astype(np.float32)
        recv = np.empty(size, np.float32)
        comm.Allreduce(send, recv)
        everyones = np.empty((comm.size, size), np.float32)
        comm.Allgather(recv, everyones)
        if transport.group.identical_sums:
            assert all(other.tobytes() == recv.tobytes() for other in everyones)


@pytest.mark.parametrize("hosts", ["one", "each its own", "two"])
def test_cores_shared_by_ranks_of_a_host_count_once(comm, hosts):
    from mpicomp.mpi.comm import cores_of_a_rank

    layout = {"one": [0] * comm.size, "each its own": list(range(comm.size)), "two": [r % 2 for r in range(comm.size)]}
    before = os.sched_getaffinity(0)
    core = sorted(before)[comm.rank % len(before)]
    bound = comm.allgather(core)
    expected = min(
        len({core for core, other in zip(bound, layout[hosts], strict=True) if other == host})
        / layout[hosts].count(host)
        for host in layout[hosts]
    )
    os.sched_setaffinity(0, {core})
    try:
        assert cores_of_a_rank(comm, layout[hosts]) == expected
    finally:
        os.sched_setaffinity(0, before)


def test_ranks_that_may_run_anywhere_share_all_cores_of_their_host(comm, monkeypatch):
    from mpicomp.mpi.comm import cores_of_a_rank

    cores = len(os.sched_getaffinity(0))
    assert cores_of_a_rank(comm, [0] * comm.size) == cores / comm.size
    some = comm.Split(comm.rank % 2, comm.rank)  # whose ranks share the cores with the others
    assert cores_of_a_rank(some, [0] * some.size) == cores / comm.size
    some.Free()
    for name in ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.setenv(name, "1")
    assert cores_of_a_rank(comm, list(range(comm.size))) == cores


@pytest.mark.parametrize(
    ("setting", "cores", "sleeps"), [(None, 0.5, True), (None, 1.0, False), ("0", 0.5, False), ("1", 2.0, True)]
)
def test_ranks_that_share_a_core_sleep(comm, monkeypatch, setting, cores, sleeps):
    from mpicomp.mpi.comm import sleeps_while_waiting

    monkeypatch.delenv("MPICOMP_NAPS", raising=False)
    if setting is not None:
        monkeypatch.setenv("MPICOMP_NAPS", setting)
    assert sleeps_while_waiting(comm, cores) is sleeps
