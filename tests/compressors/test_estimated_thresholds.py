"""Sparsifiers that estimate a threshold or have a fixed one, against their rules in float64."""

import math

import numpy as np
import oracle
import pytest
from estimates import (
    AWKWARD,
    bounded,
    check_awkward,
    check_memory_changes_nothing,
    largest_without_zeros,
    select,
    sequences,
)
from marks import slow
from worlds import Ranks

from mpicomp import DGC, Context, GaussianK, MSTopK, RedSync, SIDCo, Threshold, TopK, get_compressor
from mpicomp.mpi.rounds import Group

NUMEL = 6001
# Two-sided quantiles of the normal distribution, from a table.
QUANTILES = {0.001: 3.2905267315, 0.01: 2.5758293035, 0.1: 1.6448536270, 0.5: 0.6744897502, 1.0: 0.0}


def passed(array, threshold):
    return np.count_nonzero(np.abs(array) > array.dtype.type(threshold))


def gaussiank(compressor, array, context):
    k = oracle.kept(compressor.ratio, array.size)
    threshold = QUANTILES[compressor.ratio] * np.sqrt(np.mean(np.square(array.astype(np.float64))))
    for _ in range(3):
        if passed(array, threshold) < 2 * k / 3:
            threshold /= 2
        elif passed(array, threshold) > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return bounded(array, threshold, k)


def redsync(compressor, array, context):
    magnitudes, k = np.abs(array.astype(np.float64)), oracle.kept(compressor.ratio, array.size)
    mean, top = magnitudes.mean(), magnitudes.max()
    if not top > mean:
        return bounded(array, 0.0, k)
    if compressor.search == "trimmed":
        t = 0.8
        while passed(array, mean + t * (top - mean)) < k and t > 0:
            t = max(0.0, round(t - 0.2, 1))
        return bounded(array, mean + t * (top - mean), k)
    low, high = 0.0, 1.0
    while high - low > 0.2:
        t = (low + high) / 2
        count = passed(array, mean + t * (top - mean))
        if k < count < 2 * k:
            break
        low, high = (low, t) if count < k / 2 else (t, high)
    return bounded(array, mean + t * (top - mean), k)


def dgc(compressor, array, context):
    n, ratio, k = array.size, compressor.ratio, oracle.kept(compressor.ratio, array.size)
    size = max(math.ceil(compressor.sample * n), math.ceil(2 / ratio))
    if n < 3 * size or k == n:  # an exact selection
        return largest_without_zeros(array, k)
    stride = n // size - 1 if n // size % 2 == 0 else n // size
    start = int(np.random.default_rng([context.seed, context.step, context.bucket, context.rank]).integers(stride))
    sample = sorted((abs(float(value)) for value in array[start::stride]), reverse=True)
    assert len(sample) >= size
    threshold = sample[oracle.kept(ratio, len(sample)) - 1]
    for _ in range(10):
        if passed(array, threshold) >= 0.8 * k:
            break
        threshold *= 0.8
    if not 0 < passed(array, threshold) <= k or threshold == 0:
        return largest_without_zeros(array, k)
    return np.flatnonzero(np.abs(array) > array.dtype.type(threshold)).tolist()


# Compressor, its rule, and whether the rule has to select other numbers of elements than k.
RULES = [
    *((GaussianK(ratio=ratio), gaussiank, ratio < 1) for ratio in QUANTILES),
    *((RedSync(ratio=r, search=s), redsync, r < 0.5) for r in QUANTILES for s in ("binary", "trimmed")),
    *(
        (DGC(ratio=r, sample=s), dgc, 0.001 <= r <= 0.1 and s <= 0.1 and 3 * 2 / r < NUMEL)
        for r, s in [(1e-4, 0), (0.001, 1), (0.01, 0.01), (0.01, 0.1), (0.1, 0), (0.1, 0.1), (0.5, 0.01), (1.0, 0.1)]
    ),
]


@pytest.mark.parametrize(
    ("compressor", "rule", "estimates", "dtype"),
    [(*case, np.float32) for case in RULES] + [slow(*case, np.float64) for case in RULES],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_estimator_selects_what_its_rule_says(compressor, rule, estimates, dtype):
    context, sizes = Context(group=Group(3, 4), seed=1, bucket=2), set()
    k = oracle.kept(compressor.ratio, NUMEL)
    for context.step, array in enumerate(sequences(NUMEL, dtype)):
        indices, _ = select(compressor, array, context)
        assert indices.tolist() == rule(compressor, array, context)
        sizes.add(indices.size)
    assert rule is not dgc or max(sizes) <= k
    assert not estimates or sizes - {0, k}, "only the exact selection was seen"


def bracket(array, k, samplings):
    """The two thresholds that bisection ends with; None for one that was not reached."""
    magnitudes = np.abs(array.astype(np.float64))
    mean, top = magnitudes.mean(), magnitudes.max()
    low, high, lower, upper = 0.0, 1.0, None, top
    for _ in range(samplings):
        t = (low + high) / 2
        threshold = mean + t * (top - mean)
        if passed(array, threshold) > k:
            low, lower = t, threshold
        else:
            high, upper = t, threshold
    return lower, upper


@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
@pytest.mark.parametrize(
    ("samplings", "ratio"), [(1, 0.01), (2, 0.001), (5, 0.01), slow(5, 0.1), slow(8, 0.5), (8, 1.0), (25, 0.001)]
)
def test_mstopk_selects_a_run_between_thresholds(dtype, ratio, samplings):
    k = oracle.kept(ratio, NUMEL)
    context, runs = Context(seed=1), 0
    for context.step, array in enumerate(sequences(NUMEL, dtype)):
        chosen = select(MSTopK(ratio=ratio, samplings=samplings), array, context)[0].tolist()
        assert len(chosen) == k
        if chosen == oracle.largest(array, k):
            continue
        lower, upper = (dtype(threshold) for threshold in bracket(array, k, samplings))
        magnitudes = np.abs(array)
        assert np.count_nonzero(magnitudes > lower) <= 8 * k
        above = set(np.flatnonzero(magnitudes > upper).tolist())
        between = np.flatnonzero((magnitudes > lower) & (magnitudes <= upper)).tolist()
        rest = [index for index in chosen if index not in above]
        assert len(rest) == k - len(above)
        start = between.index(rest[0])
        assert between[start : start + len(rest)] == rest
        runs += 1
    if samplings == 5 and 0.01 <= ratio <= 0.1:
        assert runs, "only the exact selection was seen"


def test_mstopk_runs_begin_anywhere():
    array = np.where(np.arange(300) % 3 == 0, 1.0, 0.0).astype(np.float32)
    array[7] = 2.0
    compressor, starts = MSTopK(ratio=50 / 300), set()
    for step in range(40):
        indices, _ = select(compressor, array, Context(step=step))
        assert 7 in indices
        starts.add(int(indices[indices != 7][0]))
        assert np.diff(indices[indices != 7]).tolist() == [3] * 48
    assert len(starts) > 10
    one, other = (select(compressor, array, Context(group=Group(rank, rank + 1)))[0].tolist() for rank in (0, 1))
    assert one != other


ESTIMATORS = [
    (DGC, {}, [5e-324, 0.0001, 0.01, 1.0], [0.005, 0.03]),
    (GaussianK, {}, [5e-324, 0.01, 1.0], [0.001, 0.03]),
    (MSTopK, {}, [0.0001, 0.01, 1.0], [0.001, 0.03]),
    (MSTopK, {"samplings": 6}, [], [0.03]),
    (MSTopK, {"samplings": 3}, [], [0.1]),
    (RedSync, {"search": "binary"}, [0.0001, 0.01, 1.0], [0.001, 0.03]),
    (RedSync, {"search": "trimmed"}, [0.0001, 0.01, 1.0], [0.001, 0.03]),
    *((SIDCo, {"distribution": name}, [0.001, 0.05, 1.0], []) for name in ("exponential", "gamma", "pareto")),
    *((SIDCo, {"distribution": name, "stages": 3}, [], [0.01]) for name in ("exponential", "gamma", "pareto")),
    (TopK, {}, [0.01, 0.5, 1.0], [0.001, 0.03]),
]
dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
@pytest.mark.parametrize(
    "compressor", [cls(ratio=ratio, **settings) for cls, settings, ratios, _ in ESTIMATORS for ratio in ratios], ids=str
)
def test_estimator_of_an_awkward_array_stays_bounded(compressor, dtype):
    for name in AWKWARD:
        check_awkward(compressor, name, dtype, 12 if compressor.id == "sidco" else 3)


@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
@pytest.mark.parametrize(
    "compressor",
    [
        *(cls(ratio=ratio, **settings) for cls, settings, _, ratios in ESTIMATORS for ratio in ratios),
        Threshold(limit=1.5),
    ],
    ids=str,
)
def test_estimator_selects_the_same_with_any_memory(compressor, dtype):
    check_memory_changes_nothing(compressor, 5000, dtype)


@pytest.mark.parametrize(("name", "least"), [("gaussiank", 1e200), ("mstopk", 1e307), ("redsync", 1e307)])
def test_estimator_whose_sums_overflow_selects_exactly(name, least):
    array = np.linspace(least, 1.7e308 if least > 1e300 else 1e300, 5000)
    chosen = select(get_compressor({"id": name, "ratio": 0.01}), array, Context())[0].tolist()
    assert chosen == oracle.largest(array, 50)


@dtypes
@pytest.mark.parametrize("limit", [0.0, 1e-42, 1e-6, 0.7, 2.0, 1e30, 1e300])
def test_threshold_selects_what_reaches_the_limit(dtype, limit):
    context = Context()
    for array in sequences(2000, dtype):
        array[[5, 77, 1999]] = [min(limit, 1e38), -min(limit, 1e38), np.nextafter(dtype(min(limit, 1e38)), dtype(0))]
        with np.errstate(over="ignore"):
            expected = np.flatnonzero((np.abs(array) >= dtype(limit)) & (array != 0))
        assert select(Threshold(limit=limit), array, context)[0].tolist() == expected.tolist()


def test_threshold_sends_what_adds_up_to_the_limit():
    ranks, sums = Ranks(2, Threshold(limit=1.0)), np.zeros(4)
    for _ in range(3):
        sums += ranks.reduce([{"w": np.array([0.375, -2.0, 0.0, 0.01], np.float32)}] * 2)[0]["w"]
    np.testing.assert_array_equal(sums, [1.125, -6.0, 0.0, 0.0])
