"""Headers, tails and sums of selections."""

import struct
import warnings

import numpy as np
import pytest
from device import emulator
from marks import slow
from mpicomp.kernels import gpu

from mpicomp.compressors import Selection

COUNTS = [(), (0,), (1,), (31, 31), (33, 33, 33), (1000, 0, 7), (5000, 5000), (9, 8, 7, 3000, 1), (600,) * 5]
NUMEL = 6000


def launched(kernels, *names):
    """Return whether these kernels were launched since the last call, in the emulation."""
    found = list(emulator.launches)
    emulator.launches.clear()
    return not kernels.emulated or found == list(names)


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("energy", "kept", "rounding", "lost"),
    [
        (5.0, 3.0, 0.25, 2.25),
        (3.0, 4.0, 0.25, 0.25),
        (0.0, 0.0, 0.0, 0.0),
        (np.inf, 1.0, 0.5, np.inf),
        (np.inf, np.inf, 0.5, np.nan),
        (np.nan, 1.0, 0.5, np.nan),
        (1.0, np.nan, 0.0, np.nan),
    ],
)
def test_a_header_is_what_struct_packs(kernels, finite, on_device, energy, kept, rounding, lost):
    message, lead = np.full(40, 7, np.uint8), 2**63 + 2**40 + 3
    numbers = [finite, energy, kept, rounding]
    if on_device:
        numbers = [np.bool_(finite), *map(np.float64, numbers[1:])]
    emulator.launches.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.write_header(message, lead, *numbers)
    assert launched(kernels, "write_header")
    word, first, second = struct.unpack("<Qdd", message[:24].tobytes())
    assert word == lead + (0 if finite else 256)
    np.testing.assert_array_equal([first, second], [energy, lost])
    assert (message[24:] == 7).all()


@pytest.mark.parametrize("shift", [0, 1])
def test_a_header_takes_the_norm_of_values(kernels, dtype, shift):
    """It is that of the sweep, to the bit."""
    kernels.shift = shift
    for size in (0, 1, 33, 1000, 4097, 30_011):
        values = np.random.default_rng(size).laplace(size=size).astype(dtype)
        with_norm, with_values = np.full(40, 7, np.uint8), np.full(40, 9, np.uint8)
        kernels.write_header(with_norm, 5, False, 3.0 * size + 1, np.float64(kernels.energy(values)), np.float64(0.5))
        for _ in range(2):
            emulator.launches.clear()
            kernels.write_header(with_values, 5, np.bool_(False), np.float64(3.0 * size + 1), values, np.float64(0.5))
            assert launched(kernels, "write_header")
            np.testing.assert_array_equal(with_values[:24], with_norm[:24])
            assert (with_values[24:] == 9).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_header_of_nonfinite_values(kernels, bad):
    message = np.zeros(24, np.uint8)
    kernels.write_header(message, 0, True, bad, np.array([1, bad], np.float32), 0.0)
    np.testing.assert_array_equal(message[8:].view(np.float64), [bad, np.nan])


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("numbers", [(True, False, 1e300, 0.1), (False, True, np.nan, -np.inf), (True, True, 0.0, 3.5)])
def test_a_tail_is_numbers(kernels, dtype, on_device, numbers):
    out, kernels.shift = np.empty(4, dtype), 1
    given = [kind(number) for number, kind in zip(numbers, [np.bool_] * 2 + [np.float64] * 2, strict=True)]
    emulator.launches.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.write_tail(out, *(given if on_device else numbers))
    assert launched(kernels, "write_tail")
    with np.errstate(over="ignore"):
        expected = np.array([not numbers[0], *numbers[1:]], np.float64).astype(dtype)
    np.testing.assert_array_equal(out, expected)


def drawn(rng, count, stored):
    """Numbers whose sums depend on their order, and how they are stored."""
    numbers = (rng.normal(size=count) * 10.0 ** rng.integers(-3, 4, count)).astype(np.float32)
    if stored == "bf16":
        halves = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        return halves, (halves.astype(np.uint32) << 16).view(np.float32)
    values = numbers.astype("float16" if stored == "fp16" else stored)
    return values, values


def laid_out(rng, counts, stored, numel=NUMEL):
    """Return one array of bytes with all selections, where their parts are, and the selections themselves."""
    parts, values_at, indices_at, selections = [np.zeros(8, np.uint8)], [], [], []
    for count in counts:
        start = sum(part.size for part in parts)
        raw, values = drawn(rng, count, stored)
        indices = np.sort(rng.choice(numel, count, replace=False)).astype(np.uint32)
        gap = 24 + -raw.nbytes % 8
        values_at.append(start)
        indices_at.append(start + raw.nbytes + gap)
        parts += [raw.view(np.uint8), np.zeros(gap, np.uint8), indices.view(np.uint8)]
        parts.append(np.zeros(-indices.nbytes % 8, np.uint8))
        selections.append((indices, values))
    return np.concatenate(parts), values_at, indices_at, selections


def added(selections, factor, out):
    """Add one selection after the other: a product is rounded, and then a sum."""
    total = out.copy()
    with np.errstate(all="ignore"):
        for indices, values in selections:
            total[indices] += (out.dtype.type(factor) * values.astype(out.dtype)).astype(out.dtype)
    return total


@pytest.mark.parametrize("stored", ["as out", "fp16", "bf16"])
@pytest.mark.parametrize("counts", COUNTS)
def test_sums_of_selections_round_in_their_order(kernels, dtype, stored, counts):
    rng, kernels.shift = np.random.default_rng(sum(counts)), 1
    stored = np.dtype(dtype).name if stored == "as out" else stored
    messages, values_at, indices_at, selections = laid_out(rng, counts, stored)
    out = rng.normal(size=NUMEL).astype(dtype)
    expected = added(selections, 1 / 3, out)
    emulator.launches.clear()
    assert kernels.sparse_add(messages, values_at, messages, indices_at, counts, stored, 1 / 3, out)
    assert len(emulator.launches) <= 1
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
@pytest.mark.parametrize("sent", [0, 1, 700])
def test_a_sum_subtracts_a_selection_from_another_array(place, dtype, sent):
    """The sum of a mean, and the residual of what this rank has sent."""
    rng = np.random.default_rng(sent)
    messages, values_at, indices_at, selections = laid_out(rng, (600, 600), np.dtype(dtype).name)
    out, left = rng.normal(size=(2, NUMEL)).astype(dtype)
    chosen = np.sort(rng.choice(NUMEL, sent, replace=False)).astype(np.uint32)
    there = place.put(messages), place.put(out), place.put(left)
    subtracted = Selection(place.put(chosen), place.put(left[chosen] / 2))
    emulator.launches.clear()
    with place.quiet():
        arguments = values_at, there[0], indices_at, (600, 600), np.dtype(dtype).name, 0.5
        good = gpu.sparse_add_and_subtract(there[0], *arguments, there[1], subtracted, there[2])
    assert launched(place, "sparse_add")
    assert good
    expected = left.copy()
    expected[chosen] -= left[chosen] / 2
    np.testing.assert_array_equal(there[2].get(), expected)
    np.testing.assert_array_equal(there[1].get(), added(selections, 0.5, out))


def test_sums_of_zeros_and_nonfinite_values(kernels):
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e38], np.float32)
    values, chosen = np.concatenate([special, special[::-1]]), np.arange(6, dtype=np.uint32)
    out = np.array([-0.0, 1, np.inf, -0.0, -0.0, 3e38], np.float32)
    expected = added([(chosen, special), (chosen, special[::-1])], 4.0, out)
    kernels.sparse_add(values.view(np.uint8), (0, 24), chosen, (0, 0), (6, 6), "float32", 4.0, out)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(np.signbit(out[3:5]), np.signbit(expected[3:5]))


@pytest.mark.parametrize("wrong", ["repeated", "descending", "too large", "far too large", "last and first"])
@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("counts", [(300, 300, 300), (300, 20, 700)])
def test_wrong_indices_are_seen_and_touch_nothing_outside(kernels, wrong, which, counts):
    """The sum is then anything, but the fixture fails where a kernel writes outside."""
    rng = np.random.default_rng(0)
    chosen = [np.sort(rng.choice(900, count, replace=False)).astype(np.uint32) for count in counts]
    indices = chosen[which]
    if wrong == "repeated":
        indices[100 % indices.size] = indices[99 % indices.size]
    elif wrong == "descending":
        indices[100], indices[99] = indices[99], indices[100]
    elif wrong == "last and first":
        indices[0], indices[-1] = indices[-1], indices[0]
    else:
        indices[-1] = 900 if wrong == "too large" else 2**32 - 1
    at = [4 * int(start) for start in (0, *np.cumsum(counts)[:-1])]
    values, out = np.ones(sum(counts), np.float32).view(np.uint8), np.zeros(900, np.float32)
    assert not kernels.sparse_add(values, at, np.concatenate(chosen), at, counts, "float32", 1.0, out)


def test_sums_of_selections_refuse_what_does_not_fit(kernels):
    out, nothing = np.zeros(3, np.float32), np.zeros(8, np.uint8)
    for stored in ("float64", "int8"):
        with pytest.raises(ValueError, match=f"stored as float32, fp16 or bf16, got '{stored}'"):
            kernels.sparse_add(nothing, (0,), nothing, (0,), (0,), stored, 1.0, out)


def test_sums_on_a_gpu_refuse_lists_of_different_lengths(gpu_kernels):
    out, nothing = np.zeros(3, np.float32), np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="2 selections, with values at 1 and indices at 2"):
        gpu_kernels.sparse_add(nothing, (0,), nothing, (0, 0), (0, 0), "float32", 1.0, out)
