"""Random-k and its kin: positions that ranks share."""

from itertools import pairwise

import numpy as np
import pytest
from lockstep import dense, gradients, run
from worlds import Ranks

from mpicomp import BlockRandomK, Context, GlobalRandKMaxNorm, RandomK
from mpicomp.mpi.rounds import Group

RANDOM = pytest.mark.parametrize("cls", [RandomK, BlockRandomK])


def positions(compressor, numel, rank=0, **where):
    out = np.full(compressor.count(numel), 2**32 - 1, np.uint32)
    compressor.positions(numel, Context(group=Group(rank, rank + 1), **where), out)
    return out.astype(np.int64)


@pytest.mark.parametrize("cls", [RandomK, BlockRandomK, GlobalRandKMaxNorm])
def test_positions_differ_by_step_bucket_and_seed_only(cls):
    where = {"step": 4, "bucket": 1, "seed": 2}
    first = positions(cls(ratio=0.01), 5000, rank=0, **where).tolist()
    assert positions(cls(ratio=0.01), 5000, rank=7, **where).tolist() == first
    for other in ({"step": 5}, {"bucket": 2}, {"seed": 3}):
        assert positions(cls(ratio=0.01), 5000, **(where | other)).tolist() != first


@RANDOM
@pytest.mark.parametrize(("numel", "ratio"), [(23, 0.2), (23, 0.9), (64, 0.25), (7, 1e-6)])
def test_randomk_sends_every_element_as_often_as_stated(cls, numel, ratio):
    compressor, steps = cls(ratio=ratio), 4000
    counts = np.zeros(numel)
    for step in range(steps):
        counts[positions(compressor, numel, step=step)] += 1
    k = compressor.count(numel)
    share = np.full(numel, k / numel)
    if cls is RandomK:  # one of each part
        for start, stop in pairwise([j * numel // k for j in range(k + 1)]):
            share[start:stop] = 1 / (stop - start)
            assert counts[start:stop].sum() == steps
    deviation = np.sqrt(steps * share * (1 - share))
    assert (np.abs(counts - steps * share) <= 4 * deviation).all()


@RANDOM
@pytest.mark.parametrize("collective", ["allreduce", "scatter-reduce"])
def test_randomk_delivers_the_mean_at_the_positions(cls, collective):
    compressor = cls(ratio=0.1)
    ranks, rng = Ranks(3, compressor, collective, seed=5), np.random.default_rng(0)
    residuals = np.zeros((3, 77))
    for _ in range(8):
        gradients = rng.normal(size=(3, 77))
        means = ranks.reduce([{"w": gradient} for gradient in gradients])
        drawn = positions(compressor, 77, step=ranks.reducers[0].last_step.step, seed=5)
        accumulated = gradients + residuals
        expected = np.zeros(77)
        expected[drawn] = accumulated.mean(axis=0)[drawn]
        residuals = accumulated
        residuals[:, drawn] = 0
        for rank in range(3):
            np.testing.assert_allclose(means[rank]["w"], expected, rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(ranks.residuals("w")[rank], residuals[rank], rtol=1e-12, atol=1e-14)


def test_randomk_parts_of_the_longest_array():
    numel = 2**32 - 1
    compressor = RandomK(ratio=150_000 / numel)
    drawn, k = positions(compressor, numel), compressor.count(numel)
    assert k == 150_000
    assert drawn[-1] < numel
    for j in (0, 1, 65_535, 65_536, 99_999, k - 1):
        assert j * numel // k <= drawn[j] < (j + 1) * numel // k


def test_blockrandomk_continues_at_the_first_element():
    seen = {tuple(positions(BlockRandomK(ratio=0.4), 10, step=step)) for step in range(200)}
    assert seen == {tuple(sorted((start + j) % 10 for j in range(4))) for start in range(10)}


@pytest.mark.parametrize("collective", ["two-phase", "packed-allgather"])
def test_values_in_eight_bits_are_rounded_and_zero_elsewhere(collective):
    compressor = GlobalRandKMaxNorm(ratio=0.05)
    arrays = gradients(3, 1000, np.float32)
    results = run(compressor, collective, arrays, step=3).results
    selected = positions(compressor, 1000, step=3)
    elsewhere = np.setdiff1d(np.arange(1000), selected)
    for result in results:
        assert result.mean.tobytes() == results[0].mean.tobytes()
        assert not result.mean[elsewhere].any()
        assert not dense(result.sent, 1000)[elsewhere].any()
        assert result.kept == selected.size == 50
    step = max(np.abs(array[selected]).max() for array in arrays) / 127
    error = np.abs(results[0].mean[selected] - np.mean([array[selected] for array in arrays], axis=0))
    assert error.max() <= step * (1.0 if collective == "two-phase" else 0.5) * 1.001  # rounded twice or once
