import numpy as np
import oracle
import pytest
import scipy.fft
from worlds import Ranks

from mpicomp import DCTTopK

SIDE = 4


def blocks(numel):
    """Start and shape of each square, of the rectangle behind them, and of the row behind that."""
    found, start = [], 0
    while numel - start >= SIDE * SIDE:
        found.append((start, (SIDE, SIDE)))
        start += SIDE * SIDE
    if numel - start >= SIDE:
        found.append((start, ((numel - start) // SIDE, SIDE)))
        start += (numel - start) // SIDE * SIDE
    if numel > start:
        found.append((start, (1, numel - start)))
    return found


def transformed(array, transform):
    out = np.empty(array.size)
    for start, shape in blocks(array.size):
        part = slice(start, start + shape[0] * shape[1])
        out[part] = transform(array[part].reshape(shape), norm="ortho").reshape(-1)
    return out


@pytest.mark.parametrize("numel", [1, 3, 4, 7, 16, 21, 100])
def test_dcttopk_step_is_that_of_the_paper(numel):
    """Momentum that decays, the largest coefficients of scipy's transform, and what is left without them."""
    ratio, decay, size = 0.2, 0.9, 3
    ranks = Ranks(size, DCTTopK(ratio=ratio, side=SIDE), feedback_decay=decay)
    rng = np.random.default_rng(numel)
    memories = [np.zeros(numel) for _ in range(size)]
    for _ in range(4):
        gradients = [rng.normal(size=numel) for _ in range(size)]
        means = ranks.reduce([{"w": gradient} for gradient in gradients])
        mean = np.zeros(numel)
        for gradient, memory in zip(gradients, memories, strict=True):
            memory *= decay
            memory += gradient
            coefficients = transformed(memory, scipy.fft.dctn)
            chosen = np.zeros(numel)
            for start in range(0, numel, SIDE * SIDE):
                part = coefficients[start : start + SIDE * SIDE]
                for place in oracle.largest(part, oracle.kept(ratio, part.size)):
                    chosen[start + place] = part[place]
            mean += chosen / size
            memory -= transformed(chosen, scipy.fft.idctn)
        np.testing.assert_allclose(means[0]["w"], transformed(mean, scipy.fft.idctn), atol=1e-12)
        for rank, memory in enumerate(memories):
            np.testing.assert_allclose(ranks.reducers[rank].residual("w"), memory, atol=1e-12)


def test_dcttopk_warm_up_has_no_dense_step():
    """What is kept back is DeMo's momentum: a dense step would empty it."""
    ranks = Ranks(3, DCTTopK(ratio=1 / 16, side=4), warmup=None)
    rng = np.random.default_rng(0)
    for _ in range(3):
        ranks.reduce([{"w": rng.normal(size=64)}] * 3)
        [bucket] = ranks.reducers[0].last_step.buckets
        assert (bucket.compressor["id"], bucket.collective.partition(":")[0]) == ("dcttopk", "transformed")
        assert ranks.reducers[0].residual("w").any()


def test_correlated_layers_have_one_number():
    ranks = Ranks(1, DCTTopK(ratio=1 / 16, side=4))
    smooth = np.full(32, 3.0, np.float32)
    [mean] = ranks.reduce([{"w": smooth}])
    np.testing.assert_allclose(mean["w"], smooth, rtol=1e-6)
    assert ranks.reducers[0].last_step.buckets[0].gain == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("size", [1e37, 3e38])
def test_dcttopk_near_the_largest_number_delivers_or_skips(size):
    """Of a chunk of the largest numbers the coefficient of the mean is larger than any number."""
    ranks = Ranks(2, DCTTopK(ratio=0.5, side=4), nonfinite="skip")
    numbers = np.full(16, size, np.float32)
    means = ranks.reduce([{"w": numbers}, {"w": numbers}])
    skipped = ranks.reducers[0].last_step.skipped
    assert skipped == (size > 1e38)
    np.testing.assert_allclose(means[0]["w"], 0 if skipped else numbers, rtol=1e-5)
