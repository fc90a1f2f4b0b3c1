import math

import numpy as np
import oracle
import pytest
from estimates import largest_without_zeros, select, sequences
from marks import slow
from worlds import Ranks

from mpicomp import DGC, Context
from mpicomp.rounds import Group


def by_the_rule(array, ratio, sample, context):
    """What the rule selects, from its description and with Python's own sort."""
    n = array.size
    k = oracle.kept(ratio, n)
    size = max(math.ceil(sample * n), math.ceil(2 / ratio))
    if n < 3 * size or k == n:  # where everything is asked for there is nothing to estimate
        return largest_without_zeros(array, k)
    stride = n // size - 1 if n // size % 2 == 0 else n // size
    start = int(np.random.default_rng([context.seed, context.step, context.bucket, context.rank]).integers(stride))
    looked_at = sorted((abs(float(value)) for value in array[start::stride]), reverse=True)
    assert len(looked_at) >= size
    threshold = looked_at[oracle.kept(ratio, len(looked_at)) - 1]
    passed = np.flatnonzero(np.abs(array) > array.dtype.type(threshold))
    for _ in range(10):
        if passed.size >= 0.8 * k:
            break
        threshold *= 0.8
        passed = np.flatnonzero(np.abs(array) > array.dtype.type(threshold))
    if not 0 < passed.size <= k or threshold == 0:
        return largest_without_zeros(array, k)
    return passed.tolist()


@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
@pytest.mark.parametrize("ratio", [0.0001, slow(0.001), 0.01, 0.1, slow(0.5), 1.0])
@pytest.mark.parametrize("sample", [0, 0.01, 0.1, 1])
def test_it_selects_what_the_rule_says(dtype, ratio, sample):
    context, sizes = Context(group=Group(3, 4), seed=1, bucket=2), set()
    for step, array in enumerate(sequences(6001, dtype)):
        context.step = step
        indices, _ = select(DGC(ratio=ratio, sample=sample), array, context)
        assert indices.tolist() == by_the_rule(array, ratio, sample, context)
        assert indices.size <= oracle.kept(ratio, 6001)
        sizes.add(indices.size)
    if 0.001 <= ratio <= 0.1 and sample <= 0.1 and 3 * 2 / ratio < 6001:
        assert sizes - {0, oracle.kept(ratio, 6001)}, "only the exact selection was seen"


def test_what_is_left_back_is_the_smallest():
    """All large elements are at the end, where a cut in the order of indices would drop them."""
    array = np.concatenate((np.full(4900, 1.0), np.linspace(2, 3, 100))).astype(np.float32)
    for step in range(20):
        indices, _ = select(DGC(ratio=0.02), array, Context(step=step))
        assert set(indices) <= set(range(4900, 5000))


def test_ranks_and_steps_look_at_different_samples():
    array = np.random.default_rng(0).laplace(size=30_000).astype(np.float32)
    sizes = [
        select(DGC(ratio=0.01), array, Context(group=Group(rank, rank + 1), step=step))[0].size
        for rank in (0, 1)
        for step in range(8)
    ]
    assert sizes[:8] != sizes[8:]
    assert len(set(sizes)) > 2


def test_the_ratio_falls_over_the_warm_up():
    compressor = DGC(ratio=0.001, warmup_steps=5)
    np.testing.assert_allclose(
        [compressor.ratio_at(step) for step in range(7)],
        [0.31623, 0.1, 0.031623, 0.01, 0.0031623, 0.001, 0.001],
        rtol=1e-4,
    )
    array = np.random.default_rng(0).normal(size=2000).astype(np.float32)
    context = Context()
    for step, k in enumerate([632, 200, 63, 20, 6, 2, 2]):
        context.step = step
        array = np.roll(array, 1)
        assert 0.8 * k <= select(compressor, array, context)[0].size <= k


class Reference:
    """Momentum correction, masking and clipping as the paper has them, with exact selections."""

    def __init__(self, ranks, numel, compressor):
        self.compressor = compressor
        self.u = [np.zeros(numel) for _ in range(ranks)]
        self.v = [np.zeros(numel) for _ in range(ranks)]

    def step(self, gradients):
        """Give the mean, and what entered the accumulators."""
        ranks, settings = len(gradients), self.compressor
        mean, entered = 0, []
        for rank, gradient in enumerate(gradients):
            g = gradient.astype(np.float64)
            if settings.clip is not None:
                g *= min(1.0, settings.clip / math.sqrt(ranks) / math.sqrt(np.sum(g * g)))
            if settings.momentum == 0:
                entering = g
            elif settings.nesterov:
                self.u[rank] = settings.momentum * (self.u[rank] + g)
                entering = self.u[rank] + g
            else:
                self.u[rank] = settings.momentum * self.u[rank] + g
                entering = self.u[rank].copy()
            entered.append(entering)
            self.v[rank] = self.v[rank] + entering
            chosen = oracle.largest(self.v[rank], oracle.kept(settings.ratio, g.size))
            sent = np.zeros(g.size)
            sent[chosen] = self.v[rank][chosen]
            mean = mean + sent / ranks
            self.v[rank][chosen] = 0
            if settings.masking:
                self.u[rank][chosen] = 0
        return mean, entered


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("clip", [None, 3.0, 1e6])
def test_momentum_masking_and_clipping(ranks, momentum, nesterov, masking, clip):
    compressor = DGC(ratio=0.05, momentum=momentum, nesterov=nesterov, masking=masking, clip=clip)
    together, reference = Ranks(ranks, compressor), Reference(ranks, 100, compressor)
    rng = np.random.default_rng(0)
    for _ in range(6):
        gradients = [rng.laplace(size=100) for _ in range(ranks)]
        before = together.residual_sum("w") if reference.v[0].any() else 0.0
        mean, entered = reference.step(gradients)
        means = together.reduce([{"w": gradient} for gradient in gradients])
        for rank in range(ranks):
            np.testing.assert_allclose(means[rank]["w"], mean, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(together.residuals("w")[rank], reference.v[rank], rtol=1e-12, atol=1e-13)
            if momentum:
                velocity = together.reducers[rank].state_dict()["velocities"]["w"]
                np.testing.assert_allclose(velocity, reference.u[rank], rtol=1e-12, atol=1e-13)
        # Nothing of what enters the accumulator is lost.
        np.testing.assert_allclose(
            np.sum(entered, axis=0) + before, ranks * means[0]["w"] + together.residual_sum("w"), rtol=0, atol=1e-12
        )


def test_the_clip_is_over_all_arrays_of_a_rank():
    together = Ranks(1, DGC(ratio=1.0, clip=1.0), bucket_bytes=1)
    [means] = together.reduce([{"a": np.array([3.0, 0.0]), "b": np.array([4.0])}])
    np.testing.assert_allclose(means["a"], [0.6, 0.0], rtol=1e-12)
    np.testing.assert_allclose(means["b"], [0.8], rtol=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_dgc_undone_step_keeps_velocity_and_residual(bad, clip):
    compressor = DGC(ratio=0.05, momentum=0.9, clip=clip)
    together, undisturbed = Ranks(2, compressor, nonfinite="skip"), Ranks(2, compressor)
    rng = np.random.default_rng(0)

    def states():
        states = [reducer.state_dict() for reducer in together.reducers]
        return [state[kind]["w"].tobytes() for state in states for kind in ("residuals", "velocities")]

    for step in range(5):
        gradients = [{"w": rng.laplace(size=100).astype(np.float32)} for _ in range(2)]
        if step == 3:
            before = states()
            broken = [{"w": one["w"].copy()} for one in gradients]
            broken[1]["w"][17] = bad
            means = together.reduce(broken)
            assert not means[0]["w"].any()
            assert states() == before
        means, expected = together.reduce(gradients), undisturbed.reduce(gradients)
        assert means[0]["w"].tobytes() == expected[0]["w"].tobytes()
