import math

import numpy as np
import oracle
import pytest
from worlds import Ranks

from mpicomp import DGC


class Reference:
    """Momentum correction, masking and clipping as the paper has them, with exact selections."""

    def __init__(self, ranks, numel, compressor):
        self.compressor = compressor
        self.u = [np.zeros(numel) for _ in range(ranks)]
        self.v = [np.zeros(numel) for _ in range(ranks)]

    def step(self, gradients):
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
def test_dgc_momentum_masking_and_clipping_are_the_papers(ranks, momentum, nesterov, masking, clip):
    compressor = DGC(ratio=0.05, momentum=momentum, nesterov=nesterov, masking=masking, clip=clip)
    all_ranks, reference = Ranks(ranks, compressor), Reference(ranks, 100, compressor)
    rng = np.random.default_rng(0)
    for _ in range(6):
        gradients = [rng.laplace(size=100) for _ in range(ranks)]
        before = all_ranks.residual_sum("w") if reference.v[0].any() else 0.0
        mean, entered = reference.step(gradients)
        means = all_ranks.reduce([{"w": gradient} for gradient in gradients])
        for rank in range(ranks):
            np.testing.assert_allclose(means[rank]["w"], mean, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(all_ranks.residuals("w")[rank], reference.v[rank], rtol=1e-12, atol=1e-13)
            if momentum:
                velocity = all_ranks.reducers[rank].state_dict()["velocities"]["w"]
                np.testing.assert_allclose(velocity, reference.u[rank], rtol=1e-12, atol=1e-13)
        # Nothing of what enters the accumulator is lost.
        np.testing.assert_allclose(
            np.sum(entered, axis=0) + before, ranks * means[0]["w"] + all_ranks.residual_sum("w"), rtol=0, atol=1e-12
        )


def test_dgc_clips_by_the_norm_of_all_arrays():
    ranks = Ranks(1, DGC(ratio=1.0, clip=1.0), bucket_bytes=1)
    [means] = ranks.reduce([{"a": np.array([3.0, 0.0]), "b": np.array([4.0])}])
    np.testing.assert_allclose(means["a"], [0.6, 0.0], rtol=1e-12)
    np.testing.assert_allclose(means["b"], [0.8], rtol=1e-12)
