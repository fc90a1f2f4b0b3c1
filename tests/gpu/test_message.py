"""Headers, tails, sums of selections and collected numbers: in an emulation on the host, and on a GPU."""

import struct

import numpy as np
import pytest
from gpu import standin
from marks import slow
from mpicomp.kernels import cpu, gpu

from mpicomp.compressors import Selection
from mpicomp.compressors.wire_format import Wire, message_bytes, write_message

DTYPES = [np.float32, slow(np.float64)]
COUNTS = [(), (0,), (1,), (31, 31), (33, 33, 33), (1000, 0, 7), (5000, 5000), (9, 8, 7, 3000, 1), (600,) * 5]
NUMEL = 6000


def word(dtype):
    return np.uint32 if dtype == np.float32 else np.uint64


@pytest.fixture
def launched(place):
    """Give the names of what was launched since, without what prepares the test."""

    def names():
        return list(standin.launches) if place.emulated else None

    standin.launches.clear()
    return names


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("energy", "kept", "rounding", "lost"),
    [
        (5.0, 3.0, 0.25, 2.25),
        (3.0, 4.0, 0.25, 0.25),
        (np.inf, 1.0, 0.5, np.inf),
        (np.inf, np.inf, 0.5, np.nan),
        (np.nan, 1.0, 0.5, np.nan),
    ],
)
def test_header(place, launched, finite, on_device, energy, kept, rounding, lost):
    message, lead = place.put(np.full(40, 7, np.uint8)), 2**63 + 3
    numbers = [finite, energy, kept, rounding]
    if on_device:
        numbers = [place.scalar(finite, np.bool_), *(place.scalar(number, np.float64) for number in numbers[1:])]
    with place.quiet():
        gpu.write_header(message, lead, *numbers)
    assert launched() in (["write_header"], None)
    told, own = message.get(), np.full(40, 7, np.uint8)
    assert struct.unpack("<Q", told[:8].tobytes())[0] == lead + (0 if finite else 256)
    np.testing.assert_array_equal(struct.unpack("<dd", told[8:24].tobytes()), [energy, lost])
    cpu.write_header(own, lead, finite, energy, kept, rounding)
    np.testing.assert_array_equal(told[:8], own[:8])
    np.testing.assert_array_equal(told[8:24].view(np.float64), own[8:24].view(np.float64))
    np.testing.assert_array_equal(told[24:], own[24:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 33, 4097, 30_011])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_header_takes_the_norm_of_values(joining_place, dtype, size, shift):
    """It is the one that the sweep gives, to the bit, and what was there before is of no meaning."""
    place = joining_place
    values = np.random.default_rng(size).laplace(size=size).astype(dtype)
    there, energy = place.put(values, shift), 3.0 * size + 1
    alone, told = place.put(np.full(40, 7, np.uint8)), place.put(np.full(40, 9, np.uint8))
    numbers = place.scalar(False, np.bool_), place.scalar(energy, np.float64)
    rounding = place.scalar(0.5, np.float64)
    gpu.write_header(alone, 5, *numbers, gpu.energy(there), rounding)
    for _ in range(3):
        standin.launches.clear()
        with place.quiet():
            gpu.write_header(told, 5, *numbers, there, rounding)
        assert standin.launches == (["write_header"] if place.emulated else [])
        np.testing.assert_array_equal(told.get()[:24], alone.get()[:24])
        assert (told.get()[24:] == 9).all()
    own = np.zeros(24, np.uint8)
    cpu.write_header(own, 5, False, energy, values, 0.5)
    np.testing.assert_array_equal(told.get()[:8], own[:8])
    np.testing.assert_allclose(told.get()[8:24].view(np.float64), own[8:].view(np.float64), rtol=1e-10)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_header_of_values_that_are_no_numbers(place, bad):
    values, message = np.array([1, bad], np.float32), place.put(np.zeros(24, np.uint8))
    gpu.write_header(message, 0, True, bad, place.put(values), 0.0)
    np.testing.assert_array_equal(message.get()[8:].view(np.float64), [bad, np.nan])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 2, 255, 5001])
@pytest.mark.parametrize("finite", [True, False])
def test_a_message_in_one_launch_is_that_of_the_host(place, launched, dtype, size, finite):
    rng = np.random.default_rng(size)
    values, numel = rng.normal(size=size).astype(dtype), 3 * size + 1
    indices = np.sort(rng.choice(numel, size, replace=False)).astype(np.uint32)
    energy = 2 * float(np.square(values, dtype=np.float64).sum()) + 1
    own = np.full(message_bytes(size, numel, values.dtype, Wire()), 7, np.uint8)
    write_message(own, Selection(indices, values), numel, Wire(), 2, energy, values, finite)
    message = place.put(np.full(own.size, 7, np.uint8))
    there, told = Selection(place.put(indices), place.put(values)), place.scalar(energy, np.float64)
    standin.launches.clear()
    with place.quiet():
        write_message(message, there, numel, Wire(), 2, told, there.values, place.scalar(finite, np.bool_))
    assert launched() in (["write_pairs"], None)
    found = message.get()
    np.testing.assert_array_equal(found[:16], own[:16])
    np.testing.assert_allclose(found[16:24].view(np.float64), own[16:24].view(np.float64), rtol=1e-12)
    np.testing.assert_array_equal(found[24:], own[24:])


def test_a_header_of_other_types(place):
    message = place.put(np.zeros(24, np.uint8))
    with place.quiet():
        gpu.write_header(message, 0, place.scalar(0, np.int64), np.float32(2), 1, place.scalar(0.5, np.float32))
    assert struct.unpack("<Qdd", message.get().tobytes()) == (256, 2.0, 1.5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("numbers", [(True, False, 1e300, 0.1), (False, True, np.nan, -np.inf), (True, True, 0.0, 3.5)])
def test_tail(place, launched, dtype, on_device, numbers):
    out, own = place.empty(4, dtype, shift=1), np.empty(4, dtype)
    given = numbers
    if on_device:
        kinds = np.bool_, np.bool_, np.float64, np.float64
        given = [place.scalar(number, kind) for number, kind in zip(numbers, kinds, strict=True)]
    with place.quiet():
        gpu.write_tail(out, *given)
    assert launched() in (["write_tail"], None)
    cpu.write_tail(own, *numbers)
    with np.errstate(over="ignore"):
        expected = np.array([not numbers[0], *numbers[1:]], np.float64).astype(dtype)
    np.testing.assert_array_equal(own, expected)
    np.testing.assert_array_equal(out.get(), expected)


def drawn(rng, count, stored):
    """Numbers whose sums depend on their order, as they are stored and as they are."""
    numbers = (rng.normal(size=count) * 10.0 ** rng.integers(-3, 4, count)).astype(np.float32)
    if stored == "bf16":
        halves = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        return halves, (halves.astype(np.uint32) << 16).view(np.float32)
    values = numbers.astype("float16" if stored == "fp16" else stored)
    return values, values


def laid_out(rng, counts, stored, numel=NUMEL):
    """Give one array of bytes with all selections, where their parts are, and the selections themselves."""
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", ["as out", "fp16", "bf16"])
@pytest.mark.parametrize("counts", COUNTS)
def test_sums_have_the_bits_of_one_after_the_other(joining_place, dtype, stored, counts):
    place = joining_place
    rng = np.random.default_rng(sum(counts))
    stored = np.dtype(dtype).name if stored == "as out" else stored
    messages, values_at, indices_at, selections = laid_out(rng, counts, stored)
    out = rng.normal(size=NUMEL).astype(dtype)
    there, own, bytes_there = place.put(out, shift=1), out.copy(), place.put(messages)
    standin.launches.clear()
    with place.quiet():
        good = gpu.sparse_add(bytes_there, values_at, bytes_there, indices_at, counts, stored, 1 / 3, there)
    assert len(standin.launches) <= 1
    assert good.item()
    assert cpu.sparse_add(messages, values_at, messages, indices_at, counts, stored, 1 / 3, own)
    np.testing.assert_array_equal(own.view(word(dtype)), added(selections, 1 / 3, out).view(word(dtype)))
    np.testing.assert_array_equal(there.get().view(word(dtype)), own.view(word(dtype)))


@pytest.mark.parametrize("counts", [(40, 40, 40), (40, 3, 0)])
def test_indices_apart_and_a_factor_on_the_device(place, counts):
    rng = np.random.default_rng(0)
    chosen = [np.sort(rng.choice(50, count, replace=False)).astype(np.uint32) for count in counts]
    values = [rng.normal(size=count).astype(np.float32) for count in counts]
    starts = [0, *np.cumsum(counts)[:-1]]
    out = rng.normal(size=50).astype(np.float32)
    expected = added(list(zip(chosen, values, strict=True)), 0.3, out)
    there, factor = place.put(out), place.scalar(0.3, np.float64)
    messages, indices = place.put(np.concatenate(values).view(np.uint8)), place.put(np.concatenate(chosen))
    at = [4 * start for start in starts]
    with place.quiet():
        good = gpu.sparse_add(messages, at, indices, at, counts, "float32", factor, there)
    assert good.item()
    np.testing.assert_array_equal(there.get(), expected)


@pytest.mark.parametrize("counts", [(), (40,), (40, 3, 0)])
@pytest.mark.parametrize("sound", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("on_device", [False, True])
def test_one_answer_for_all_that_led_to_it(joining_place, counts, sound, before, on_device):
    place = joining_place
    rng = np.random.default_rng(0)
    chosen = [np.sort(rng.choice(50, count, replace=False)).astype(np.uint32) for count in counts]
    if chosen and not sound:
        chosen[0][7] = chosen[0][6]
    values = np.ones(sum(counts), np.float32).view(np.uint8)
    at = [4 * int(sum(counts[:place])) for place in range(len(counts))]
    chosen = np.concatenate([*chosen, np.empty(0, np.uint32)])
    messages, indices, out = place.put(values), place.put(chosen), place.zeros(50, np.float32)
    right = place.scalar(before, np.bool_) if on_device else before
    standin.launches.clear()
    with place.quiet():
        good = gpu.sparse_add(messages, at, indices, at, counts, "float32", 1.0, out, right)
    assert len(standin.launches) <= 1
    expected = before and (sound or not counts)
    assert good.item() is expected
    assert cpu.sparse_add(values, at, chosen, at, counts, "float32", 1.0, np.zeros(50, np.float32), before) is expected


def test_what_is_no_number_and_what_is_zero(place):
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e38], np.float32)
    values, chosen = np.concatenate([special, special[::-1]]), np.arange(6, dtype=np.uint32)
    out = np.array([-0.0, 1, np.inf, -0.0, -0.0, 3e38], np.float32)
    there = place.put(out)
    starts = (0, 24)
    gpu.sparse_add(place.put(values.view(np.uint8)), starts, place.put(chosen), (0, 0), (6, 6), "float32", 4.0, there)
    expected = added([(chosen, special), (chosen, special[::-1])], 4.0, out)
    np.testing.assert_array_equal(there.get(), expected)
    np.testing.assert_array_equal(np.signbit(there.get()[3:5]), np.signbit(expected[3:5]))


@pytest.mark.parametrize("wrong", ["repeated", "descending", "too large", "far too large", "last and first"])
@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("counts", [(300, 300, 300), (300, 20, 700)])
def test_wrong_indices_are_seen_and_nothing_outside_is_touched(place, wrong, which, counts):
    """A selection whose indices are wrong makes the sum anything, but the emulation fails where it goes astray."""
    rng = np.random.default_rng(0)
    chosen = [np.sort(rng.choice(900, count, replace=False)).astype(np.uint32) for count in counts]
    own = chosen[which]
    if wrong == "repeated":
        own[100] = own[99]
    elif wrong == "descending":
        own[100], own[99] = own[99], own[100]
    elif wrong == "last and first":
        own[0], own[-1] = own[-1], own[0]
    else:
        own[-1] = 900 if wrong == "too large" else 2**32 - 1
    starts = [4 * int(start) for start in (0, *np.cumsum(counts)[:-1])]
    values = np.ones(sum(counts), np.float32).view(np.uint8)
    room = place.put(np.zeros(1000, np.float32))
    messages, indices = place.put(values), place.put(np.concatenate(chosen))
    with place.quiet():
        good = gpu.sparse_add(messages, starts, indices, starts, counts, "float32", 1.0, room[50:950])
    assert not good.item()
    assert not room.get()[:50].any()
    assert not room.get()[950:].any()
    out = np.zeros(900, np.float32)
    assert not cpu.sparse_add(values, starts, np.concatenate(chosen), starts, counts, "float32", 1.0, out)


def test_what_does_not_fit_together_is_refused(place):
    out, nothing = place.zeros(3, np.float32), place.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="2 selections, with values at 1 and indices at 2"):
        gpu.sparse_add(nothing, (0,), nothing, (0, 0), (0, 0), "float32", 1.0, out)
    with pytest.raises(ValueError, match="stored as float32, fp16 or bf16, got 'float64'"):
        gpu.sparse_add(nothing, (0,), nothing, (0,), (0,), "float64", 1.0, out)


def test_collected_numbers(place, launched):
    numbers = [
        np.bool_(True), np.int32(-2), np.uint32(2**32 - 1), np.int64(-3), np.uint64(2**64 - 5), np.float32(-0.5),
        np.float64(np.pi), np.bool_(False),
    ]  # fmt: skip
    there = [place.scalar(number, number.dtype) for number in numbers]
    for count in range(1, 9):
        with place.quiet():
            out = gpu.collect(there[:count])
        assert out.dtype == np.uint64
        assert out.get().tobytes() == b"".join(number.tobytes().ljust(8, b"\0") for number in numbers[:count])
    assert launched() in (["collect"] * 8, None)


def test_what_cannot_be_collected_is_refused(place):
    number = place.scalar(1, np.float64)
    for values in ([], [number] * 9):
        with pytest.raises(ValueError, match="1 to 8 numbers"):
            gpu.collect(values)
    with pytest.raises(ValueError, match="1 of int16 are no number"):
        gpu.collect([place.scalar(1, np.int16)])
    with pytest.raises(ValueError, match="2 of float64 are no number"):
        gpu.collect([place.zeros(2, np.float64)])
