"""Kernels give what `mpicomp.kernels.cpu` gives: in an emulation on the host, and on a GPU where there is one."""

import numpy as np
import pytest
from gpu import standin
from marks import slow
from mpicomp.kernels import cpu, gpu

DTYPES = [np.float32, slow(np.float64)]
# One element, less and more than a warp, a tile and its neighbours for each dtype, several tiles.
SIZES = [0, 1, 33, 1000, 2048, 4095, 4096, 4097, 30_011]
TOLERANCE = {"rtol": 1e-6, "atol": 1e-9}


@pytest.fixture(params=DTYPES)
def dtype(request):
    return request.param


def word(dtype):
    return np.uint32 if dtype == np.float32 else np.uint64


def special(dtype, size=5000):
    """Numbers of all magnitudes, and those that are none."""
    rng = np.random.default_rng(0)
    array = np.ldexp(rng.normal(size=size), rng.integers(-140, 120, size)).astype(dtype)
    few = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-42, 65504.0, 65520.0, 6e-8, 2.9e-8, 3e38]
    places = rng.choice(size, 4 * len(few), replace=False)
    array[places] = np.array(few * 4).astype(dtype)
    return array


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 1])
def test_sum_and_moments(place, dtype, size, shift):
    rng = np.random.default_rng(size)
    gradient, residual = rng.laplace(size=(2, size)).astype(dtype)
    gradient[::7] = residual[::7] = 0
    out = place.empty(size, dtype, shift)
    with place.quiet():
        moments = gpu.accumulate(place.put(gradient), place.put(residual, shift), out)
    total = gradient + residual
    np.testing.assert_array_equal(out.get(), total)
    magnitudes = np.abs(total.astype(np.float64))
    assert moments.nonzero.item() == np.count_nonzero(total)
    np.testing.assert_allclose(moments.total.item(), magnitudes.sum(), rtol=1e-12)
    np.testing.assert_allclose(moments.energy.item(), np.square(magnitudes).sum(), rtol=1e-12)
    assert moments.finite.item()
    ours = cpu.accumulate(gradient, residual, np.empty(size, dtype))
    with place.quiet():
        twice = moments + moments
    for told, expected in ((moments, ours), (twice, ours + ours)):
        for name in cpu.Moments._fields:
            np.testing.assert_allclose(
                getattr(told, name).item(), getattr(expected, name), rtol=1e-5, atol=1e-5 * size, err_msg=name
            )


def test_no_residual_and_in_place(place, dtype):
    array = np.random.default_rng(0).normal(size=5000).astype(dtype)
    out = place.put(array)
    gpu.accumulate(out, None, out)
    np.testing.assert_array_equal(out.get(), array)
    gpu.accumulate(place.put(array), out, out)
    np.testing.assert_array_equal(out.get(), array + array)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 4097, 4999])
def test_one_bad_element_is_seen(place, dtype, bad, where):
    array = np.ones(5000, dtype)
    array[where] = bad
    there = place.put(array)
    moments = gpu.accumulate(there, None, place.empty(5000, dtype))
    assert not moments.finite.item()
    assert not (gpu.accumulate(place.put(np.ones(5, dtype)), None, place.empty(5, dtype)) + moments).finite.item()
    assert not np.isfinite(gpu.logarithms(there)[2].item())
    assert not gpu.is_finite(gpu.scale(there, 2), dtype).item()
    assert gpu.is_finite(gpu.scale(place.put(np.ones(5, dtype)), 2), dtype).item()


def test_momentum_has_the_bits_of_the_host(joining_place, dtype):
    rng = np.random.default_rng(0)
    gradient, velocity = rng.normal(size=(2, 5000)).astype(dtype)
    for nesterov in (False, True):
        after, out = joining_place.empty(5000, dtype), joining_place.empty(5000, dtype)
        gpu.momentum(joining_place.put(gradient), 0.3, joining_place.put(velocity), 0.9, nesterov, after, out)
        factor, decay = dtype(0.3), dtype(0.9)
        now = decay * (velocity + factor * gradient) if nesterov else decay * velocity + factor * gradient
        np.testing.assert_array_equal(after.get(), now)
        np.testing.assert_array_equal(out.get(), now + factor * gradient if nesterov else now)


def test_logarithms_of_the_smallest_and_the_largest(place, dtype):
    info = np.finfo(dtype)
    array = np.array([info.smallest_subnormal, -info.tiny, info.max, 0, -0.0, 1, -info.max], dtype)
    nonzero, _, logarithm = gpu.logarithms(place.put(array))
    seen = place.seen(array)
    expected = np.log(np.abs(seen[seen != 0]).astype(np.float64)).sum()
    np.testing.assert_allclose(logarithm.item(), expected, rtol=1e-12)
    assert nonzero.item() == 5


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("on_device", [False, True])
def test_candidates_are_ascending_and_all(place, dtype, size, on_device):
    rng = np.random.default_rng(size)
    gradient, residual = rng.normal(size=(2, size)).astype(dtype)
    bound = cpu.magnitude_bits(1.5, np.dtype(dtype))
    room = size + 2
    index, bits = place.zeros(room, np.uint32), place.zeros(room, word(dtype))
    out, given, start = place.empty(size, dtype), bound, 2
    if on_device:
        given, start = place.scalar(bound, np.uint64), place.scalar(2, np.int64)
    gradient_there, residual_there = place.put(gradient), place.put(residual)
    with place.quiet():
        found, moments = gpu.accumulate_candidates(gradient_there, residual_there, out, given, 7, index, bits, start)
    own_index, own_bits = np.zeros(room, np.uint32), np.zeros(room, word(dtype))
    expected, ours = cpu.accumulate_candidates(
        gradient, residual, np.empty(size, dtype), bound, 7, own_index, own_bits, 2
    )
    assert found.item() == expected
    np.testing.assert_array_equal(index.get(), own_index)
    np.testing.assert_array_equal(bits.get(), own_bits)
    np.testing.assert_array_equal(out.get(), gradient + residual)
    np.testing.assert_allclose(moments.energy.item(), ours.energy, rtol=1e-5)


@pytest.mark.parametrize("bound", [0, 1])
def test_candidates_that_do_not_fit_are_counted_and_not_written(place, dtype, bound):
    size, room = 5000, 700
    array = np.random.default_rng(0).normal(size=size).astype(dtype)
    index, bits = place.zeros(room + 10, np.uint32), place.zeros(room + 10, word(dtype))
    found, _ = gpu.accumulate_candidates(
        place.put(array), None, place.empty(size, dtype), bound, 0, index[:room], bits[:room], 5
    )
    assert found.item() == size + 5
    np.testing.assert_array_equal(index.get()[5:room], np.arange(room - 5))
    np.testing.assert_array_equal(bits.get()[5:room].view(dtype), np.abs(array[: room - 5]))
    assert not index.get()[room:].any()
    assert not bits.get()[:5].any()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 1])
def test_whole_array_sweeps(place, dtype, size, shift):
    rng = np.random.default_rng(size)
    exact, rounded, array, sent = rng.normal(size=(4, size)).astype(dtype)
    np.testing.assert_allclose(gpu.energy(place.put(array, shift)).item(), cpu.energy(array), rtol=1e-10)

    there, here = place.put(array, shift), array.copy()
    top = gpu.scale(there, 0.3)
    assert top.item() == cpu.scale(here, 0.3)
    np.testing.assert_array_equal(there.get(), here)

    there, here = place.put(sent, shift), sent.copy()
    growth = gpu.share_rounding(place.put(exact), place.put(rounded, shift), 3, place.put(array), there)
    expected = cpu.share_rounding(exact, rounded, 3, array, here)
    np.testing.assert_allclose(growth.item(), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(there.get(), here, rtol=1e-5, atol=1e-5)

    for nesterov in (False, True):
        after, out = place.empty(size, dtype), place.empty(size, dtype, shift)
        gpu.momentum(place.put(exact, shift), 0.5, place.put(rounded), 0.9, nesterov, after, out)
        own_after, own_out = np.empty(size, dtype), np.empty(size, dtype)
        cpu.momentum(exact, 0.5, rounded, 0.9, nesterov, own_after, own_out)
        np.testing.assert_allclose(after.get(), own_after, **TOLERANCE)
        np.testing.assert_allclose(out.get(), own_out, rtol=1e-5, atol=1e-6)


def test_scale_by_a_number_on_the_device(place, dtype):
    array = place.put(np.array([2, np.nan], dtype))
    with place.quiet():
        top = gpu.scale(array, place.scalar(0.5, np.float64))
    assert not cpu.is_finite(top.item(), np.dtype(dtype))
    assert array.get()[0] == 1
    ones = place.put(np.array([1, 2], dtype))
    assert gpu.scale(ones, np.inf).item() == cpu.magnitude_bits(np.inf, np.dtype(dtype))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threshold", [0.0, 0.7, 2.5, 1e3])
def test_tail_and_selection_above(place, dtype, size, threshold):
    array = np.random.default_rng(size).laplace(size=size).astype(dtype)
    array[::11] = 0
    array[1::11] = dtype(threshold)  # not above
    there = place.put(array)
    for given in (threshold, place.scalar(threshold, np.float64)):
        with place.quiet():
            tail = gpu.tail(there, given)
        expected = cpu.tail(array, threshold)
        assert tail.count.item() == expected.count
        np.testing.assert_allclose(tail.excess.item(), expected.excess, rtol=1e-5)
        np.testing.assert_allclose(tail.squares.item(), expected.squares, rtol=1e-5)
        over = np.abs(array[np.abs(array) > dtype(threshold)].astype(np.float64)) - float(dtype(threshold))
        np.testing.assert_allclose(tail.excess.item(), over.sum(), rtol=1e-12)

        room = size // 2 + 3
        indices, values = place.zeros(room, np.uint32), place.zeros(room, dtype)
        own_indices, own_values = np.zeros(room, np.uint32), np.zeros(room, dtype)
        start = place.scalar(3, np.int64) if given is not threshold else 3
        with place.quiet():
            found = gpu.select_above(there, given, 10, indices, values, start)
        assert found.item() == cpu.select_above(array, threshold, 10, own_indices, own_values, 3)
        np.testing.assert_array_equal(indices.get(), own_indices)
        np.testing.assert_array_equal(values.get(), own_values)


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 30_011])
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("shift", [0, 1])
def test_every_so_many_groups(place, dtype, size, stride, shift):
    array = np.random.default_rng(size).laplace(size=size).astype(dtype)
    array[::5] = 0
    there = place.put(array, shift)
    with place.quiet():
        tail = gpu.tail(there, 1.0, stride)
        nonzero, total, logarithm = gpu.logarithms(there, stride)
    seen = np.abs(array[np.arange(size) // 1024 % stride == 0].astype(np.float64))
    over = seen[seen > 1] - 1
    assert (tail.count.item(), nonzero.item()) == (over.size, np.count_nonzero(seen))
    np.testing.assert_allclose([tail.excess.item(), tail.squares.item()], [over.sum(), (over**2).sum()], rtol=1e-12)
    np.testing.assert_allclose(total.item(), seen.sum(), rtol=1e-12)
    np.testing.assert_allclose(logarithm.item(), np.log(seen[seen > 0]).sum(), rtol=1e-12, atol=1e-12 * size)
    ours = *cpu.tail(array, 1.0, stride), *cpu.logarithms(array, stride)
    told = (*(x.item() for x in tail), nonzero.item(), total.item(), logarithm.item())
    np.testing.assert_allclose(told, ours, rtol=1e-5, atol=1e-6 * size)


@pytest.mark.parametrize("size", [0, 1, 4097, 30_011])
@pytest.mark.parametrize("shift", [0, 1])
def test_counts_above_several_thresholds(place, dtype, size, shift):
    array = np.random.default_rng(size).laplace(size=size).astype(dtype)
    array[::11], array[1::11] = np.nan, 2.5
    thresholds = [2.5, 0.0, 0.7, 1e3, 3.0, 1e-3, 5.0, 2.0, 1.0, 0.1]
    with place.quiet():
        counts = gpu.counts_above(place.put(array, shift), thresholds)
    expected = [int(np.sum(~(np.abs(array) <= dtype(threshold)))) for threshold in thresholds]
    assert [int(count.item()) for count in counts] == expected == cpu.counts_above(array, thresholds)


def test_nan_is_above_every_threshold(place, dtype):
    array = np.array([1, np.nan, 5, np.inf], dtype)
    assert gpu.tail(place.put(array), 2.0).count.item() == cpu.tail(array, 2.0).count == 3
    indices, values = place.zeros(4, np.uint32), place.zeros(4, dtype)
    assert gpu.select_above(place.put(array), 2.0, 0, indices, values, 0).item() == 3
    assert indices.get().tolist() == [1, 2, 3, 0]


def largest(array, k):
    """Indices of the k largest magnitudes by a stable sort of their bits."""
    bits = array.view(word(array.dtype)) & np.iinfo(word(array.dtype)).max // 2
    return np.sort(np.argsort(-bits.astype(np.int64), kind="stable")[:k]).astype(np.uint32)


@pytest.mark.parametrize("size", [1, 33, 4097, 30_011])
@pytest.mark.parametrize("kind", ["spread", "tied", "special"])
def test_exact_selection(place, dtype, size, kind):
    rng = np.random.default_rng(size)
    array = rng.laplace(size=size).astype(dtype)
    if kind == "tied":
        array = np.round(array).astype(dtype)
    elif kind == "special":
        array = special(dtype, max(size, 100))[:size]
    there = place.put(array)
    for k in {1, max(1, size // 100), size}:
        indices, values = place.empty(k, np.uint32), place.empty(k, dtype)
        with place.quiet():
            threshold = gpu.kth_magnitude(there, k)
            gpu.select_largest(there, threshold, indices, values)
        assert threshold.item() == cpu.kth_magnitude(array, k)
        np.testing.assert_array_equal(indices.get(), largest(array, k))
        np.testing.assert_array_equal(values.get().view(word(dtype)), array[largest(array, k)].view(word(dtype)))


@pytest.mark.parametrize("size", [1, 33, 4097, 30_011])
def test_selection_from_a_list(place, dtype, size):
    array = np.round(np.random.default_rng(size).laplace(size=size, scale=9)).astype(dtype)
    index = np.flatnonzero(np.abs(array) >= 5).astype(np.uint32)
    index = index if index.size else np.zeros(1, np.uint32)
    bits = np.abs(array[index]).view(word(dtype))
    k = -(-index.size // 3)
    there = place.put(index), place.put(bits), place.put(array)
    indices, values = place.empty(k, np.uint32), place.empty(k, dtype)
    with place.quiet():
        threshold = gpu.select_candidates(there[0], there[1], None, there[2], indices, values)
    own_indices, own_values = np.empty(k, np.uint32), np.empty(k, dtype)
    assert threshold.item() == cpu.select_candidates(index, bits, bits.copy(), array, own_indices, own_values)
    np.testing.assert_array_equal(indices.get(), own_indices)
    np.testing.assert_array_equal(values.get(), own_values)

    indices, values = place.zeros(index.size, np.uint32), place.zeros(index.size, dtype)
    own_indices, own_values = np.zeros(index.size, np.uint32), np.zeros(index.size, dtype)
    found = gpu.select_listed(there[0], there[1], 7.0, there[2], indices, values)
    assert found.item() == cpu.select_listed(index, bits, 7.0, array, own_indices, own_values)
    np.testing.assert_array_equal(indices.get(), own_indices)
    np.testing.assert_array_equal(values.get(), own_values)


@pytest.mark.parametrize("order", ["ascending", "repeated", "any", "one"])
def test_scatter_add_has_the_bits_of_the_order_given(place, dtype, order):
    rng = np.random.default_rng(0)
    size, count = 7000, 3000
    indices = rng.integers(0, size // 10, count).astype(np.uint32)
    if order == "ascending":
        indices = np.sort(rng.choice(size, count, replace=False)).astype(np.uint32)
    elif order == "repeated":
        indices = np.sort(indices)
    elif order == "one":
        indices[:] = 5
    values, out = rng.normal(size=count).astype(dtype), rng.normal(size=size).astype(dtype)
    factor = 0.25  # a product with a power of two is exact, so that joining it with the sum changes nothing
    there = place.put(out)
    with place.quiet():
        good = gpu.scatter_add(place.put(indices), place.put(values), factor, there)
    assert good.item()
    assert cpu.scatter_add(indices, values, factor, out)
    np.testing.assert_array_equal(there.get(), out)


@pytest.mark.parametrize("order", ["ascending", "repeated", "any"])
def test_scatter_add_rounds_products_as_the_host_does(joining_place, dtype, order):
    """A mean must have the same bits on a rank with a GPU and on one without: a third is no power of two."""
    rng = np.random.default_rng(1)
    size, count = 7000, 3000
    indices = rng.choice(size, count, replace=order != "ascending").astype(np.uint32)
    if order != "any":
        indices = np.sort(indices)
    values, out = rng.normal(size=count).astype(dtype), rng.normal(size=size).astype(dtype)
    there = joining_place.put(out)
    assert gpu.scatter_add(joining_place.put(indices), joining_place.put(values), 1 / 3, there).item()
    assert cpu.scatter_add(indices, values, 1 / 3, out)
    np.testing.assert_array_equal(there.get(), out)


@pytest.mark.parametrize("bad", [3, 4, 2**31, 2**32 - 1])
def test_an_index_out_of_range_writes_nothing(place, dtype, bad):
    memory = place.zeros(10, dtype)
    out = memory[2:5]
    indices = place.put(np.array([0, bad, 1], np.uint32))
    assert not gpu.scatter_add(indices, place.put(np.ones(3, dtype)), 1.0, out).item()
    received = place.zeros(3, dtype)
    assert not gpu.gather(place.put(np.ones(3, dtype)), indices, received).item()
    assert not memory.get().any()
    assert not received.get().any()


def test_gather_subtract_and_clear(place, dtype):
    array = np.random.default_rng(0).normal(size=6000).astype(dtype)
    indices = np.sort(np.random.default_rng(1).choice(6000, 900, replace=False)).astype(np.uint32)
    there, chosen = place.put(array), place.put(indices)
    values = place.empty(900, dtype)
    assert gpu.gather(there, chosen, values).item()
    np.testing.assert_array_equal(values.get(), array[indices])
    half = values.get() / 2
    gpu.subtract_at(chosen, place.put(half), there)
    array[indices] -= half
    np.testing.assert_array_equal(there.get(), array)
    gpu.clear_at(chosen, there)
    array[indices] = 0
    np.testing.assert_array_equal(there.get(), array)
    nothing = place.empty(0, np.uint32)
    assert gpu.gather(there, nothing, place.empty(0, dtype)).item()
    assert gpu.scatter_add(nothing, place.empty(0, dtype), 1.0, there).item()
    gpu.clear_at(nothing, there)
    np.testing.assert_array_equal(there.get(), array)


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
@pytest.mark.parametrize("shift", [0, 1])
def test_narrow(place, dtype, wire, shift):
    array = special(dtype, 9001)
    if dtype == np.float64:
        array[:2] = 1e300, -1e300
    out, sent = place.empty(array.size, np.uint16, shift), place.empty(array.size, dtype)
    own, own_sent = np.empty(array.size, np.uint16), np.empty(array.size, dtype)
    gpu.narrow(place.put(array, shift), wire, out, sent)
    cpu.narrow(array, wire, own, own_sent)
    number = ~np.isnan(array)
    np.testing.assert_array_equal(out.get()[number], own[number])
    np.testing.assert_array_equal(sent.get(), own_sent)
    small = np.clip(np.nan_to_num(array), -100, 100)
    lost = gpu.narrow(place.put(small), wire, out)
    np.testing.assert_allclose(lost.item(), cpu.narrow(small, wire, own), rtol=1e-6)


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
@pytest.mark.parametrize("shift", [0, 1])
def test_every_16_bit_number_widens(place, dtype, wire, shift):
    halves = np.arange(1 << 16, dtype=np.uint16)
    out, total = place.empty(halves.size, dtype, shift), place.put(np.ones(halves.size, dtype))
    own, own_total = np.empty(halves.size, dtype), np.ones(halves.size, dtype)
    gpu.widen(place.put(halves, shift), wire, out)
    gpu.widen_add(place.put(halves), wire, total)
    cpu.widen(halves, wire, own)
    cpu.widen_add(halves, wire, own_total)
    np.testing.assert_array_equal(out.get(), own)
    np.testing.assert_array_equal(total.get(), own_total)


def test_small_halves_stay_where_subnormal_numbers_are_zero(place, dtype):
    """Gradients below 6e-5 are subnormal as halves, and CuPy has kernels treat what is subnormal as float32 as zero."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    halves = halves[halves & 0x7C00 != 0x7C00]
    array = halves.view(np.float16).astype(dtype)
    out, wide = place.empty(halves.size, np.uint16), place.empty(halves.size, dtype)
    sent, total = place.empty(halves.size, dtype), place.put(np.ones(halves.size, dtype))
    with place.flushing():
        gpu.narrow(place.put(array), "fp16", out, sent)
        gpu.widen(out, "fp16", wide)
        gpu.widen_add(out, "fp16", total)
    np.testing.assert_array_equal(out.get(), halves)
    np.testing.assert_array_equal(sent.get(), array)
    np.testing.assert_array_equal(wide.get(), array)
    np.testing.assert_array_equal(total.get(), 1 + array)


@pytest.mark.parametrize("size", [0, 1, 1025, 70_000])
@pytest.mark.parametrize("stride", [1, 3])
def test_spectrum(place, dtype, size, stride):
    rng = np.random.default_rng(size)
    array = np.ldexp(rng.normal(size=size), rng.integers(-60, 60, size)).astype(dtype)
    array[::9] = 0
    counts, energies = place.empty(gpu.BINS, np.int64), place.empty(gpu.BINS, np.float64)
    with place.quiet():
        gpu.spectrum(place.put(array), counts, energies, stride)
    own_counts, own_energies = np.empty(gpu.BINS, np.int64), np.empty(gpu.BINS)
    cpu.spectrum(array, own_counts, own_energies, stride)
    np.testing.assert_array_equal(counts.get(), own_counts)
    seen = array[np.arange(size) // 256 % stride == 0].astype(np.float32).astype(np.float64)
    bins = np.abs(seen).astype(np.float32).view(np.uint32) >> 20
    exact = np.bincount(bins, weights=np.square(seen), minlength=gpu.BINS)
    np.testing.assert_allclose(energies.get(), exact, rtol=1e-4)
    again = place.empty(gpu.BINS, np.float64)
    gpu.spectrum(place.put(array), counts, again, stride)
    np.testing.assert_array_equal(again.get(), energies.get())


def test_spectrum_of_what_is_no_number(place, dtype):
    array = np.array([np.inf, -np.inf, np.nan, 1e-40, 0, 1], dtype)
    counts, energies = place.empty(gpu.BINS, np.int64), place.empty(gpu.BINS, np.float64)
    gpu.spectrum(place.put(array), counts, energies)
    assert (counts.get()[2040], energies.get()[2040]) == (2, np.inf)
    assert counts.get()[2044] == 1
    assert np.isnan(energies.get()[2044])
    assert (counts.get()[0], counts.get()[127 * 8]) == (2, 1)
    assert energies.get()[0] < 1e-70


def test_a_block_of_the_largest_significands_does_not_wrap(place):
    value = np.float32(0.99999994)
    counts, energies = place.empty(gpu.BINS, np.int64), place.empty(gpu.BINS, np.float64)
    gpu.spectrum(place.put(np.full(1 << 16, value)), counts, energies)
    assert counts.get().sum() == 1 << 16
    np.testing.assert_allclose(energies.get().sum(), (1 << 16) * float(value) ** 2, rtol=1e-4)


def test_bits_and_magnitudes(place, dtype):
    kind = np.dtype(dtype)
    for value in (0.0, 0.3, 1e-40, np.inf):
        bits = cpu.magnitude_bits(value, kind)
        assert gpu.magnitude_bits(value, kind) == bits
        with place.quiet():
            there = gpu.magnitude_bits(place.scalar(value, np.float64), kind)
            back = gpu.magnitude_of(there, kind)
        seen = float(place.seen(np.array(value, kind)))
        assert there.item() == cpu.magnitude_bits(seen, kind)
        assert back.item() == cpu.magnitude_of(cpu.magnitude_bits(seen, kind), kind)
        assert gpu.magnitude_of(bits, kind) == cpu.magnitude_of(bits, kind)


SWEEPS = {
    "accumulate": ["accumulate"],
    "accumulate_candidates": ["accumulate", "count_tiles", "write_tiles"],
    "logarithms": ["logarithms"],
    "tail": ["tail"],
    "counts_above": ["counts_above"],
    "energy": ["energy"],
    "scale": ["scale"],
    "share_rounding": ["share_rounding"],
    "norm_change": ["norm_change"],
    "narrow": ["narrow_fp16"],
    "pack_signs": ["pack_signs"],
    "pack_grid": ["measure_norms", "pack_codes"],
    "pack_exponents": ["pack_exponents"],
    "pack_fields": ["pack_fields"],
}


def arguments_of(place, name, array):
    """Give what a sweep is called with."""
    size, kind = array.size, array.dtype
    there, other, out = place.put(array), place.put(array[::-1]), place.empty(size, kind)
    words, ones = place.empty(-(-size // 64), np.uint64), place.put(np.ones(1, kind))
    return {
        "accumulate": lambda: (there, other, out),
        "accumulate_candidates": lambda: (
            *(there, other, out, cpu.magnitude_bits(2.0, kind), 0),
            *(place.empty(size, np.uint32), place.empty(size, word(kind)), 0),
        ),
        "logarithms": lambda: (there, 2),
        "tail": lambda: (there, 0.5),
        "counts_above": lambda: (there, [0.5, 1.0]),
        "energy": lambda: (there,),
        "scale": lambda: (there, 1.0),
        "share_rounding": lambda: (there, place.put(array), 3, other, place.put(array)),
        "norm_change": lambda: (there, place.put(np.arange(size, dtype=np.uint32)), other),
        "narrow": lambda: (there, "fp16", place.empty(size, np.uint16), out),
        "pack_signs": lambda: (there, 640, place.empty(-(-size // 640), np.float32), words),
        "pack_grid": lambda: (
            *(there, 512, 4, "max", place.empty(-(-size // 512), np.float32)),
            *(place.empty(4 * words.size, np.uint64), out, 3),
        ),
        "pack_exponents": lambda: (there, words, place.empty(size, np.uint8), out, 5),
        "pack_fields": lambda: (there, ones, ones, 3, 6, None, place.empty(gpu.words_of(size, 6), np.uint64), out),
    }[name]()


@pytest.mark.parametrize("name", SWEEPS)
def test_sums_have_the_same_bits_at_every_call(place, dtype, name):
    """The emulation runs blocks and threads in another order every time; the last block makes the sums."""
    array = np.random.default_rng(0).laplace(size=50_000).astype(dtype)
    arguments, runs = arguments_of(place, name, array), set()
    for _ in range(4):
        standin.launches.clear()
        with place.quiet():
            told = getattr(gpu, name)(*arguments)
        assert not place.emulated or standin.launches == SWEEPS[name]
        told = told[1] if name == "accumulate_candidates" else told
        runs.add(tuple(number.item() for number in (told if isinstance(told, tuple | list) else (told,))))
    assert len(runs) == 1
    assert all(np.isfinite(runs.pop()))


@pytest.mark.parametrize("size", [0, 1, 4097, 30_011])
def test_memory_of_sums_serves_again(place, size):
    """A launch leaves the ticket as it found it, and takes over nothing of what the one before left."""
    workspace, bound = gpu.Workspace(max(size, 1), 0, np.float32), place.zeros(1, np.uint64)
    rng = np.random.default_rng(size)
    for _ in range(3):
        array = rng.laplace(size=max(size, 1)).astype(np.float32)
        out, chosen = place.empty(array.size, np.float32), (place.empty(1, np.uint32), place.empty(1, np.float32))
        stats = gpu.topk(place.put(array), None, out, bound, *chosen, workspace)
        moments = gpu.accumulate(place.put(array), None, out)
        assert [x.item() for x in stats[:4]] == [x.item() for x in moments]
        assert workspace.moments.memory.view(np.uint64).get()[0] == 0


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000, 5000])
@pytest.mark.parametrize("block", [64, 192, 1024])
@pytest.mark.parametrize("shift", [0, 1])
def test_signs(place, dtype, size, block, shift):
    array = np.random.default_rng(size).laplace(size=size).astype(dtype)
    array[::5] = 0
    array[1::10] = -0.0
    scales, words = np.empty(-(-size // block), np.float32), np.empty(-(-size // 64), np.uint64)
    sent = np.empty(size, dtype)
    lost = cpu.pack_signs(array, block, scales, words, sent)
    there_scales, there_words = place.empty(scales.size, np.float32), place.empty(words.size, np.uint64)
    there_sent = place.empty(size, dtype, shift)
    with place.quiet():
        there_lost = gpu.pack_signs(place.put(array, shift), block, there_scales, there_words, there_sent)
    np.testing.assert_array_equal(there_words.get(), words)
    np.testing.assert_allclose(there_scales.get(), scales, rtol=1.2e-7)
    np.testing.assert_allclose(there_sent.get(), sent, rtol=1.2e-7)
    np.testing.assert_allclose(there_lost.item(), lost, rtol=1e-6)
    packed = place.put(scales), place.put(words), block
    out, total = place.empty(size, dtype, shift), place.put(np.ones(size, dtype), shift)
    with place.quiet():
        gpu.unpack_signs(*packed, out)
        gpu.unpack_signs_add(*packed, 0.25, total)
    np.testing.assert_array_equal(out.get(), sent)
    own = np.ones(size, dtype)
    cpu.unpack_signs_add(scales, words, block, 0.25, own)
    np.testing.assert_array_equal(total.get(), own)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_signs_of_what_is_not_finite(place, dtype, bad):
    array = np.ones(1000, dtype)
    array[700] = bad
    scales, words = place.empty(4, np.float32), place.empty(16, np.uint64)
    lost = gpu.pack_signs(place.put(array), 256, scales, words)
    assert np.isfinite(scales.get()).tolist() == [True, True, False, True]
    assert not np.isfinite(lost.item())


def test_signs_of_large_float64_saturate(place):
    array = np.full(128, -1e308)
    array[64:] = 3.0
    scales, words, sent = place.empty(2, np.float32), place.empty(2, np.uint64), place.empty(128, np.float64)
    gpu.pack_signs(place.put(array), 64, scales, words, sent)
    own, own_words, own_sent = np.empty(2, np.float32), np.empty(2, np.uint64), np.empty(128)
    cpu.pack_signs(array, 64, own, own_words, own_sent)
    np.testing.assert_array_equal(scales.get(), own)
    np.testing.assert_array_equal(sent.get(), own_sent)
