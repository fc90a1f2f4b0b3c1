import numpy as np
import oracle
import pytest
from estimates import select, sequences
from marks import slow

from mpicomp import Context, MSTopK
from mpicomp.rounds import Group


def bracket(array, k, samplings):
    """The two thresholds that bisection ends with; None for one that was not reached."""
    magnitudes = np.abs(array.astype(np.float64))
    mean, top = magnitudes.mean(), magnitudes.max()
    low, high = 0.0, 1.0
    lower, upper = None, top
    for _ in range(samplings):
        t = (low + high) / 2
        threshold = mean + t * (top - mean)
        passed = np.count_nonzero(np.abs(array) > array.dtype.type(threshold))
        if passed > k:
            low, lower = t, threshold
        else:
            high, upper = t, threshold
    return lower, upper


@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
@pytest.mark.parametrize("ratio", [0.001, 0.01, slow(0.1), slow(0.5), 1.0])
@pytest.mark.parametrize("samplings", [1, 2, 5, 8, 25])
def test_it_selects_what_the_rule_says(dtype, ratio, samplings):
    k = oracle.kept(ratio, 6000)
    context, runs = Context(seed=1), 0
    for step, array in enumerate(sequences(6000, dtype)):
        context.step = step
        chosen, _ = select(MSTopK(ratio=ratio, samplings=samplings), array, context)
        assert chosen.size == k
        chosen = chosen.tolist()
        if chosen == oracle.largest(array, k):
            continue
        # The rest is a run of what lies between the thresholds.
        lower, upper = (dtype(threshold) for threshold in bracket(array, k, samplings))
        magnitudes = np.abs(array)
        assert np.count_nonzero(magnitudes > lower) <= 8 * k
        above = np.flatnonzero(magnitudes > upper).tolist()
        between = np.flatnonzero((magnitudes > lower) & (magnitudes <= upper)).tolist()
        rest = [index for index in chosen if index not in set(above)]
        assert len(rest) == k - len(above)
        start = between.index(rest[0])
        assert between[start : start + len(rest)] == rest
        runs += 1
    if samplings == 5 and 0.01 <= ratio <= 0.1:
        assert runs, "only the exact selection was seen"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_mstopk_of_25_samplings_is_exact(dtype):
    array = np.random.default_rng(0).permutation(np.linspace(-3, 5, 4000)).astype(dtype)
    for ratio in (0.001, 0.01, 0.1, 0.4):
        k = oracle.kept(ratio, 4000)
        assert select(MSTopK(ratio=ratio), array, Context())[0].tolist() == oracle.largest(array, k)


def test_runs_begin_anywhere():
    array = np.where(np.arange(300) % 3 == 0, 1.0, 0.0).astype(np.float32)
    array[7] = 2.0
    compressor = MSTopK(ratio=50 / 300)
    starts = set()
    for step in range(40):
        indices, _ = select(compressor, array, Context(step=step))
        assert 7 in indices
        starts.add(int(indices[indices != 7][0]))
        assert np.diff(indices[indices != 7]).tolist() == [3] * 48
    assert len(starts) > 10
    one, other = (select(compressor, array, Context(group=Group(rank, rank + 1)))[0].tolist() for rank in (0, 1))
    assert one != other
