import numpy as np
import oracle
import pytest
from estimates import bounded, select, sequences

from mpicomp import Context, GaussianK

# Two-sided quantiles of the normal distribution, from a table.
QUANTILES = {0.001: 3.2905267315, 0.01: 2.5758293035, 0.1: 1.6448536270, 0.5: 0.6744897502, 1.0: 0.0}


def slow(array, ratio):
    """What the rule selects, from its description and in float64."""
    k = oracle.kept(ratio, array.size)
    threshold = QUANTILES[ratio] * np.sqrt(np.mean(np.square(array.astype(np.float64))))
    for _ in range(3):
        passed = np.count_nonzero(np.abs(array) > array.dtype.type(threshold))
        if passed < 2 * k / 3:
            threshold /= 2
        elif passed > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return bounded(array, threshold, k)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ratio", QUANTILES)
def test_it_selects_what_the_rule_says(dtype, ratio):
    context, sizes = Context(), set()
    for array in sequences(6000, dtype):
        indices, _ = select(GaussianK(ratio=ratio), array, context)
        assert indices.tolist() == slow(array, ratio)
        sizes.add(indices.size)
    if ratio < 1:
        assert sizes - {0, oracle.kept(ratio, 6000)}, "only the exact selection was seen"


def test_normal_data_needs_no_correction():
    array = np.random.default_rng(5).normal(size=100_000)
    for ratio in (0.001, 0.01, 0.1):
        indices, _ = select(GaussianK(ratio=ratio), array, Context())
        assert abs(indices.size - ratio * array.size) < 5 * np.sqrt(ratio * array.size)


def test_the_smallest_ratio_there_is():
    array = np.random.default_rng(5).normal(size=1000).astype(np.float32)
    indices, _ = select(GaussianK(ratio=5e-324), array, Context())
    assert indices.tolist() == oracle.largest(array, 1)
