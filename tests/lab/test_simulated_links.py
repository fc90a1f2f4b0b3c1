"""Links that are simulated where there is no lab: each round takes exactly the seconds of its bytes."""

import numpy as np
import pytest

from mpicomp.mpi.rounds import Round

pytestmark = pytest.mark.mpi(min_size=2)

BANDWIDTH = 80_000_000  # bits, so ten million bytes a second


class Clock:
    """Stands still but for what is slept."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    from mpicomp.bench.lab import simulated_links  # starts MPI

    clock = Clock()
    monkeypatch.setattr(simulated_links, "time", clock)
    return clock


@pytest.fixture
def links(comm, clock):
    from mpicomp.bench.lab.simulated_links import SimulatedLinks

    transport = SimulatedLinks(comm.size, BANDWIDTH)
    yield transport
    transport.close()


def test_every_rank_is_on_a_host_of_its_own(comm, links):
    assert links.group.hosts == comm.size


def test_allreduce_takes_the_seconds_of_a_ring(comm, links, clock):
    send = np.full(250_000, comm.rank + 1.0, np.float32)
    recv = np.empty_like(send)
    for count in (1, 2):
        links.perform(Round("allreduce", (send.size,), send.dtype, send=send, recv=recv))
        assert (recv == comm.size * (comm.size + 1) / 2).all()
        assert clock.now == pytest.approx(count * 2 * (comm.size - 1) / comm.size * send.nbytes / 1e7)


def test_rounds_under_way_share_the_link(comm, links, clock):
    send = np.full(50_000, comm.rank, np.float32)
    received = [np.empty((comm.size, send.size), np.float32) for _ in range(2)]
    counts = (send.size,) * comm.size
    tasks = [Round("allgatherv", counts, send.dtype, send=send, recv=recv.ravel()) for recv in received]
    for pending in [links.start(task) for task in tasks]:
        links.wait(pending)
    for recv in received:
        assert (recv == np.arange(comm.size)[:, None]).all()
    assert clock.now == pytest.approx(2 * (comm.size - 1) * send.nbytes / 1e7)
