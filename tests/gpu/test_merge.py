"""Merged selections are those of dictionaries and of `mpicomp.kernels.cpu`: in an emulation, and on a GPU."""

import itertools

import numpy as np
import pytest
from gpu import standin
from gpu.alike import assert_alike
from marks import slow
from mpicomp.kernels import cpu, gpu
from mpicomp.kernels.gpu.merge import PART

DTYPES = [np.float32, slow(np.float64)]
FEW = [0, 1, 31, 32, 33]
# Also lists that fill a part just so, and several blocks of parts.
SIZES = [*itertools.product(FEW, FEW), (1000, 1000), (1000, 0), (1, 1000), (PART // 2, PART // 2), (3000, 2500)]
VALUES = [1.0, -1.0, 2.0, 0.0, -0.0, 0.5, -3.0, np.inf, -np.inf, np.nan, 1e30]
MERGES = ["merge_add", "merge_subtract", "intersect"]
KINDS = ["mixed", "same", "apart", "before", "behind"]


@pytest.fixture(params=DTYPES)
def dtype(request):
    return request.param


def selections(sizes, kind, dtype):
    """Two sorted lists of indices with values, among which many cancel, are nothing or no number."""
    rng = np.random.default_rng(sum(sizes))
    most = max(2 * max(sizes), 1)
    first, second = (np.sort(rng.choice(most, size, replace=False)) for size in sizes)
    if kind == "same":
        second = np.resize(first, min(sizes))
        second.sort()
    elif kind == "apart":
        first, second = 2 * first, 2 * second + 1
    elif kind == "before":
        second = second + most
    elif kind == "behind":
        first = first + most
    # The last index that there is, now and then.
    first = np.where(first == first.max(initial=0), 2**32 - 1, first) if kind == "mixed" else first
    pairs = []
    for indices in (first, second):
        pairs += [indices.astype(np.uint32), rng.choice(VALUES, indices.size).astype(dtype)]
    return pairs


def expected(name, first, first_values, second, second_values):
    """Work out the result element by element."""
    own, other = (
        dict(zip(first.tolist(), first_values, strict=True)),
        dict(zip(second.tolist(), second_values, strict=True)),
    )
    nothing = first_values.dtype.type(0)
    if name == "intersect":
        return {index: own[index] for index in np.intersect1d(first, second).tolist()}
    result = {}
    for index in np.union1d(first, second).tolist():
        a, b = own.get(index, nothing), other.get(index, nothing)
        with np.errstate(invalid="ignore"):
            value = a + b if name == "merge_add" else a - b
        if name == "merge_add" or index not in other or value != 0:
            result[index] = value
    return result


def merge(module, name, arrays, indices, values):
    given = arrays[:3] if name == "intersect" else arrays
    return getattr(module, name)(*given, indices, values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MERGES)
def test_merges(place, dtype, name, kind):
    for sizes in SIZES:
        arrays = selections(sizes, kind, dtype)
        room = min(arrays[0].size, arrays[2].size) if name == "intersect" else arrays[0].size + arrays[2].size
        indices, values = place.empty(room, np.uint32), place.empty(room, dtype)
        there = [place.put(array) for array in arrays]
        with place.quiet():
            count = merge(gpu, name, there, indices, values)
        told = expected(name, *arrays)
        assert count.dtype == np.int64
        assert count.item() == len(told)
        np.testing.assert_array_equal(indices.get()[: len(told)], np.array(list(told), np.uint32))
        np.testing.assert_array_equal(values.get()[: len(told)], np.array(list(told.values()), dtype))
        own_indices, own_values = np.empty(room, np.uint32), np.empty(room, dtype)
        assert count.item() == merge(cpu, name, arrays, own_indices, own_values)
        np.testing.assert_array_equal(indices.get()[: len(told)], own_indices[: len(told)])
        assert_alike(values[: len(told)], own_values[: len(told)])


@pytest.mark.parametrize("name", MERGES)
def test_subnormal_numbers_of_one_list_alone_stay(place, name):
    """They are moved and not calculated with, also where a device would take them for zero."""
    arrays = selections((500, 500), "apart" if name != "intersect" else "same", np.float32)
    for array in arrays[1::2]:
        array[::3] = 1e-40
    indices, values = place.empty(1000, np.uint32), place.empty(1000, np.float32)
    there = [place.put(array) for array in arrays]
    with place.flushing():
        count = merge(gpu, name, there, indices, values)
    told = expected(name, *arrays)
    np.testing.assert_array_equal(indices.get()[: count.item()], np.array(list(told), np.uint32))
    np.testing.assert_array_equal(values.get()[: count.item()], np.array(list(told.values()), np.float32))


@pytest.mark.parametrize("name", MERGES)
@pytest.mark.parametrize("seed", range(6))
def test_lists_that_do_not_ascend_touch_nothing_outside(place, name, seed):
    rng = np.random.default_rng(seed)
    first, second = (rng.integers(0, rng.choice([2, 300, 2**32]), size).astype(np.uint32) for size in (700, 300))
    if seed == 0:
        first, second = np.full(700, 5, np.uint32), np.full(300, 5, np.uint32)
    if seed == 1:
        first, second = np.arange(700, 0, -1).astype(np.uint32), np.arange(300, 0, -1).astype(np.uint32)
    room = 300 if name == "intersect" else 1000
    indices, values = place.empty(room, np.uint32), place.empty(room, np.float32)
    arrays = [place.put(array) for array in (first, np.ones(700, np.float32), second, np.ones(300, np.float32))]
    count = merge(gpu, name, arrays, indices, values)
    assert 0 <= count.item() <= room


def test_no_room_is_said_before_anything_is_written(place):
    one = place.put(np.array([3], np.uint32)), place.put(np.ones(1, np.float32))
    none = place.empty(0, np.uint32), place.empty(0, np.float32)
    for name in ("merge_add", "merge_subtract"):
        with pytest.raises(ValueError, match=f"{name}: room for 2 elements is needed, got 1"):
            getattr(gpu, name)(*one, *one, place.empty(2, np.uint32), place.empty(1, np.float32))
    with pytest.raises(ValueError, match="intersect: room for 1 elements is needed, got 0"):
        gpu.intersect(*one, one[0], *none)
    for kept in (0, 2):
        with pytest.raises(ValueError, match="split_largest"):
            gpu.split_largest(*one, 1, place.empty(kept, np.uint32), place.empty(kept, np.float32), *none)


def selection(size, dtype):
    """Indices with values of which many are equal, and some are no numbers."""
    rng = np.random.default_rng(size)
    indices = np.sort(rng.choice(3 * size + 1, size, replace=False)).astype(np.uint32)
    return indices, rng.choice([*VALUES, *range(-9, 9)], size).astype(dtype)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 1000, 4096, 4097, slow(40_000)])
def test_count_reaching(place, dtype, size, on_device):
    _, values = selection(size, dtype)
    there = place.put(values)
    for number in (0.0, 0.5, 1.0, 7.5, np.inf, np.nan):
        bits = cpu.magnitude_bits(number, np.dtype(dtype))
        for threshold in {max(0, bits - 1), bits, bits + 1}:
            given = place.scalar(threshold, np.uint64) if on_device else threshold
            with place.quiet():
                count = gpu.count_reaching(there, given)
            word = np.uint32 if dtype == np.float32 else np.uint64
            assert count.item() == np.count_nonzero(np.abs(values).view(word) >= threshold)
            assert count.item() == cpu.count_reaching(values, threshold)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 1000, 4096, 4097, 20_000])
def test_the_largest_and_the_others(place, dtype, size, on_device):
    indices, values = selection(size, dtype)
    there = place.put(indices), place.put(values)
    magnitudes = np.where(np.isnan(values), np.inf, np.abs(values))
    # Numbers that are none come before infinity, and of equal ones the first one.
    order = np.lexsort((np.arange(size), ~np.isnan(values), -magnitudes))
    for k in sorted({0, min(1, size), size // 100, size // 3, max(0, size - 1), size}):
        chosen = np.sort(order[:k])
        others = np.setdiff1d(np.arange(size), chosen)
        threshold = cpu.kth_magnitude(values, k) if k else int(cpu.mask_of(np.dtype(dtype)))
        given = place.scalar(threshold, np.uint64) if on_device else threshold
        kept = place.empty(k, np.uint32), place.empty(k, dtype)
        left = place.empty(size - k, np.uint32), place.empty(size - k, dtype)
        with place.quiet():
            gpu.split_largest(*there, given, *kept, *left)
        np.testing.assert_array_equal(kept[0].get(), indices[chosen])
        np.testing.assert_array_equal(left[0].get(), indices[others])
        own = [np.empty(array.size, array.dtype) for array in (*kept, *left)]
        cpu.split_largest(indices, values, threshold, *own)
        for array, host in zip((*kept, *left), own, strict=True):
            assert_alike(array, host)


@pytest.mark.parametrize("threshold", [0, 1.0, 2.0, np.inf, 2**31 - 1])
@pytest.mark.parametrize("kept", [0, 1, 500, 1000])
def test_thresholds_that_do_not_fit_touch_nothing_outside(place, threshold, kept):
    indices, values = selection(1000, np.float32)
    bits = threshold if isinstance(threshold, int) else cpu.magnitude_bits(threshold, np.dtype(np.float32))
    gpu.split_largest(
        place.put(indices), place.put(values), bits, place.empty(kept, np.uint32), place.empty(kept, np.float32),
        place.empty(1000 - kept, np.uint32), place.empty(1000 - kept, np.float32),
    )  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 1000, 5000])
def test_change_of_the_norm(place, dtype, count):
    rng = np.random.default_rng(count)
    array, indices = rng.normal(size=6000).astype(dtype), rng.permutation(6000)[:count].astype(np.uint32)
    sent = array[indices] * rng.choice([1, 0.9, -1], count).astype(dtype)
    arrays = [place.put(own) for own in (array, indices, sent)]
    with place.quiet():
        change = gpu.norm_change(*arrays)
        again = gpu.norm_change(*arrays)
    assert change.dtype == np.float64
    assert change.item() == again.item()
    before = array[indices].astype(np.float64)
    reference = np.sum((before - sent) ** 2 - before**2)
    np.testing.assert_allclose(change.item(), reference, rtol=1e-12)
    np.testing.assert_allclose(change.item(), cpu.norm_change(array, indices, sent), rtol=1e-12)


def test_what_changes_nothing_gives_zero(joining_place):
    """Also where products and sums are joined."""
    place = joining_place
    array = np.random.default_rng(0).normal(size=300)
    indices = np.arange(300).astype(np.uint32)
    for sent in (np.zeros(300), 2 * array):
        change = gpu.norm_change(place.put(array), place.put(indices), place.put(sent))
        assert change.item() == 0


def test_an_index_out_of_range_counts_as_nothing(place):
    array, sent = np.array([1, 3, 4], np.float32), np.array([-1, 9, 4], np.float32)
    indices = np.array([0, 2**32 - 1, 2], np.uint32)
    assert gpu.norm_change(place.put(array), place.put(indices), place.put(sent)).item() == -13.0


def test_launches(place):
    if not place.emulated:
        pytest.skip("launches are counted in the emulation")
    arrays = [place.put(array) for array in selections((500, 400), "mixed", np.float32)]
    out = place.empty(900, np.uint32), place.empty(900, np.float32)
    kept = place.empty(100, np.uint32), place.empty(100, np.float32)
    left = place.empty(400, np.uint32), place.empty(400, np.float32)
    for launches, name, *rest in (
        (["count_parts", "write_parts"], "merge_add", *arrays, *out),
        (["count_parts", "write_parts"], "merge_subtract", *arrays, *out),
        (["count_parts", "write_parts"], "intersect", *arrays[:3], *out),
        (["count_tiles"], "count_reaching", arrays[1], 5),
        (["count_tiles", "split_tiles"], "split_largest", *arrays[:2], 5, *kept, *left),
        (["norm_change"], "norm_change", out[1], arrays[2], arrays[3]),
    ):
        before = len(standin.launches)
        getattr(gpu, name)(*rest)
        assert standin.launches[before:] == launches
