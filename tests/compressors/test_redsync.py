import numpy as np
import oracle
import pytest
from estimates import AWKWARD, bounded, check_awkward, check_memory_changes_nothing, select, sequences

from mpicomp import Context, RedSync
from mpicomp.errors import ConfigurationError

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


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ratio", [0.0001, 0.01, 1.0])
@pytest.mark.parametrize("search", ["binary", "trimmed"])
def test_awkward_arrays(name, dtype, ratio, search):
    check_awkward(RedSync(ratio=ratio, search=search), name, dtype, ratio)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ratio", [0.001, 0.03])
@pytest.mark.parametrize("search", ["binary", "trimmed"])
def test_memory_changes_nothing(dtype, ratio, search):
    check_memory_changes_nothing(RedSync(ratio=ratio, search=search), 5000, dtype)


def test_float64_sums_that_overflow_end_in_an_exact_selection():
    array = np.linspace(1e307, 1.7e308, 5000)
    indices, _ = select(RedSync(ratio=0.01), array, Context())
    assert indices.tolist() == oracle.largest(array, 50)


def test_an_unknown_search_is_refused():
    with pytest.raises(ConfigurationError, match="redsync: search must be 'binary' or 'trimmed', got 'linear'"):
        RedSync(search="linear")
    with pytest.raises(ConfigurationError, match="redsync: ratio"):
        RedSync(ratio=0)
