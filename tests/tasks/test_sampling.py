import numpy as np
import pytest
from mpicomp.bench.tasks.sampling import Sampler

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_epoch_has_each_sample_at_most_once(ranks):
    sampler = Sampler("t", samples=100, batch=4, seed=3)
    steps = 100 // (4 * ranks)
    for epoch in range(3):
        seen = np.concatenate(
            [sampler.indices(epoch * steps + step, rank, ranks) for step in range(steps) for rank in range(ranks)]
        )
        assert len(np.unique(seen)) == len(seen) == steps * ranks * 4
        assert seen.min() >= 0
        assert seen.max() < 100


def test_ranks_beyond_the_samples_are_refused():
    with pytest.raises(ValueError, match=r"t: 20 training samples are too few for 5 ranks .* at most 4 ranks"):
        Sampler("t", samples=20, batch=5, seed=0).indices(0, 0, 5)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_out_of_range(rank):
    with pytest.raises(ValueError, match=r"t: rank must be in 0\.\.1"):
        Sampler("t", samples=20, batch=5, seed=0).indices(0, rank, 2)
