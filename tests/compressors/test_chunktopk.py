import numpy as np
import oracle
import pytest
from worlds import Ranks

from mpicomp import ChunkTopK


@pytest.mark.parametrize("numel", [3, 100, 300, 345])
def test_a_step_sends_the_largest_of_each_chunk_of_the_bucket(numel):
    """Against the definition, over two parameters whose border is inside of a chunk, with what was left before."""
    ranks, ratio, chunk = Ranks(2, ChunkTopK(ratio=0.05, chunk=100)), 0.05, 100
    rng = np.random.default_rng(numel)
    residuals = [np.zeros(numel) for _ in range(2)]
    for _ in range(4):
        gradients = [rng.standard_t(3, numel).astype(np.float32) for _ in range(2)]
        means = ranks.reduce([{"a": own[:2], "b": own[2:]} for own in gradients])
        mean = np.zeros(numel)
        for gradient, residual in zip(gradients, residuals, strict=True):
            residual += gradient
            for start in range(0, numel, chunk):
                part = residual[start : start + chunk]
                for place in oracle.largest(part.astype(np.float32), oracle.kept(ratio, part.size)):
                    mean[start + place] += part[place] / 2
                    part[place] = 0
        found = np.concatenate([means[0]["a"], means[0]["b"]])
        np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("numel", [1, 99, 100, 101, 250])
def test_the_count_is_that_of_all_chunks(numel):
    sizes = [min(100, numel - start) for start in range(0, numel, 100)]
    assert ChunkTopK(ratio=0.034, chunk=100).count(numel) == sum(oracle.kept(0.034, size) for size in sizes)
