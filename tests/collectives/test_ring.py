import numpy as np
import oracle
import pytest
from lockstep import run

import mpicomp
from mpicomp.collectives import Context, bind, sendrecv
from mpicomp.compressors.accumulated import TRAILER, Accumulated, Piece
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.rounds import Pending, Round, observe

NUMEL = 61


@pytest.fixture
def halved(monkeypatch):
    """Let parts of arrays of `NUMEL` travel in halves among up to seven ranks."""
    monkeypatch.setattr(sendrecv, "HALF_BYTES", 4)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("segment", [None, 1, 3])
def test_halves_give_the_same_sums(ranks, dtype, segment, halved):
    rng = np.random.default_rng(ranks)
    arrays = [rng.normal(size=NUMEL).astype(dtype) for _ in range(ranks)]
    expected = oracle.ring_step(arrays, behind=0)
    outcome = run(mpicomp.Dense(), "ring", arrays, segment=segment)
    energy = sum(float(np.sum(array.astype(np.float64) ** 2)) for array in arrays)
    for result, accumulated, array in zip(outcome.results, outcome.accumulated, arrays, strict=True):
        assert result.mean.tobytes() == expected.tobytes()
        assert accumulated.tobytes() == array.tobytes()
        assert result.energy == outcome.results[0].energy == pytest.approx(energy, rel=1e-5)
        assert not result.stale
        assert not result.nonfinite


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_flags_with_halves_reach_all(ranks, halved):
    for culprit in range(ranks):
        arrays = [np.ones(NUMEL, np.float32) for _ in range(ranks)]
        for result in run(mpicomp.Dense(), "ring", arrays, stale=[culprit]).results:
            assert result.stale
            assert not result.nonfinite
        arrays[culprit][33] = np.nan
        for result in run(mpicomp.Dense(), "ring", arrays).results:
            assert result.nonfinite
            assert not result.stale


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_halves_are_announced_and_two_are_under_way(ranks, halved):
    world, scheme = LocalWorld(ranks), bind(mpicomp.Dense(), "ring")
    asked = [[] for _ in range(ranks)]
    exchanges = []
    for end, tasks in zip(world.transports, asked, strict=True):
        array = np.ones(NUMEL, np.float32)
        accumulated = Accumulated(np.full(NUMEL + TRAILER, np.nan, np.float32), None, [Piece(0, array)])
        exchanges.append(observe(scheme.exchange(accumulated, Context(group=end.group)), before=tasks.append))
    world.run(exchanges)
    for end, tasks in zip(world.transports, asked, strict=True):
        begun = [task for task in tasks if isinstance(task, Round)]
        expected = scheme.rounds(NUMEL, np.dtype(np.float32), end.group)
        assert [(task.operation, tuple(task.counts), task.peers, task.background) for task in begun] == [
            (task.operation, tuple(task.counts), task.peers, True) for task in expected
        ]
        assert len(begun) == 4 * (ranks - 1) + 1
        sent = sum(task.counts[0] for task in begun if task.operation == "sendrecv")
        assert abs(sent - 2 * (ranks - 1) * NUMEL / ranks) <= 2 * ranks
        waited = [task.task for task in tasks if isinstance(task, Pending)]
        assert sorted(map(id, waited)) == sorted(map(id, begun))
        exchanged = [task.task if isinstance(task, Pending) else task for task in tasks]
        halves = [task for task in exchanged if task.operation == "sendrecv"]
        under_way = set()
        for place, task in enumerate(halves):
            under_way ^= {id(task)}
            assert place < 1 or place == len(halves) - 1 or 1 <= len(under_way) <= 2


def test_first_half_is_accumulated_before_a_send(halved):
    size = 4
    group = LocalWorld(size).transports[1].group
    buffer = np.full(NUMEL + TRAILER, np.nan, np.float32)
    accumulated = Accumulated(buffer, None, [Piece(0, np.ones(NUMEL, np.float32))])
    first = next(bind(mpicomp.Dense(), "ring").exchange(accumulated, Context(group=group)))
    assert first.send.size == np.count_nonzero(~np.isnan(buffer)) == 8
    assert not accumulated.is_computed


def test_short_parts_travel_whole():
    group = LocalWorld(4).transports[0].group
    scheme, single = bind(mpicomp.Dense(), "ring"), np.dtype(np.float32)
    long = 2 * sendrecv.HALF_BYTES  # elements of four bytes: two halves for each of four ranks
    assert [task.background for task in scheme.rounds(long - 1, single, group)] == [False] * 6
    assert [task.background for task in scheme.rounds(long, single, group)] == [True] * 13
