"""Links that are simulated where there is no lab: each round takes the seconds of its bytes."""

import time

import numpy as np
import pytest

from mpicomp.mpi.rounds import Round

pytestmark = pytest.mark.mpi(min_size=2)

BANDWIDTH = 80_000_000  # bits, so ten million bytes a second


@pytest.fixture
def links(comm):
    from mpicomp.bench.lab.simulated_links import SimulatedLinks

    transport = SimulatedLinks(comm.size, BANDWIDTH)
    yield transport
    transport.close()


def slowest(comm, run):
    comm.Barrier()
    begin = time.perf_counter()
    run()
    return max(comm.allgather(time.perf_counter() - begin))


def test_every_rank_is_on_a_host_of_its_own(comm, links):
    assert links.group.hosts == comm.size


def test_allreduce_takes_the_seconds_of_a_ring(comm, links):
    send = np.full(250_000, comm.rank + 1.0, np.float32)
    recv = np.empty_like(send)
    task = Round("allreduce", (send.size,), send.dtype, send=send, recv=recv)
    seconds = slowest(comm, lambda: links.perform(task))
    assert (recv == comm.size * (comm.size + 1) / 2).all()
    assert 2 * (comm.size - 1) / comm.size * send.nbytes / 1e7 <= seconds < 2


def test_rounds_under_way_share_the_link(comm, links):
    send = np.full(50_000, comm.rank, np.float32)
    received = [np.empty((comm.size, send.size), np.float32) for _ in range(2)]

    def run():
        counts = (send.size,) * comm.size
        tasks = [Round("allgatherv", counts, send.dtype, send=send, recv=recv.ravel()) for recv in received]
        for pending in [links.start(task) for task in tasks]:
            links.wait(pending)

    seconds = slowest(comm, run)
    for recv in received:
        assert (recv == np.arange(comm.size)[:, None]).all()
    assert 2 * (comm.size - 1) * send.nbytes / 1e7 <= seconds < 2
