"""Error feedback with exact top-k in one go: in an emulation on the host, and on a GPU where there is one."""

import sys

import numpy as np
import pytest
from device import emulator
from device.kinds import Outgoing, check_statistics, largest, magnitude_words, next_bound, word_of
from marks import slow
from mpicomp.kernels import cpu, gpu

DTYPES = [np.float32, slow(np.float64)]
LAUNCHES = {np.float32: 6, np.float64: 9}


def bits_of(value, dtype):
    return cpu.magnitude_bits(float(value), np.dtype(dtype))


def step(place, gradient, residual, bound, k, workspace, shift=0):
    """Select on copies, check all results, and return the statistics."""
    dtype = gradient.dtype.type
    out = place.empty(gradient.size, dtype, shift)
    indices, message = place.empty(k, np.uint32), Outgoing(place, k, gradient.size, gradient.dtype)
    output = gpu.Output(indices, message.values, message=message.form)
    there = place.put(gradient, shift), None if residual is None else place.put(residual)
    before = int(bound.get()[0])
    emulator.launches.clear()
    with place.quiet():
        stats = gpu.topk(*there, out, bound, output, workspace, bound)
    if place.emulated:
        assert len(emulator.launches) == LAUNCHES[dtype]
    with np.errstate(all="ignore"):
        total = gradient if residual is None else gradient + residual
    expected = largest(total, k)
    np.testing.assert_array_equal(indices.get(), expected)
    message.check(total, expected)
    np.testing.assert_array_equal(out.get().view(word_of(dtype)), total.view(word_of(dtype)))
    smallest = np.sort(magnitude_words(total))[total.size - k]
    assert stats.threshold.item() == smallest
    candidates = stats.candidates.item()
    seen = float(place.seen(smallest.view(dtype)))
    following = next_bound(workspace, before, candidates, k, seen)
    assert bound.get()[0] == following or (np.isnan(seen) and bound.get()[0] > bits_of(np.inf, dtype))
    check_statistics(place, stats, total)
    return stats


def test_the_next_bound_goes_where_it_is_wanted(place):
    array, k = np.random.default_rng(0).laplace(size=9001).astype(np.float32), 90
    workspaces = [gpu.Workspace(array.size, 4 * k, np.float32) for _ in range(2)]
    bound, following, in_place = (place.zeros(1, np.uint64) for _ in range(3))
    output = gpu.Output(place.empty(k, np.uint32), place.empty(k, np.float32))
    for _ in range(2):
        before, out = bound.get()[0], place.empty(array.size, np.float32)
        gpu.topk(place.put(array), None, out, bound, output, workspaces[0], following)
        assert bound.get()[0] == before
        gpu.topk(place.put(array), None, out, in_place, output, workspaces[1], in_place)
        assert following.get()[0] == in_place.get()[0] > 0
        bound, following = following, bound


@pytest.mark.parametrize("kernel", ["histogram", "count_tiles", "write_tiles"])
def test_a_call_that_raised_leaves_nothing_for_the_next(place, kernel, monkeypatch):
    rng = np.random.default_rng(0)
    gradient, residual = rng.laplace(size=(2, 50_021)).astype(np.float32)
    k = 500
    workspace = gpu.Workspace(gradient.size, gradient.size, np.float32)  # room for candidates of two calls
    bound = place.put(np.zeros(1, np.uint64))
    step(place, gradient, residual, bound, k, workspace)  # from now on there is a bound, and candidates are listed
    module = sys.modules[gpu.kth_magnitude.__module__]
    launch = module.launch

    def fail(source, name, *arguments):
        if name == kernel:
            raise MemoryError("between two launches")
        launch(source, name, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, "launch", fail)
        with pytest.raises(MemoryError):
            step(place, gradient, residual, bound, k, workspace)
    step(place, gradient, residual, bound, k, workspace)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "part"), [(1, 1), (31, 0), (31, 0.3), (4096, 0.3), (4096, 1), (4097, 0.01), (50_021, 0), (50_021, 0.3)]
)
def test_with_every_kind_of_bound(place, dtype, size, part):
    rng = np.random.default_rng(size)
    gradient, residual = rng.laplace(size=(2, size)).astype(dtype)
    k = max(1, int(part * size))
    workspace = gpu.Workspace(size, 4 * k, dtype)
    magnitudes = np.sort(np.abs(gradient + residual))
    kth = magnitudes[size - k]
    bounds = {
        "none": (0, 0),
        "good": (bits_of(0.9 * kth, dtype), None),
        "exact": (bits_of(kth, dtype), 1),
        "too high": (bits_of(kth, dtype) + 1, 0),
        "beyond all": (bits_of(np.inf, dtype), 0),
        "lowest": (1, int(np.count_nonzero(magnitudes) <= workspace.room)),
    }
    for name, (bits, hit) in bounds.items():
        bound = place.put(np.array([bits], np.uint64))
        stats = step(place, gradient, residual, bound, k, workspace)
        candidates = 0 if bits == 0 else np.count_nonzero(magnitudes >= np.array(bits, word_of(dtype)).view(dtype))
        assert stats.candidates.item() == candidates, name
        assert hit is None or stats.hit.item() == hit, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [300, 30])
def test_the_bound_becomes_one_that_serves(place, dtype, k):
    size = 30_011
    rng = np.random.default_rng(0)
    workspace, bound = gpu.Workspace(size, 4 * k, dtype), place.zeros(1, np.uint64)
    residual, hits = np.zeros(size, dtype), []
    for _ in range(200):  # so that much is left, close below the threshold
        residual += rng.laplace(size=size).astype(dtype)
        residual[np.argpartition(np.abs(residual), size - k)[size - k :]] = 0
    for _ in range(12):
        gradient = rng.laplace(size=size).astype(dtype)
        hits.append(step(place, gradient, residual, bound, k, workspace).hit.item())
        residual += gradient
        residual[largest(residual, k)] = 0
    assert hits[:2] == [0, 0]
    assert all(hits[-6:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["tied", "zeros", "equal", "few", "subnormal", "special", "clustered", "sorted"])
def test_inputs_that_are_not_smooth(place, dtype, kind):
    size = 9001
    rng = np.random.default_rng(0)
    tiny = float(np.finfo(dtype).smallest_subnormal)
    array = {
        "tied": lambda: np.round(rng.laplace(size=size, scale=2)),
        "zeros": lambda: np.where(rng.random(size) < 0.5, -0.0, 0.0),
        "equal": lambda: rng.choice([-1.5, 1.5], size),
        "few": lambda: np.where(rng.random(size) < 0.002, rng.normal(size=size), -0.0),
        "subnormal": lambda: rng.integers(-900, 900, size) * tiny,
        "special": lambda: rng.choice([0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1, 1e-40, 3e38], size),
        "clustered": lambda: np.where(np.arange(size) // 1000 == 3, 100, 1) * rng.laplace(size=size),
        "sorted": lambda: np.sort(rng.laplace(size=size)),
    }[kind]().astype(dtype)
    for k in (1, 90, 4000, size):
        workspace, bound = gpu.Workspace(size, 4 * k, dtype), place.zeros(1, np.uint64)
        for _ in range(2):
            step(place, array, None, bound, k, workspace)


@pytest.mark.parametrize("dtype", DTYPES)
def test_addresses_that_are_not_multiples_of_16(place, dtype):
    gradient, residual = np.random.default_rng(0).laplace(size=(2, 9001)).astype(dtype)
    workspace, bound = gpu.Workspace(9001, 400, dtype), place.zeros(1, np.uint64)
    assert step(place, gradient, residual, bound, 100, workspace, shift=1).hit.item() == 0
    assert step(place, gradient, residual, bound, 100, workspace, shift=1).hit.item() == 1


def test_what_does_not_fit_is_refused(place):
    workspace, bound = gpu.Workspace(100, 10, np.float32), place.zeros(1, np.uint64)
    array = place.zeros(100, np.float32)
    output = gpu.Output(place.empty(101, np.uint32), place.empty(101, np.float32))
    with pytest.raises(ValueError, match="from 1 to 100, got 101"):
        gpu.topk(array, None, array, bound, output, workspace, bound)
    with pytest.raises(ValueError, match="100 elements of float32, got 99"):
        gpu.topk(array[1:], None, array[1:], bound, output, workspace, bound)
    with pytest.raises(ValueError, match="below 2\\*\\*32"):
        gpu.Workspace(2**32, 10, np.float32)
