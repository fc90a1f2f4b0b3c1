"""SIDCo's estimates and selection in one go: in an emulation on the host, and on a GPU where there is one."""

import math
import sys

import numpy as np
import pytest
from device import emulator
from device.kinds import Outgoing, check_statistics, largest, next_bound
from marks import slow
from mpicomp.kernels import gpu
from mpicomp.kernels.gpu.sidco import sampled_of

import mpicomp
from mpicomp.compressors import sidco as rule
from mpicomp.compressors.accumulated import TRAILER, Accumulated, Piece
from mpicomp.compressors.base_compressor import num_kept
from mpicomp.compressors.context import Context
from mpicomp.compressors.thresholds import Search

DTYPES = [np.float32, slow(np.float64)]
DISTRIBUTIONS = ["exponential", "pareto"]
SAMPLES = {
    "laplace": lambda rng, size: rng.laplace(size=size),
    "student": lambda rng, size: rng.standard_t(3, size) * 1e-3,
    "gamma": lambda rng, size: rng.gamma(0.6, size=size) * rng.choice([-1, 1], size) * 1e-6,
    "normal": lambda rng, size: rng.normal(size=size) * 1e3,
    "half zeros": lambda rng, size: rng.laplace(size=size) * (rng.random(size) < 0.5),
    "two scales": lambda rng, size: rng.laplace(size=size) * np.where(np.arange(size) % 50, 1, 200),
    "crowd": lambda rng, size: np.where(rng.random(size) < 0.5, 1 + 1e-3 * rng.random(size), 0.01 * rng.random(size)),
    "heavy zeros": lambda rng, size: rng.lognormal(0, 3, size) * (rng.random(size) < 0.42),
}


def summed(gradient, residual=None):
    return Accumulated(np.empty(gradient.size + TRAILER, gradient.dtype), residual, [Piece(0, gradient)])


def on_the_cpu(gradient, compressor):
    """Return the threshold, what the stages have reached, and the selected indices."""
    search = Search("sidco", summed(gradient), Context(), num_kept(compressor.ratio, gradient.size))
    estimate = compressor._estimate(search, compressor.stages)
    return *estimate, compressor.select(summed(gradient), Context()).indices


def launches(size, dtype, stages):
    estimating = size >= 2048
    return 8 + (dtype == np.float64) * 3 + estimating * (stages + 5)


def step(place, gradient, residual, ratio, distribution, stages, bound, workspace, shift=0):
    """Select on copies, check all results against the estimated threshold; return the estimate and the indices."""
    dtype, k = gradient.dtype.type, num_kept(ratio, gradient.size)
    room = min(gradient.size, 4 * k + 1024)
    out = place.empty(gradient.size, dtype, shift)
    indices, count = place.zeros(room, np.uint32), place.zeros(1, np.int64)
    message = Outgoing(place, room, gradient.size, gradient.dtype)
    output = gpu.Output(indices, message.values, count, message.form)
    there = place.put(gradient, shift), None if residual is None else place.put(residual)
    before = int(bound.get()[0])
    emulator.launches.clear()
    with place.quiet():
        estimate = gpu.sidco(*there, out, k, distribution, stages, bound, output, workspace, bound)
    if place.emulated:
        assert len(emulator.launches) == launches(gradient.size, dtype, stages)
    with np.errstate(all="ignore"):
        total = gradient if residual is None else gradient + residual
        threshold = dtype(estimate.threshold.item())
    magnitudes = np.abs(total)
    if estimate.exact.item():
        taken = largest(total, min(k, np.count_nonzero(total)))
        threshold = magnitudes[taken].min()
        if np.isnan(magnitudes[taken]).any():
            threshold = np.sort(magnitudes)[total.size - taken.size]
    else:
        taken = np.flatnonzero(magnitudes > threshold)
        assert taken.size <= room
        assert taken.size > 0 or not total.any()
    assert count.get()[0] == taken.size
    np.testing.assert_array_equal(indices.get()[: taken.size], taken)
    message.check(total, taken)
    assert not indices.get()[taken.size :].any()
    np.testing.assert_array_equal(out.get(), total)
    seen = float(place.seen(np.asarray(threshold)))
    assert bound.get()[0] == next_bound(workspace, before, estimate.candidates.item(), taken.size, seen)
    check_statistics(place, estimate, total)
    return estimate, taken


def assert_same_elements(taken, expected, array, threshold):
    """What lies within 1e-5 of the threshold may fall on either side of it."""
    different = np.setxor1d(taken, expected)
    np.testing.assert_allclose(np.abs(array[different].astype(np.float64)), threshold, rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("sample", [name if name == "laplace" else slow(name) for name in SAMPLES])
def test_thresholds_are_those_of_the_cpu(place, dtype, distribution, sample):
    size = 30_011
    gradient = SAMPLES[sample](np.random.default_rng(0), size).astype(dtype)
    workspace = gpu.Workspace(size, size // 10, dtype)
    for ratio, stages in ((0.4, 4), (0.05, 1), (0.05, 2), (0.01, 3), (0.001, 1), (0.001, 4)):
        bound = place.zeros(1, np.uint64)
        compressor = mpicomp.SIDCo(ratio=ratio, distribution=distribution, stages=stages)
        threshold, reached, expected = on_the_cpu(gradient, compressor)
        hits = []
        for _ in range(2):
            estimate, taken = step(place, gradient, None, ratio, distribution, stages, bound, workspace)
            np.testing.assert_allclose(estimate.threshold.item(), threshold, rtol=1e-5, err_msg=f"{ratio} {stages}")
            np.testing.assert_allclose(estimate.reached.item(), reached, rtol=1e-4)
            assert_same_elements(taken, expected, gradient, threshold)
            hits.append(estimate.hit.item())
        assert hits == [0, 0 < estimate.candidates.item() <= workspace.room]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("size", [30_011, 36_864])
def test_a_large_array_is_fitted_by_a_sample(place, dtype, distribution, size, monkeypatch):
    monkeypatch.setattr(sys.modules[sampled_of.__module__], "SAMPLE", 9000)  # the name in the package is the function
    monkeypatch.setattr(rule, "_SAMPLE_NUMEL", 9000)
    gradient = np.random.default_rng(1).standard_t(4, size=size).astype(dtype)
    gradient[::7] = 0
    workspace = gpu.Workspace(size, size // 10, dtype)
    for ratio, stages in ((0.05, 2), (0.001, 3)):
        compressor = mpicomp.SIDCo(ratio=ratio, distribution=distribution, stages=stages)
        threshold, reached, expected = on_the_cpu(gradient, compressor)
        bound = place.zeros(1, np.uint64)
        estimate, taken = step(place, gradient, None, ratio, distribution, stages, bound, workspace, shift=1)
        np.testing.assert_allclose(estimate.threshold.item(), threshold, rtol=1e-5)
        np.testing.assert_allclose(estimate.reached.item(), reached, rtol=1e-4)
        assert_same_elements(taken, expected, gradient, threshold)


def test_corrections_stay_inside_their_brackets(place):
    """A first threshold that nearly fits, and outliers that make the second one far too high."""
    size = 30_000
    array = np.ones(size, np.float32)
    array[:335] = np.linspace(4.97, 5.3, 335)
    array[335:345] = 100
    threshold, _, expected = on_the_cpu(array, mpicomp.SIDCo(ratio=0.01, stages=1))
    workspace, bound = gpu.Workspace(size, 1000, np.float32), place.zeros(1, np.uint64)
    estimate, taken = step(place, array, None, 0.01, "exponential", 1, bound, workspace)
    np.testing.assert_allclose(estimate.threshold.item(), threshold, rtol=1e-5)
    np.testing.assert_array_equal(taken, expected)


AWKWARD = {
    "zeros": lambda rng, dtype: np.zeros(5000),
    "equal": lambda rng, dtype: rng.choice([-0.1, 0.1], 5000),
    "one": lambda rng, dtype: np.where(np.arange(5000) == 77, 3.0, 0.0),
    "five": lambda rng, dtype: np.where(np.arange(5000) % 1000 == 0, np.arange(5000) + 1.0, 0.0),
    "two values": lambda rng, dtype: np.where(rng.random(5000) < 0.01, 1, 1e-3),
    "halves": lambda rng, dtype: np.repeat([1.0, 2.0], 2500),
    "nan": lambda rng, dtype: np.where(np.arange(5000) == 5, np.nan, rng.laplace(size=5000)),
    "infinite": lambda rng, dtype: np.where(np.arange(5000) == 5, -np.inf, rng.laplace(size=5000)),
    "subnormal": lambda rng, dtype: rng.integers(-900, 900, 5000) * float(np.finfo(dtype).smallest_subnormal),
    "largest": lambda rng, dtype: np.full(5000, float(np.finfo(dtype).max)),
    "outlier": lambda rng, dtype: np.where(np.arange(5000) == 17, 1e38, 1e-38),
    "crowded": lambda rng, dtype: np.where(np.arange(5000) < 2000, 2.0, rng.random(5000)),
    "few": lambda rng, dtype: rng.laplace(size=2047),
    "single": lambda rng, dtype: np.array([-5.0]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("distribution", "stages"),
    [("exponential", 1), ("exponential", 3), slow("pareto", 1), ("pareto", 3)],
)
@pytest.mark.parametrize("kind", AWKWARD)
def test_what_cannot_be_estimated_is_selected_exactly(place, dtype, distribution, stages, kind):
    array = AWKWARD[kind](np.random.default_rng(0), dtype).astype(dtype)
    for ratio in (0.004, 1.0) if (stages, distribution) == (3, "pareto") else (0.004,):
        compressor = mpicomp.SIDCo(ratio=ratio, distribution=distribution, stages=stages)
        expected = compressor.select(summed(array), Context()).indices
        workspace, bound = gpu.Workspace(array.size, 400, dtype), place.zeros(1, np.uint64)
        for _ in range(2):
            estimate, taken = step(place, array, None, ratio, distribution, stages, bound, workspace)
            if estimate.exact.item():
                np.testing.assert_array_equal(taken, expected)
            else:
                assert_same_elements(taken, expected, array, estimate.threshold.item())
            if kind in ("zeros", "one", "five", "nan", "infinite", "few", "single") or ratio == 1:
                assert estimate.threshold.item() == 0
                assert math.isnan(estimate.reached.item())
                assert estimate.exact.item() == array.any()


def test_what_does_not_fit_is_refused(place):
    workspace, bound = gpu.Workspace(10, 10, np.float32), place.zeros(1, np.uint64)
    array, count = place.zeros(10, np.float32), place.zeros(1, np.int64)
    output = gpu.Output(place.zeros(10, np.uint32), place.zeros(10, np.float32), count)
    with pytest.raises(ValueError, match="exponential, pareto, got 'normal'"):
        gpu.sidco(array, None, array, 1, "normal", 1, bound, output, workspace, bound)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        gpu.sidco(array, None, array, 1, "pareto", 0, bound, output, workspace, bound)
    other = place.zeros(10, np.float64)
    with pytest.raises(ValueError, match="10 elements of float32, got 10 of float64"):
        gpu.sidco(other, None, other, 1, "pareto", 1, bound, output, workspace, bound)
    for k in (0, 11):
        with pytest.raises(ValueError, match=f"k must be from 1 to 10, got {k}"):
            gpu.sidco(array, None, array, k, "pareto", 1, bound, output, workspace, bound)
    with pytest.raises(ValueError, match="room for 10 elements, got 9"):
        gpu.sidco(
            array, None, array, 1, "pareto", 1, bound, output._replace(indices=output.indices[:9]), workspace, bound
        )
