import itertools

import numpy as np
import pytest
from device.kinds import word_of
from mpicomp.kernels import cpu

FEW = [0, 1, 31, 32, 33]
SIZES = [*itertools.product(FEW, FEW), (1000, 1000), (1000, 0), (1, 1000), (3000, 2500)]
VALUES = [1.0, -1.0, 2.0, 0.0, -0.0, 0.5, -3.0, np.inf, -np.inf, np.nan, 1e30]
MERGES = ["merge_add", "merge_subtract", "intersect"]


def slowly(name, first, first_values, second, second_values):
    left = dict(zip(first.tolist(), first_values, strict=True))
    right = dict(zip(second.tolist(), second_values, strict=True))
    if name == "intersect":
        return {index: left[index] for index in sorted(left.keys() & right.keys())}
    result, zero = {}, first_values.dtype.type(0)
    for index in sorted(left.keys() | right.keys()):
        a, b = left.get(index, zero), right.get(index, zero)
        with np.errstate(invalid="ignore"):
            value = a + b if name == "merge_add" else a - b
        if name == "merge_add" or index not in right or value != 0:
            result[index] = value
    return result


def check_merge(kernels, name, pairs):
    first, second = pairs[0].size, pairs[2].size
    room = min(first, second) if name == "intersect" else first + second
    indices, values = np.full(room, 77, np.uint32), np.full(room, 77, pairs[1].dtype)
    count = getattr(kernels, name)(*(pairs[:3] if name == "intersect" else pairs), indices, values)
    expected = slowly(name, *pairs)
    assert indices[:count].tolist() == list(expected)
    np.testing.assert_array_equal(values[:count], np.array(list(expected.values()), values.dtype))


def pairs_of(sizes, kind, dtype):
    """Two sorted lists of indices with values, among which many cancel, are zero or not finite."""
    rng = np.random.default_rng(sum(sizes))
    most = max(2 * max(sizes), 1)
    first, second = (np.sort(rng.choice(most, size, replace=False)) for size in sizes)
    if kind == "same":
        second = np.sort(np.resize(first, min(sizes)))
    elif kind == "disjoint":
        first, second = 2 * first, 2 * second + 1
    elif kind == "before":
        second = second + most
    elif kind == "after":
        first = first + most
    else:  # with the last index there is, now and then
        first = np.where(first == first.max(initial=0), 2**32 - 1, first)
    pairs = []
    for indices in (first, second):
        pairs += [indices.astype(np.uint32), rng.choice(VALUES, indices.size).astype(dtype)]
    return pairs


@pytest.mark.parametrize("kind", ["mixed", "same", "disjoint", "before", "after"])
@pytest.mark.parametrize("name", MERGES)
def test_merges_of_any_size(kernels, dtype, name, kind):
    for sizes in SIZES:
        check_merge(kernels, name, pairs_of(sizes, kind, dtype))


def test_merges_without_room_are_refused_before_writing(kernels):
    one = np.array([3], np.uint32), np.ones(1, np.float32)
    none = np.empty(0, np.uint32), np.empty(0, np.float32)
    for name in ("merge_add", "merge_subtract"):
        with pytest.raises(ValueError, match=f"{name}: room for 2 elements is needed, got 1"):
            getattr(kernels, name)(*one, *one, np.empty(2, np.uint32), np.empty(1, np.float32))
    with pytest.raises(ValueError, match="intersect: room for 1 elements is needed, got 0"):
        kernels.intersect(*one, one[0], *none)
    for kept in (0, 2):
        with pytest.raises(ValueError, match="split_largest"):
            kernels.split_largest(*one, 1, np.empty(kept, np.uint32), np.empty(kept, np.float32), *none)


def selection_of(size, dtype):
    """Indices with values of which many are equal, and some are not finite."""
    rng = np.random.default_rng(size)
    indices = np.sort(rng.choice(3 * size + 1, size, replace=False)).astype(np.uint32)
    return indices, rng.choice([*VALUES, *range(-9, 9)], size).astype(dtype)


@pytest.mark.parametrize("scalar", [int, np.uint64])
def test_count_reaching(kernels, dtype, scalar):
    for size in (0, 1, 31, 32, 33, 1000, 4096, 4097, 20_000):
        _, values = selection_of(size, dtype)
        words = np.abs(values).view(word_of(dtype))
        for number in (0.0, 1.0, 7.5, np.inf, np.nan):
            bits = cpu.magnitude_bits(number, np.dtype(dtype))
            for threshold in {max(0, bits - 1), bits, bits + 1}:
                assert kernels.count_reaching(values, scalar(threshold)) == np.count_nonzero(words >= threshold)


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 1000, 4096, 4097, 20_000])
def test_split_of_the_largest_and_the_others(kernels, dtype, size):
    scalar = [int, np.uint64][size % 2]
    indices, values = selection_of(size, dtype)
    magnitudes = np.where(np.isnan(values), np.inf, np.abs(values))
    # NaN comes before infinity, and of equal magnitudes the first one.
    order = np.lexsort((np.arange(size), ~np.isnan(values), -magnitudes))
    for k in sorted({0, min(1, size), size // 100, size // 3, max(0, size - 1), size}):
        chosen = np.sort(order[:k])
        others = np.setdiff1d(np.arange(size), chosen)
        threshold = cpu.kth_magnitude(values, k) if k else int(cpu.mask_of(np.dtype(dtype)))
        kept, left = ((np.empty(count, np.uint32), np.empty(count, dtype)) for count in (k, size - k))
        kernels.split_largest(indices, values, scalar(threshold), *kept, *left)
        for (some, of_some), places in ((kept, chosen), (left, others)):
            np.testing.assert_array_equal(some, indices[places])
            np.testing.assert_array_equal(of_some, values[places])


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 1000, 5000])
def test_change_of_the_norm(kernels, dtype, count):
    rng = np.random.default_rng(count)
    array, indices = rng.normal(size=6000).astype(dtype), rng.permutation(6000)[:count].astype(np.uint32)
    sent = array[indices] * rng.choice([1, 0.9, -1], count).astype(dtype)
    change = kernels.norm_change(array, indices, sent)
    before = array[indices].astype(np.float64)
    np.testing.assert_allclose(change, np.sum((before - sent) ** 2 - before**2), rtol=1e-12)
