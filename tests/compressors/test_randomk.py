from itertools import pairwise

import numpy as np
import pytest
from worlds import Ranks

from mpicomp import BlockRandomK, Context, RandomK
from mpicomp.rounds import Group

BOTH = [RandomK, BlockRandomK]


def positions(compressor, numel, rank=0, **where):
    out = np.full(compressor.count(numel), 2**32 - 1, np.uint32)
    compressor.positions(numel, Context(group=Group(rank, rank + 1), **where), out)
    return out.astype(np.int64)


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("numel", [1, 2, 3, 10, 997, 200_000])
@pytest.mark.parametrize("ratio", [1e-9, 0.01, 0.3, 0.7, 1.0])
def test_positions_ascend_without_repetition(cls, numel, ratio):
    for step in range(20):
        drawn = positions(cls(ratio=ratio), numel, step=step)
        assert (np.diff(drawn) > 0).all()
        assert drawn[0] >= 0
        assert drawn[-1] < numel


@pytest.mark.parametrize("cls", BOTH)
def test_randomk_positions_differ_by_step_and_not_by_rank(cls):
    compressor = cls(ratio=0.01)
    first = positions(compressor, 5000, rank=0, step=4, bucket=1, seed=2)
    assert positions(compressor, 5000, rank=7, step=4, bucket=1, seed=2).tolist() == first.tolist()
    for other in ({"step": 5}, {"bucket": 2}, {"seed": 3}):
        assert positions(compressor, 5000, **({"step": 4, "bucket": 1, "seed": 2} | other)).tolist() != first.tolist()


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize(("numel", "ratio"), [(23, 0.2), (23, 0.9), (64, 0.25), (7, 1e-6)])
def test_every_element_is_sent_as_often_as_it_should(cls, numel, ratio):
    compressor, steps = cls(ratio=ratio), 4000
    counts = np.zeros(numel)
    for step in range(steps):
        counts[positions(compressor, numel, step=step)] += 1
    k = compressor.count(numel)
    share = np.full(numel, k / numel)
    if cls is RandomK:  # one of each part
        ends = [j * numel // k for j in range(k + 1)]
        for start, stop in pairwise(ends):
            share[start:stop] = 1 / (stop - start)
            assert counts[start:stop].sum() == steps
    deviation = np.sqrt(steps * share * (1 - share))
    assert (np.abs(counts - steps * share) <= 4 * deviation).all()


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize(("numel", "ratio"), [(23, 0.2), (50, 0.04), (31, 0.8), (1, 1.0)])
def test_scaled_values_are_right_on_the_average(cls, numel, ratio):
    compressor, draws = cls(ratio=ratio, scaled=True), 2000
    array = np.random.default_rng(0).normal(size=numel)
    sums, squares = np.zeros(numel), np.zeros(numel)
    for step in range(draws):
        delivered = np.zeros(numel)
        drawn = positions(compressor, numel, step=step)
        delivered[drawn] = array[drawn] * compressor.weights(numel)
        sums += delivered
        squares += delivered**2
    mean = sums / draws
    error = np.sqrt(np.maximum(squares / draws - mean**2, 0) / draws)
    assert (np.abs(mean - array) <= 4 * error + 1e-12).all()


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("collective", ["allreduce", "scatter-reduce"])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_mean_of_all_ranks_arrives_at_the_positions(cls, collective, scaled):
    compressor = cls(ratio=0.1, scaled=scaled)
    together = Ranks(3, compressor, collective, seed=5)
    rng = np.random.default_rng(0)
    residuals = [np.zeros(77) for _ in range(3)]
    for step in range(1, 9):  # the first call takes a step too
        gradients = [rng.normal(size=77) for _ in range(3)]
        means = together.reduce([{"w": gradient} for gradient in gradients])
        drawn = positions(compressor, 77, step=together.reducers[0].last_step.step, seed=5)
        if not scaled:
            gradients = [gradient + residual for gradient, residual in zip(gradients, residuals, strict=True)]
        expected = np.zeros(77)
        expected[drawn] = (np.mean(gradients, axis=0)[drawn]) * compressor.weights(77)
        for rank in range(3):
            np.testing.assert_allclose(means[rank]["w"], expected, rtol=1e-12, atol=1e-14, err_msg=str(step))
            if not scaled:
                residuals[rank] = gradients[rank].copy()
                residuals[rank][drawn] = 0
            np.testing.assert_allclose(together.residuals("w")[rank], residuals[rank], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("cls", BOTH)
def test_no_index_travels(cls):
    together = Ranks(2, cls(ratio=0.25))
    gradient = np.ones(1000, np.float32)
    for _ in range(2):
        together.reduce([{"w": gradient}] * 2)
    [bucket] = together.reducers[0].last_step.buckets
    dense = Ranks(2, "dense")
    for _ in range(2):
        dense.reduce([{"w": np.ones(250, np.float32)}] * 2)
    assert bucket.sent_bytes == dense.reducers[0].last_step.buckets[0].sent_bytes
    assert cls(ratio=0.25).wire_bytes_per_element(4) == 1
    assert cls(ratio=0.25, wire="bf16").wire_bytes_per_element(4) == 0.5


def test_parts_of_the_longest_array_there_is():
    numel = 2**32 - 1
    compressor = RandomK(ratio=150_000 / numel)
    drawn, k = positions(compressor, numel), compressor.count(numel)
    assert k == 150_000
    assert drawn[-1] < numel
    for j in (0, 1, 65_535, 65_536, 99_999, k - 1):
        assert j * numel // k <= drawn[j] < (j + 1) * numel // k
    assert RandomK(ratio=1.0, scaled=True).weights(5).tolist() == [1] * 5


def test_a_block_goes_on_at_the_beginning():
    seen = {tuple(positions(BlockRandomK(ratio=0.4), 10, step=step)) for step in range(200)}
    assert seen == {tuple(sorted((start + j) % 10 for j in range(4))) for start in range(10)}
