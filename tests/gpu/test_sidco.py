"""SIDCo's estimates and selection in one go: in an emulation on the host, and on a GPU where there is one."""

import math

import numpy as np
import pytest
from gpu import standin
from gpu.bounds import next_bound
from mpicomp.kernels import gpu
from mpicomp.kernels.gpu.sidco import gamma_threshold

special = pytest.importorskip("scipy.special", reason="SciPy has the inverse gamma function to compare with")

DTYPES = [np.float32, np.float64]


def pareto(mean, variance, ratio):
    shape = 0.5 * (1 - mean**2 / variance)
    scale = 0.5 * mean * (mean**2 / variance + 1)
    return scale * -math.log(ratio) if abs(shape) < 1e-9 else scale / shape * (ratio**-shape - 1)


def reference(array, ratio, distribution, stages, counted=False):
    """The rule in float64, from its definition; thresholds are numbers of the array's dtype."""
    magnitudes = np.abs(array.astype(np.float64))
    magnitudes = magnitudes[magnitudes > 0]
    if (
        magnitudes.size == 0
        or ratio * array.size >= magnitudes.size
        or magnitudes.var() < 1e-12 * magnitudes.mean() ** 2
    ):
        return 0.0, 0
    wanted = ratio * array.size / magnitudes.size
    single = stages == 1 or wanted >= 0.25
    first = wanted if single else 0.25
    mean, variance = magnitudes.mean(), magnitudes.var()
    if distribution == "exponential":
        threshold = -mean * math.log(first)
    elif distribution == "pareto":
        threshold = pareto(mean, variance, first)
    else:
        s = math.log(mean) - np.log(magnitudes).mean()
        shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
        threshold = mean / shape * special.gammainccinv(shape, first)
    threshold, fitted = float(array.dtype.type(threshold)), 1
    if single:
        return threshold, fitted
    step = (wanted / 0.25) ** (1 / (stages - 1))
    for left in range(stages - 1, 0, -1):
        over = magnitudes[magnitudes > threshold] - threshold
        if over.size < 10 or over.var() < 1e-12 * over.mean() ** 2:
            break
        mean, variance = over.mean(), over.var()
        if counted:
            step = (ratio * array.size / over.size) ** (1 / left)
        more = -mean * math.log(step) if distribution == "exponential" else pareto(mean, variance, step)
        threshold, fitted = float(array.dtype.type(threshold + more)), fitted + 1
    return threshold, fitted


def step(place, gradient, residual, ratio, distribution, stages, state, room, workspace, shift=0, counted=False):
    """One step on copies; checks all that it leaves behind against its own threshold, and gives what it tells."""
    dtype = gradient.dtype.type
    out = place.empty(gradient.size, dtype, shift)
    indices, values = place.zeros(room, np.uint32), place.zeros(room, dtype)
    count = place.zeros(1, np.int64)
    there = place.put(gradient, shift), None if residual is None else place.put(residual)
    before = int(state.get()[0])
    standin.launches.clear()
    with place.quiet():
        told = gpu.sidco(*there, out, ratio, distribution, stages, state, indices, values, count, workspace, counted)
    if place.emulated:
        assert len(standin.launches) == 2 * stages + 2
    with np.errstate(all="ignore"):
        total = gradient if residual is None else gradient + residual
    threshold = told.threshold.item()
    assert threshold == float(dtype(threshold))
    above = np.flatnonzero(~(np.abs(total) <= dtype(threshold)))
    assert told.found.item() == above.size
    taken = above[:room]
    assert count.get()[0] == taken.size
    np.testing.assert_array_equal(indices.get()[: taken.size], taken)
    np.testing.assert_array_equal(values.get()[: taken.size], total[taken])
    assert not indices.get()[taken.size :].any()
    left = total.copy()
    left[taken] = 0
    np.testing.assert_array_equal(out.get(), left)
    assert state.get()[0] == next_bound(workspace, before, told.candidates.item(), above.size, threshold)
    return told


SAMPLES = {
    "laplace": lambda rng, size: rng.laplace(size=size),
    "student": lambda rng, size: rng.standard_t(3, size) * 1e-3,
    "gamma": lambda rng, size: rng.gamma(0.6, size=size) * rng.choice([-1, 1], size) * 1e-6,
    "normal": lambda rng, size: rng.normal(size=size) * 1e3,
    "half zeros": lambda rng, size: rng.laplace(size=size) * (rng.random(size) < 0.5),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", ["exponential", "gamma", "pareto"])
@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("counted", [False, True])
def test_thresholds_are_those_of_the_definition(place, dtype, distribution, sample, counted):
    size = 30_011
    rng = np.random.default_rng(0)
    gradient = SAMPLES[sample](rng, size).astype(dtype)
    workspace = gpu.Workspace(size, size // 10, dtype)
    for ratio, stages in ((0.3, 3), (0.05, 1), (0.05, 2), (0.01, 3), (0.001, 4)):
        state = place.zeros(1, np.uint64)
        expected, fitted = reference(gradient, ratio, distribution, stages, counted)
        hits = []
        for _ in range(2):
            told = step(place, gradient, None, ratio, distribution, stages, state, size, workspace, 0, counted)
            np.testing.assert_allclose(told.threshold.item(), expected, rtol=1e-5, err_msg=f"{ratio} {stages}")
            assert told.stages.item() == fitted
            hits.append(told.hit.item())
        assert told.nonzero.item() == np.count_nonzero(gradient)
        np.testing.assert_allclose(told.energy.item(), np.square(gradient, dtype=np.float64).sum(), rtol=1e-10)
        assert hits[0] == 0
        assert hits[1] == (0 < told.candidates.item() <= workspace.room)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", ["exponential", "gamma", "pareto"])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(
    "kind", ["zeros", "equal", "one", "five", "two values", "nan", "infinite", "subnormal", "huge"]
)
def test_where_nothing_can_be_fitted_there_is_still_a_threshold(place, dtype, distribution, stages, kind):
    size = 5000
    rng = np.random.default_rng(0)
    array = np.zeros(size)
    if kind == "equal":
        array[:] = rng.choice([-0.1, 0.1], size)
    elif kind == "one":
        array[77] = 3
    elif kind == "five":
        array[::1000] = [1, 2, 3, 4, 500]
    elif kind == "two values":
        array[:] = np.where(rng.random(size) < 0.01, 1, 1e-3)
    elif kind in ("nan", "infinite"):
        array[:] = rng.laplace(size=size)
        array[5] = np.nan if kind == "nan" else np.inf
    elif kind == "subnormal":
        array[:] = rng.integers(-900, 900, size) * float(np.finfo(dtype).smallest_subnormal)
    elif kind == "huge":
        array[:] = np.clip(rng.laplace(size=size), -1, 1) * float(np.finfo(dtype).max)
    gradient = array.astype(dtype)
    workspace, state = gpu.Workspace(size, 400, dtype), place.zeros(1, np.uint64)
    for _ in range(2):
        told = step(place, gradient, None, 0.01, distribution, stages, state, 60, workspace)
        threshold = told.threshold.item()
        assert math.isfinite(threshold)
        assert threshold >= 0
        if kind in ("zeros", "equal", "one", "five", "nan", "infinite"):
            assert (threshold, told.stages.item()) == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_feedback_and_room(place, dtype):
    size, room = 20_011, 150
    rng = np.random.default_rng(0)
    workspace, state = gpu.Workspace(size, size // 4, dtype), place.zeros(1, np.uint64)
    residual, clipped = np.zeros(size, dtype), 0
    for _ in range(6):
        gradient = rng.laplace(size=size).astype(dtype)
        told = step(place, gradient, residual, 0.01, "exponential", 2, state, room, workspace, shift=1)
        total = gradient + residual
        above = np.flatnonzero(np.abs(total) > told.threshold.item())
        clipped += above.size > room
        total[above[:room]] = 0
        residual = total
    assert clipped
    assert told.hit.item() == 1


def test_what_does_not_fit_is_refused(place):
    workspace, state = gpu.Workspace(10, 10, np.float32), place.zeros(1, np.uint64)
    array, count = place.zeros(10, np.float32), place.zeros(1, np.int64)
    indices, values = place.zeros(5, np.uint32), place.zeros(5, np.float32)
    with pytest.raises(ValueError, match="exponential, gamma, pareto, got 'normal'"):
        gpu.sidco(array, None, array, 0.1, "normal", 1, state, indices, values, count, workspace)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        gpu.sidco(array, None, array, 0.1, "pareto", 0, state, indices, values, count, workspace)
    other = place.zeros(10, np.float64)
    with pytest.raises(ValueError, match="10 elements of float32, got 10 of float64"):
        gpu.sidco(other, None, other, 0.1, "pareto", 1, state, indices, values, count, workspace)


def test_inverse_of_the_gamma_distribution(place):
    shapes, above = np.meshgrid(
        [0.02, 0.05, 0.2, 0.5, 0.6, 0.99, 1, 1.01, 1.7, 3, 10, 42.5, 300, 5000, 9999, 10001, 1e5, 1e7],
        [0.999, 0.9, 0.75, 0.5, 0.25, 0.11, 0.1, 0.09, 0.01, 1e-3, 1e-4, 1e-6],
    )
    out = place.empty(shapes.size, np.float64)
    gamma_threshold(place.put(shapes.ravel()), place.put(above.ravel()), out)
    expected = special.gammainccinv(shapes.ravel(), above.ravel())
    near = shapes.ravel() <= 1e4
    np.testing.assert_allclose(out.get()[near], expected[near], rtol=1e-9, atol=1e-300)
    np.testing.assert_allclose(out.get()[~near], expected[~near], rtol=1e-6)
