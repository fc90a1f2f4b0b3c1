import numpy as np
import oracle
import pytest
from estimates import bounded, select, sequences

from mpicomp import Context, RedSync

RATIOS = [0.001, 0.01, 0.1, 0.5, 1.0]


def slow(array, ratio, search):
    """What the rule selects, from its description and in float64."""
    magnitudes = np.abs(array.astype(np.float64))
    k = oracle.kept(ratio, array.size)
    mean, top = magnitudes.mean(), magnitudes.max()
    if not top > mean:
        return bounded(array, 0.0, k)

    def above(t):
        return np.count_nonzero(np.abs(array) > array.dtype.type(mean + t * (top - mean)))

    if search == "trimmed":
        t = 0.8
        while above(t) < k and t > 0:
            t = max(0.0, round(t - 0.2, 1))
        return bounded(array, mean + t * (top - mean), k)
    low, high = 0.0, 1.0
    while high - low > 0.2:
        t = (low + high) / 2
        passed = above(t)
        if k < passed < 2 * k:
            break
        if passed < k / 2:
            high = t
        else:
            low = t
    return bounded(array, mean + t * (top - mean), k)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("search", ["binary", "trimmed"])
def test_it_selects_what_the_rule_says(dtype, ratio, search):
    context, sizes = Context(), set()
    for array in sequences(6000, dtype):
        indices, _ = select(RedSync(ratio=ratio, search=search), array, context)
        assert indices.tolist() == slow(array, ratio, search)
        sizes.add(indices.size)
    if ratio < 0.5:
        assert sizes - {0, oracle.kept(ratio, 6000)}, "only the exact selection was seen"
