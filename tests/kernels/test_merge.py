import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import slow
from mpicomp.kernels import cpu

DTYPES = [np.float32, slow(np.float64)]
GUARD = 4

numbers = st.integers(-3, 3).map(float) | st.sampled_from([0.5, -1e30, np.inf, -np.inf, np.nan])
selections = st.dictionaries(st.integers(0, 30) | st.integers(2**32 - 5, 2**32 - 1), numbers, max_size=25)


def arrays(selection, dtype):
    indices = sorted(selection)
    return np.array(indices, np.uint32), np.array([selection[index] for index in indices], dtype)


class Guarded:
    """Room for a result, with elements around it that nobody may write to."""

    def __init__(self, size, dtype):
        self._indices = np.full(size + 2 * GUARD, 77, np.uint32)
        self._values = np.full(size + 2 * GUARD, 77, dtype)
        self.indices, self.values = (memory[GUARD : GUARD + size] for memory in (self._indices, self._values))

    def read(self, count):
        for memory in (self._indices, self._values):
            assert (memory[:GUARD] == 77).all()
            assert (memory[memory.size - GUARD :] == 77).all()
        return self.indices[:count].tolist(), self.values[:count].tolist()


def same(got, indices, values):
    assert got[0] == indices
    np.testing.assert_array_equal(got[1], values)  # NaN equals NaN here


@pytest.mark.parametrize("dtype", DTYPES)
@given(first=selections, second=selections)
def test_union(first, second, dtype):
    out = Guarded(len(first) + len(second), dtype)
    count = cpu.merge_add(*arrays(first, dtype), *arrays(second, dtype), out.indices, out.values)
    indices = sorted(first.keys() | second.keys())
    with np.errstate(invalid="ignore"):
        values = [dtype(first.get(index, 0)) + dtype(second.get(index, 0)) for index in indices]
    same(out.read(count), indices, values)


@pytest.mark.parametrize("dtype", DTYPES)
@given(first=selections, second=selections)
def test_difference_leaves_out_what_became_nothing(first, second, dtype):
    out = Guarded(len(first) + len(second), dtype)
    count = cpu.merge_subtract(*arrays(first, dtype), *arrays(second, dtype), out.indices, out.values)
    expected = dict(first)
    for index, value in second.items():
        with np.errstate(invalid="ignore"):
            expected[index] = dtype(first.get(index, 0)) - dtype(value)
        if expected[index] == 0:
            del expected[index]
    indices = sorted(expected)
    same(out.read(count), indices, [dtype(expected[index]) for index in indices])


@pytest.mark.parametrize("dtype", DTYPES)
@given(first=selections, second=selections)
def test_common_part(first, second, dtype):
    out = Guarded(min(len(first), len(second)), dtype)
    count = cpu.intersect(*arrays(first, dtype), arrays(second, dtype)[0], out.indices, out.values)
    indices = sorted(first.keys() & second.keys())
    same(out.read(count), indices, [dtype(first[index]) for index in indices])


@pytest.mark.parametrize("dtype", DTYPES)
@given(selection=selections.filter(bool), data=st.data())
def test_the_largest_and_the_others(selection, data, dtype):
    indices, values = arrays(selection, dtype)
    k = data.draw(st.integers(1, indices.size))

    def order(place):
        magnitude = abs(values[place])
        return (not np.isnan(magnitude), -np.nan_to_num(magnitude, posinf=np.inf), place)

    places = sorted(range(indices.size), key=order)
    kept, left = sorted(places[:k]), sorted(places[k:])
    out, rest = Guarded(k, dtype), Guarded(indices.size - k, dtype)
    threshold = cpu.kth_magnitude(values, k)
    cpu.split_largest(indices, values, threshold, out.indices, out.values, rest.indices, rest.values)
    same(out.read(k), indices[kept].tolist(), values[kept])
    same(rest.read(indices.size - k), indices[left].tolist(), values[left])
    assert cpu.count_reaching(values, threshold) >= k > cpu.count_reaching(values, threshold + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_selections(dtype):
    rng = np.random.default_rng(0)
    first, second = (np.unique(rng.integers(0, 10**6, size)).astype(np.uint32) for size in (200_000, 70_000))
    a, b = rng.normal(size=first.size).astype(dtype), rng.normal(size=second.size).astype(dtype)
    out = Guarded(first.size + second.size, dtype)
    union, at_a, at_b = np.union1d(first, second), np.zeros(10**6, dtype), np.zeros(10**6, dtype)
    at_a[first], at_b[second] = a, b
    same(out.read(cpu.merge_add(first, a, second, b, out.indices, out.values)), union.tolist(), (at_a + at_b)[union])
    count = cpu.merge_subtract(first, a, second, b, out.indices, out.values)
    same(out.read(count), union.tolist(), (at_a - at_b)[union])
    count = cpu.intersect(second, b, first, out.indices, out.values)
    common = np.intersect1d(first, second)
    same(out.read(count), common.tolist(), at_b[common])


@pytest.mark.parametrize("dtype", DTYPES)
def test_change_of_the_norm(dtype):
    rng = np.random.default_rng(0)
    array, indices = rng.normal(size=50).astype(dtype), np.array([0, 7, 49], np.uint32)
    sent = rng.normal(size=3).astype(dtype)
    left = array.astype(np.float64)
    left[indices] -= sent
    expected = np.sum(left**2) - np.sum(np.square(array.astype(np.float64)))
    np.testing.assert_allclose(cpu.norm_change(array, indices, sent), expected, rtol=1e-12)


def test_no_room_is_said_before_anything_is_written():
    one = np.array([3], np.uint32), np.ones(1, np.float32)
    nothing = np.empty(0, np.uint32), np.empty(0, np.float32)
    for name in ("merge_add", "merge_subtract"):
        with pytest.raises(ValueError, match="room for 2 elements"):
            getattr(cpu, name)(*one, *one, np.empty(2, np.uint32), np.empty(1, np.float32))
    with pytest.raises(ValueError, match="room for 1 elements"):
        cpu.intersect(*one, one[0], *nothing)
    for kept in (0, 2):
        room = np.empty(kept, np.uint32), np.empty(kept, np.float32)
        with pytest.raises(ValueError, match="split_largest"):
            cpu.split_largest(*one, cpu.kth_magnitude(one[1], 1), *room, *nothing)
