"""Long sums by the ranks of a host in memory that they share: the bits of a sum in rank order, on any library."""

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import mpicomp
from mpicomp.collectives import Context, bind
from mpicomp.mpi import shared_memory
from mpicomp.mpi.rounds import MIN_SHARED, Round
from mpicomp.testing import accumulated

NUMEL = MIN_SHARED + 5
SEVERAL = 3 * (shared_memory._SLOT // 4) + 1  # segments of float32, and an element more


def of(rank, numel, dtype=np.float32):
    return np.random.default_rng(rank).standard_t(3, numel).astype(dtype)


def in_rank_order(arrays, factor):
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total * total.dtype.type(factor)


def files():
    return list(Path(shared_memory._FOLDER).glob("mpicomp-*"))


def in_threads(ranks, work):
    """Run ``work(rank, gather)`` of each rank in a thread; ``gather`` returns the rows of all."""
    barrier, rows, results = threading.Barrier(ranks, timeout=20), [None] * ranks, [None] * ranks

    def gather_of(rank):
        def gather(row):
            rows[rank] = row
            barrier.wait()
            everyones = np.array(rows)
            barrier.wait()
            return everyones

        return gather

    def run(rank):
        results[rank] = work(rank, gather_of(rank), barrier)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Comm:
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_in_turn_have_the_bits_of_a_sum_in_rank_order(ranks, dtype):
    lengths = [NUMEL, SEVERAL, MIN_SHARED, ranks - 1]  # in the last one a rank has nothing to sum

    def work(rank, gather, barrier):
        memory, sums = shared_memory.share(Comm(rank, ranks), gather), []
        for numel in lengths:
            task = Round("allreduce", (numel,), np.dtype(dtype), factor=1 / ranks)
            task.send, task.recv = of(rank, numel, dtype), np.full(numel, np.nan, dtype)
            for _ in memory.sum(task, barrier.wait):
                pass
            sums.append((task.recv.tobytes(), task.finite))
        return sums

    before = files()
    results = in_threads(ranks, work)
    expected = [in_rank_order([of(rank, numel, dtype) for rank in range(ranks)], 1 / ranks) for numel in lengths]
    assert results == [[(mean.tobytes(), True) for mean in expected]] * ranks
    assert files() == before


@pytest.mark.parametrize("ranks", [1, shared_memory.MAX_RANKS + 1])
def test_one_rank_and_many_share_nothing(ranks):
    assert in_threads(ranks, lambda rank, gather, _: shared_memory.share(Comm(rank, ranks), gather)) == [None] * ranks


def test_no_rank_shares_where_one_cannot(monkeypatch):
    find = shared_memory._map
    places = iter([False, True, True])
    monkeypatch.setattr(shared_memory, "_map", lambda *words: find(*words) if next(places) else None)
    before = files()
    assert in_threads(3, lambda rank, gather, _: shared_memory.share(Comm(rank, 3), gather)) == [None] * 3
    assert files() == before


@pytest.mark.parametrize("is_nearly", [False, True])
def test_full_folder_leaves_no_file(monkeypatch, is_nearly):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = files()
    if is_nearly:
        monkeypatch.setattr(shared_memory, "_MIN_FREE", 1 << 40)
    else:
        monkeypatch.setattr(os, "posix_fallocate", full)
    assert in_threads(2, lambda rank, gather, _: shared_memory.share(Comm(rank, 2), gather)) == [None] * 2
    assert files() == before


@pytest.fixture(params=["0", "1"], ids=["blocking", "naps"])
def transport(comm, request, monkeypatch):
    from mpicomp.mpi.comm import MPITransport

    monkeypatch.setenv("MPICOMP_NAPS", request.param)
    end = MPITransport(comm)
    yield end
    end.close()


@pytest.fixture(params=[False, True], ids=["shared", "by MPI"])
def without_memory(request, transport, monkeypatch):
    if request.param:
        monkeypatch.setattr(transport._front["world"], "memory", None)
    return request.param


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("numel", [NUMEL, SEVERAL])
def test_rounds_of_a_transport_are_summed_and_multiplied(comm, transport, without_memory, numel):
    assert transport.group.shares_memory == (1 < comm.size <= shared_memory.MAX_RANKS)
    arrays = [of(rank, numel) for rank in range(comm.size)]
    expected = in_rank_order(arrays, 0.25)
    task = Round("allreduce", (numel,), np.dtype(np.float32), factor=0.25, flags=np.empty(3))
    for _ in range(3):  # twice in each buffer
        task.send, task.recv, task.flags[:] = arrays[comm.rank], np.empty(numel, np.float32), [comm.rank, 1e300, 0.5]
        mean = transport.perform(task)
        if without_memory:
            np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-5)
        else:
            assert mean.tobytes() == expected.tobytes()
        assert task.finite
        ranks = comm.size
        np.testing.assert_allclose(task.flags, [ranks * (ranks - 1) / 2, ranks * 1e300, ranks / 2])
    task.send = task.recv  # in place
    again = in_rank_order([mean.copy()] * comm.size, 0.25)
    np.testing.assert_allclose(transport.wait(transport.start(task)), again, rtol=1e-5, atol=1e-6)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_sum_that_is_not_finite_is_seen_by_all_ranks(comm, transport, without_memory, value):
    task = Round("allreduce", (SEVERAL,), np.dtype(np.float32), factor=0.5)
    for place in (0, SEVERAL // 2, SEVERAL - 1):
        send = np.ones(SEVERAL, np.float32)
        if comm.rank == comm.size - 1:
            send[place] = value
        task.send, task.recv = send, np.empty_like(send)
        transport.perform(task)
        assert not task.finite
        assert np.flatnonzero(~np.isfinite(task.recv)).tolist() == [place]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("with_residual", [False, True])
def test_dense_mean_of_a_long_array(comm, transport, in_place, with_residual):
    ranks, numel = comm.size, SEVERAL
    arrays = [of(rank, numel) for rank in range(ranks)]
    residuals = [array[::-1].copy() if with_residual else None for array in arrays]
    sums = [a if r is None else a + r for a, r in zip(arrays, residuals, strict=True)]
    expected = in_rank_order(sums, 1 / ranks)
    scheme, context = bind(mpicomp.Dense(), "allreduce"), Context(transport.group)
    mine = arrays[comm.rank].copy()

    def exchange(array, stale=False):
        one = accumulated(array, residuals[comm.rank])
        one.may_be_overwritten, one.stale = in_place, stale
        return transport.run(scheme.exchange(one, context))

    for _ in range(2):
        result = exchange(mine)
        assert np.array(result.mean).tobytes() == expected.tobytes()
        assert mine.tobytes() == arrays[comm.rank].tobytes()
        assert (result.nonfinite, result.stale, result.gain) == (False, False, 1.0)
    assert exchange(mine, stale=comm.rank == 1).stale
    if comm.rank == 0:
        mine[-1] = np.nan
    assert exchange(mine).nonfinite
