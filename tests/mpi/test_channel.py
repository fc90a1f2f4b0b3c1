"""Every operation over real MPI in every group: hosts that are none are named, as one machine has but one."""

import numpy as np
import pytest
from exchanges import LAYOUTS, at_once, in_the_background, of
from marks import slow

from mpicomp.errors import ClosedError
from mpicomp.mpi.rounds import Round

pytestmark = pytest.mark.mpi


@pytest.fixture(params=["0", "1"], ids=["blocking", "naps"])
def naps(request, monkeypatch):
    monkeypatch.setenv("MPICOMP_NAPS", request.param)


@pytest.fixture(
    params=[("0", None), ("1", 9), slow(("0", 9)), slow(("1", None))],
    ids=["blocking, whole", "naps, cut to 9 bytes", "blocking, cut to 9 bytes", "naps, whole"],
)
def transports(comm, monkeypatch, request):
    """Give a transport of each layout, with the layout."""
    from mpicomp.mpi.comm import COUNT_LIMIT, MPITransport

    naps, limit = request.param
    monkeypatch.setenv("MPICOMP_NAPS", naps)
    layouts = LAYOUTS.get(comm.size, [[0] * comm.size])
    made = [(layout, MPITransport(comm, limit or COUNT_LIMIT, layout)) for layout in layouts]
    yield made
    for _, transport in made:
        transport.close()


@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_every_operation_in_every_group(transports, comm, dtype):
    for layout, transport in transports:
        assert transport.run(at_once(layout, comm.rank, dtypes=[dtype])) > 0


def test_rounds_pending_while_others_run(transports, comm):
    for layout, transport in transports:
        assert transport.run(in_the_background(layout, comm.rank)) > 0


def test_ranks_know_their_groups(transports, comm):
    for layout, transport in transports:
        group = transport.group
        assert (group.rank, group.size, group.hosts) == (comm.rank, comm.size, len(set(layout)))
        assert group.part("host").size == layout.count(layout[comm.rank])
        parts = [group.part(name) for name in ("world", "host", "across")]
        everyones = comm.allgather([None if part is None else part.identical_sums for part in parts])
        assert all(len({flags[place] for flags in everyones} - {None}) == 1 for place in range(3))


@pytest.fixture
def transport(comm, naps):
    from mpicomp.mpi.comm import MPITransport

    end = MPITransport(comm)
    yield end
    end.close()


@pytest.mark.parametrize("numel", [0, 1, 70_000, 700_001])
def test_arrived_parts_cover_the_array_once_as_sent(comm, transport, numel):
    from mpicomp.mpi.channel import SEGMENT

    rank, size = comm.rank, comm.size
    source = of((rank - 1) % size, numel, np.float64)
    recv = np.full(numel, np.nan)
    times_seen = np.zeros(numel, np.int64)
    parts = []

    def arrived(start, stop):
        np.testing.assert_array_equal(recv[start:stop], source[start:stop])
        times_seen[start:stop] += 1
        parts.append(stop - start)

    peers = ((rank + 1) % size, (rank - 1) % size)
    send = of(rank, numel, np.float64)
    transport.perform(Round("sendrecv", (numel, numel), send.dtype, 0, send, recv, peers=peers, arrived=arrived))
    assert (times_seen == 1).all()
    assert len(parts) == -(-8 * numel // SEGMENT)
    np.testing.assert_array_equal(send, of(rank, numel, np.float64))


@pytest.mark.mpi(min_size=2)
def test_first_part_arrives_before_the_rest_is_sent(comm, transport):
    """Rank 1 waits in its first part for word from rank 0, which by then knows that part to be there."""
    from mpicomp.mpi.channel import SEGMENT

    numel, parts = 16 * SEGMENT, []
    if comm.rank == 0:
        task = Round("sendrecv", (numel, 0), np.dtype(np.uint8), send=np.ones(numel, np.uint8), peers=(1, None))
        pending = transport.start(task)
        while not comm.iprobe(1):
            pending.test()
        assert not pending.test()  # the other rank waits for the answer in the middle of its array
        assert comm.recv(source=1) == SEGMENT
        comm.send("go on", 1)
        transport.wait(pending)
    elif comm.rank == 1:
        recv = np.zeros(numel, np.uint8)

        def arrived(start, stop):
            if not parts:
                comm.send(stop - start, 0)
                assert comm.recv(source=0) == "go on"
            parts.append((start, stop))

        transport.perform(Round("sendrecv", (0, numel), recv.dtype, recv=recv, peers=(None, 0), arrived=arrived))
        assert recv.all()
        assert sorted(parts) == [(first, first + SEGMENT) for first in range(0, numel, SEGMENT)]


def test_round_that_is_yielded_again_takes_its_arrays_of_now(comm, transport):
    ranks = comm.size
    for operation, counts in (("allgatherv", [1] * ranks), ("allreduce", (ranks,)), ("bcast", (ranks,))):
        task = Round(operation, counts, np.dtype(np.float64))
        for turn in range(6):
            if turn % 2 == 0:
                task.send, task.recv = (
                    np.empty(sum(counts) // (ranks if operation == "allgatherv" else 1)),
                    np.empty(ranks),
                )
            task.send[:] = comm.rank + 10 * turn
            expected = {
                "allgatherv": [rank + 10 * turn for rank in range(ranks)],
                "allreduce": [sum(rank + 10 * turn for rank in range(ranks))] * ranks,
                "bcast": [10 * turn] * ranks,
            }
            assert transport.perform(task).tolist() == expected[operation]


def test_background_round_begins_at_any_time_on_a_rank(comm, transport):
    """Even ranks begin it before other rounds, odd ones after: it has other communicators."""
    ranks = comm.size
    arrays = {"send": np.array([comm.rank]), "recv": np.zeros(ranks, np.int64)}
    background = Round("allgatherv", [1] * ranks, np.dtype(np.int64), **arrays, background=True)
    pending = transport.start(background) if comm.rank % 2 == 0 else None
    for _ in range(5):
        total = np.zeros(1)
        transport.perform(Round("allreduce", (1,), total.dtype, send=np.array([1.0]), recv=total))
        assert total[0] == ranks
    pending = pending or transport.start(background)
    for _ in range(2):
        assert transport.wait(pending).tolist() == list(range(ranks))


def test_closing_leaves_open_rounds_to_the_next_transport(comm, naps):
    from mpicomp.mpi.comm import MPITransport

    recv = np.zeros(1)
    transport = MPITransport(comm)
    task = Round("allreduce", (1,), recv.dtype, send=np.array([1.0]), recv=recv, background=True)
    transport.start(task)
    transport.close()
    transport.close()
    with pytest.raises(ClosedError, match="was closed; make a new one"):
        transport.start(task)
    while comm.allreduce(recv[0] != comm.size):  # the time limit of the test is that of this loop
        MPITransport(comm).close()


def test_background_segments_go_one_after_the_other(comm, transport):
    """A wait for any of them moves all on, so they are done wherever one waits first."""
    from mpicomp.mpi.channel import SEGMENT

    ranks, rank, numel = comm.size, comm.rank, 20 * SEGMENT + 1
    for order in ([0, 1, 2], [2, 0, 1]):
        arrived, pending = [], []
        for number in range(3):
            task = Round(
                "sendrecv", (numel, numel), np.dtype(np.uint8), peers=((rank + 1) % ranks, (rank - 1) % ranks),
                send=np.full(numel, 8 * number + rank, np.uint8), recv=np.zeros(numel, np.uint8),
                arrived=lambda start, stop, arrived=arrived, number=number: arrived.append(number), background=True,
            )  # fmt: skip
            pending.append(transport.start(task))
        for number in order:
            assert (transport.wait(pending[number]) == 8 * number + (rank - 1) % ranks).all()
        assert [arrived.count(number) for number in range(3)] == [21, 21, 21]
        assert arrived.index(0) < arrived.index(1) < arrived.index(2)
