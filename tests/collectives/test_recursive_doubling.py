import numpy as np
import oracle
import pytest
from lockstep import run

import mpicomp
from mpicomp.collectives import bind
from mpicomp.transport import LocalWorld


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 12])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("numel", [1, 50])
def test_the_bits_are_those_of_sums_of_pairs(ranks, dtype, numel):
    rng = np.random.default_rng(ranks)
    arrays = [rng.normal(size=numel).astype(dtype) for _ in range(ranks)]
    expected = oracle.doubling_step(arrays)
    for result in run(mpicomp.Dense(), "recursive-doubling", arrays).results:
        assert result.mean.tobytes() == expected.tobytes()


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("segment", [1, 4, 7, 1000])
def test_segments_may_come_in_any_order(ranks, segment):
    rng = np.random.default_rng(ranks)
    arrays = [rng.normal(size=61).astype(np.float32) for _ in range(ranks)]
    expected = oracle.doubling_step(arrays)
    for result in run(mpicomp.Dense(), "recursive-doubling", arrays, segment=segment, stale=[ranks - 1]).results:
        assert result.mean.tobytes() == expected.tobytes()
        assert result.stale
        assert not result.nonfinite


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sum_that_overflows_is_seen_by_all_ranks(ranks, dtype):
    arrays = [np.ones(12, dtype) for _ in range(ranks)]
    for array in arrays:
        array[5] = np.finfo(dtype).max
    for result in run(mpicomp.Dense(), "recursive-doubling", arrays).results:
        assert result.nonfinite == (ranks > 1)
        assert np.isfinite(np.delete(result.mean, 5)).all()


@pytest.mark.parametrize(("ranks", "steps"), [(1, 0), (2, 1), (3, 3), (4, 2), (6, 4), (7, 4), (8, 3)])
def test_steps(ranks, steps):
    scheme = bind(mpicomp.Dense(), "recursive-doubling")
    numel, nbytes = 100, 4 * 104
    sent = []
    for end in LocalWorld(ranks).transports:
        rounds = scheme.rounds(numel, np.dtype(np.float32), end.group)
        assert len(rounds) == steps
        sent.append(sum(task.sent_bytes(end.group) for task in rounds))
    core = 1 << (ranks.bit_length() - 1)
    doublings = core.bit_length() - 1
    for rank, own in enumerate(sent):
        helps = rank + core < ranks
        assert own == nbytes * (1 if rank >= core else doublings + helps)
