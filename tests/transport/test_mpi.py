"""Rounds over real MPI, whole and cut, against what the definitions say."""

import numpy as np
import pytest
from marks import slow

from mpicomp.rounds import Round

pytestmark = pytest.mark.mpi
DTYPES = [np.uint8, slow(np.uint32), slow(np.int64), slow(np.uint64), slow(np.float32), np.float64]
SIZES = [(0,) * 6, (5,) * 6, (3, 0, 7, 1, 2, 0), (0, 400, 1, 0, 0, 9)]


@pytest.fixture(params=[None, 64, 9], ids=["whole", "cut to 64 bytes", "cut to 9 bytes"])
def transport(comm, request):
    from mpicomp.transport.mpi import COUNT_LIMIT, MPITransport

    end = MPITransport(comm, count_limit=request.param or COUNT_LIMIT)
    yield end
    end.close()
    end.close()


def of(rank, size, dtype):
    return np.random.default_rng(rank).integers(0, 60, size).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 7, 1000])
def test_allreduce(transport, size, dtype):
    ranks = transport.group.size
    send = of(transport.group.rank, size, dtype)
    recv = np.empty(size, dtype)
    transport.perform(Round("allreduce", (size,), np.dtype(dtype), send=send, recv=recv))
    np.testing.assert_array_equal(recv, sum(of(rank, size, dtype) for rank in range(ranks)))
    np.testing.assert_array_equal(send, of(transport.group.rank, size, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 7, 1000])
def test_bcast_from_every_root(transport, size, dtype):
    for root in range(transport.group.size):
        send = of(root, size, dtype) if transport.group.rank == root else None
        recv = np.empty(size, dtype)
        transport.perform(Round("bcast", (size,), np.dtype(dtype), root=root, send=send, recv=recv))
        np.testing.assert_array_equal(recv, of(root, size, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_allgatherv(transport, sizes, dtype):
    counts = list(sizes[: transport.group.size])
    rank = transport.group.rank
    recv = np.empty(sum(counts), dtype)
    transport.perform(Round("allgatherv", counts, np.dtype(dtype), send=of(rank, counts[rank], dtype), recv=recv))
    np.testing.assert_array_equal(recv, np.concatenate([of(r, count, dtype) for r, count in enumerate(counts)]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_alltoallv(transport, sizes, dtype):
    counts = list(sizes[: transport.group.size])
    rank, ranks = transport.group.rank, transport.group.size
    bounds = np.concatenate(([0], np.cumsum(counts)))
    recv = np.empty(counts[rank] * ranks, dtype)
    send = of(rank, sum(counts), dtype)
    transport.perform(Round("alltoallv", counts, np.dtype(dtype), send=send, recv=recv))
    mine = slice(bounds[rank], bounds[rank + 1])
    np.testing.assert_array_equal(recv, np.concatenate([of(r, sum(counts), dtype)[mine] for r in range(ranks)]))


def test_the_group_and_the_hosts(transport, comm):
    assert (transport.group.rank, transport.group.size) == (comm.rank, comm.size)
    assert transport.hosts() == 1


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


def test_a_log_of_every_round(transport):
    transport.log.clear()

    def exchange():
        send = np.zeros(100, np.float32)
        yield Round("allreduce", (100,), send.dtype, send=send, recv=np.empty_like(send))
        return "done"

    assert transport.run(exchange()) == "done"
    [entry] = transport.log
    ranks = transport.group.size
    assert entry.operation == "allreduce"
    assert entry.seconds > 0
    assert entry.sent_bytes == (400 if ranks > 1 else 0)
    assert entry.wire_bytes == pytest.approx(2 * (ranks - 1) / ranks * 400)


def test_some_ranks_exchange_among_themselves(transport, comm):
    for count in range(1, comm.size + 1):
        some = transport.subgroup(count)
        assert (some is None) == (comm.rank >= count)
        if some is not None:
            assert (some.group.rank, some.group.size) == (comm.rank, count)
            send, recv = np.ones(3), np.empty(3)
            assert some.perform(Round("allreduce", (3,), recv.dtype, send=send, recv=recv)).tolist() == [count] * 3
            some.close()
