"""What ranks find out about each other at the start."""

import os

import pytest


@pytest.fixture
def one_core():
    """Let this rank run on one of its cores only; give a function that says which."""
    before = os.sched_getaffinity(0)

    def choose(place):
        core = sorted(before)[place % len(before)]
        os.sched_setaffinity(0, {core})
        return core

    yield choose
    os.sched_setaffinity(0, before)


@pytest.mark.mpi
@pytest.mark.parametrize("hosts", ["one", "each its own", "two"])
def test_cores_shared_by_ranks_of_a_host_count_once(comm, hosts, one_core):
    from mpicomp.transport.mpi import cores_of_a_rank

    layout = {"one": [0] * comm.size, "each its own": list(range(comm.size)), "two": [r % 2 for r in range(comm.size)]}
    bound = comm.allgather(one_core(comm.rank))
    expected = min(
        len({core for core, host in zip(bound, layout[hosts], strict=True) if host == own}) / layout[hosts].count(own)
        for own in layout[hosts]
    )
    assert cores_of_a_rank(comm, layout[hosts]) == expected


@pytest.mark.mpi
def test_ranks_that_may_run_anywhere_share_all_cores(comm):
    from mpicomp.transport.mpi import cores_of_a_rank

    assert cores_of_a_rank(comm, [0] * comm.size) == len(os.sched_getaffinity(0)) / comm.size
    assert cores_of_a_rank(comm, list(range(comm.size))) == len(os.sched_getaffinity(0))


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("said", "cores", "naps"), [(None, 0.5, True), (None, 1.0, False), ("0", 0.5, False), ("1", 2.0, True)]
)
def test_who_shares_a_core_takes_naps(comm, monkeypatch, said, cores, naps):
    from mpicomp.transport.mpi import takes_naps

    monkeypatch.delenv("MPICOMP_NAPS", raising=False)
    if said is not None:
        monkeypatch.setenv("MPICOMP_NAPS", said)
    assert takes_naps(comm, cores) is naps
