"""Messages that are longer than one call of MPI may be: they are cut, at any length and whatever carries them."""

import numpy as np
import pytest
from limits.folded import folded
from marks import once
from schemes import OWN

import mpicomp
from mpicomp.mpi.rounds import Round
from mpicomp.testing import pairs

LONG = 2**31 + 2**20 + 5  # elements of a byte
WINDOWS = [(0, 1 << 20), (LONG // 2 - (1 << 20), LONG // 2 + (1 << 20)), (2**31 - (1 << 20), LONG - 1)]


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize(("compressor", "collective"), once(pairs(OWN)), ids=str)
def test_cut_messages_deliver_the_same(comm, compressor, collective):
    """No call of MPI has more than 100 bytes on the one transport; on the other one all have what they like."""
    from mpicomp.mpi.comm import COUNT_LIMIT, MPITransport

    transports = [MPITransport(comm, limit) for limit in (100, COUNT_LIMIT)]
    reducers = [mpicomp.Reducer(compressor, collective, feedback=True, comm=end) for end in transports]
    before = 0.0
    for step in range(2):
        value = np.random.default_rng([comm.rank, step]).normal(size=(20, 25)).astype(np.float32)
        cut, whole = (reducer.reduce({"w": value})["w"].copy() for reducer in reducers)
        if comm.size == 2:  # sums of more have another order where they are cut
            assert cut.tobytes() == whole.tobytes()
        assert len(set(comm.allgather(cut.tobytes()))) == 1
        put_in = comm.allreduce(value.astype(np.float64)) + before
        before = comm.allreduce(reducers[0].residual("w").astype(np.float64))
        np.testing.assert_allclose(comm.size * cut + before, put_in, rtol=0, atol=1e-4)
    for reducer, end in zip(reducers, transports, strict=True):
        reducer.close()
        end.close()


def ramp(start, stop, rank):
    """Return what stands in a part of a rank's array; its place follows from it."""
    return ((np.arange(start, stop, dtype=np.int64) * 7 + rank) % 113).astype(np.uint8)


def filled(rank, windows=WINDOWS, size=LONG):
    array = folded(size, np.uint8, windows)
    for first, last in windows:
        array[first : last + 1] = ramp(first, last + 1, rank)
    return array


@pytest.fixture
def pair(comm):
    """The first two of all ranks, more of which there are with --slow."""
    halves = comm.Split(comm.rank // 2, comm.rank)
    if comm.rank > 1:
        pytest.skip("two ranks show all of it")
    return halves


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("limit", [1 << 26, None], ids=["cut to 64 MiB", "whole"])
@pytest.mark.parametrize("operation", ["allreduce", "bcast", "sendrecv", "allgatherv", "gatherv", "alltoallv"])
def test_message_beyond_31_bits_of_elements_arrives(pair, operation, limit):
    """Rounds of bytes, most of which are in the same few pages, see `folded`: 2 GiB of memory at most."""
    from mpicomp.mpi.comm import COUNT_LIMIT, MPITransport

    transport = MPITransport(pair, limit or COUNT_LIMIT)
    rank, other, byte = pair.rank, 1 - pair.rank, np.dtype(np.uint8)
    short = 3  # elements that the second rank adds where all parts are in one array
    match operation:
        case "allgatherv" | "gatherv":
            send = filled(0) if rank == 0 else ramp(0, short, 1)
            windows = [*WINDOWS, (LONG, LONG + short - 1)]
            recv = folded(LONG + short, byte, windows) if operation == "allgatherv" or rank == 0 else None
            task = Round(operation, [LONG, short], byte, send=send, recv=recv)
        case "alltoallv":
            send = filled(rank)  # the other one's part is all of it
            counts = [LONG if place == other else 0 for place in range(2)]
            recv = folded(LONG, byte, WINDOWS)
            task = Round(operation, counts, byte, send=send, recv=recv, received=counts)
        case "sendrecv":
            recv = folded(LONG, byte, WINDOWS)
            task = Round(operation, (LONG, LONG), byte, send=filled(rank), recv=recv, peers=(other, other))
        case _:
            recv = folded(LONG, byte, WINDOWS)
            task = Round(operation, [LONG], byte, send=filled(rank), recv=recv)
    transport.perform(task)
    of = {"allreduce": (0, 1), "sendrecv": (other,), "alltoallv": (other,)}.get(operation, (0,))
    if recv is not None:
        for first, last in WINDOWS:
            expected = sum(ramp(first, last + 1, sender) for sender in of)
            np.testing.assert_array_equal(recv[first : last + 1], expected)
        if operation in ("allgatherv", "gatherv"):
            np.testing.assert_array_equal(recv[LONG:], ramp(0, short, 1))
    transport.close()
