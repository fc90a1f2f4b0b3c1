import numpy as np
import oracle
import pytest
from lockstep import run

import mpicomp
from mpicomp.collectives import bind
from mpicomp.transport import LocalWorld


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("numel", [1, 3, 50])
def test_the_bits_are_those_of_sums_in_ring_order(ranks, dtype, numel):
    rng = np.random.default_rng(ranks)
    arrays = [rng.normal(size=numel).astype(dtype) for _ in range(ranks)]
    expected = oracle.ring_step(arrays)
    for result in run(mpicomp.Dense(), "ring", arrays).results:
        assert result.mean.tobytes() == expected.tobytes()


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("segment", [1, 4, 7, 1000])
def test_segments_may_come_in_any_order(ranks, segment):
    rng = np.random.default_rng(ranks)
    arrays = [rng.normal(size=61).astype(np.float32) for _ in range(ranks)]
    expected = oracle.ring_step(arrays)
    for result in run(mpicomp.Dense(), "ring", arrays, segment=segment, stale=[0]).results:
        assert result.mean.tobytes() == expected.tobytes()
        assert result.stale
        assert not result.nonfinite


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sum_that_overflows_is_seen_by_all_ranks(ranks, dtype):
    for place in range(12):
        arrays = [np.ones(12, dtype) for _ in range(ranks)]
        for array in arrays:
            array[place] = np.finfo(dtype).max
        for result in run(mpicomp.Dense(), "ring", arrays).results:
            assert result.nonfinite == (ranks > 1)
            assert np.isfinite(np.delete(result.mean, place)).all()


def test_squares_that_overflow_are_finite_numbers():
    arrays = [np.full(5, 1e200) for _ in range(3)]
    for result in run(mpicomp.Dense(), "ring", arrays).results:
        assert not result.nonfinite
        np.testing.assert_allclose(result.mean, 1e200)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_rank_sends_what_a_ring_must(ranks):
    numel = 8 * 105 - 4  # with four numbers behind it, in parts of one length
    scheme = bind(mpicomp.Dense(), "ring")
    for end in LocalWorld(ranks).transports:
        rounds = scheme.rounds(numel, np.dtype(np.float32), end.group)
        assert len(rounds) == 2 * (ranks - 1)
        least = 2 * (ranks - 1) * (numel + 4) * 4
        np.testing.assert_allclose(sum(task.sent_bytes(end.group) for task in rounds), least / ranks)
        assert all(task.peers == ((end.group.rank + 1) % ranks, (end.group.rank - 1) % ranks) for task in rounds)
