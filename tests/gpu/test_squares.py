"""Values in a few bits are those of `mpicomp.kernels.cpu`, bit for bit: in an emulation on the host, and on a GPU."""

import numpy as np
import pytest
from gpu.alike import assert_alike, with_specials
from marks import slow
from mpicomp.kernels import cpu, gpu

DTYPES = [np.float32, slow(np.float64)]
BITS = [2, 4, 8]
SIZES = [0, 1, 7, 8, 31, 33, 255, 256, 257, 1000, 5000]


def made(size, dtype):
    """Blocks of all sizes of numbers, with zeros among them."""
    rng = np.random.default_rng(size)
    array = rng.standard_t(2, size) * np.repeat(10.0 ** rng.integers(-30, 30, size // 256 + 1), 256)[:size]
    array[::97] = 0
    array[1::97] = -0.0
    return array.astype(dtype)


def packed(kernels, array, bits, out, sent):
    with np.errstate(all="ignore"):
        return kernels.pack_squares(array, bits, out, sent)


def assert_same_messages(place, array, bits, shift=0):
    rubbish = np.full(cpu.squares_bytes(array.size, bits), 0xA5, np.uint8)
    own, sent = rubbish.copy(), np.empty_like(array)
    lost = packed(cpu, array, bits, own, sent)
    far, there, there_sent = place.put(array, shift), place.put(rubbish), place.empty(array.size, array.dtype, shift)
    with place.quiet():
        there_lost = packed(gpu, far, bits, there, there_sent)
    split = 8 * -(-array.size * bits // 64)
    np.testing.assert_array_equal(there.get()[:split], own[:split])
    np.testing.assert_array_equal(there.get()[split:].view(np.float32), own[split:].view(np.float32))
    assert_alike(there_sent, sent)
    np.testing.assert_allclose(there_lost.item(), lost, rtol=1e-9)
    return own, sent


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shift", [0, slow(1)])
def test_messages(joining_place, dtype, bits, shift):
    for size in SIZES:
        assert_same_messages(joining_place, made(size, dtype), bits, shift)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_messages_of_what_is_no_number(place, dtype, bits):
    _, sent = assert_same_messages(place, with_specials(made(5000, dtype)), bits)
    assert 256 < np.isnan(sent).sum() < 5000
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        array = made(700, dtype)
        array[300] = bad
        _, sent = assert_same_messages(place, array, bits)
        assert np.flatnonzero(np.isnan(sent)).tolist() == list(range(256, 512))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-38, 1e-36, 3e38, 1e300])
def test_messages_of_the_smallest_and_the_largest_numbers(place, dtype, bits, size):
    with np.errstate(over="ignore"):
        size = min(dtype(size), np.finfo(dtype).max)
    if size < 1e-35 and place.seen(dtype(1e-40)) == 0:  # steps between levels are smaller by far
        pytest.skip("subnormal numbers are zero there: the next test is about them")
    array = (size * np.random.default_rng(0).uniform(-1, 1, 1024)).astype(dtype)
    array[:256], array[256:512] = size, 0
    _, sent = assert_same_messages(place, array, bits)
    assert np.isfinite(sent).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-39, 1e-38, 1e-36])
def test_devices_see_what_was_sent_where_subnormal_numbers_are_zero(place, dtype, bits, size):
    """CuPy has them treated so. What hosts make of the message is the same: no scale is subnormal."""
    array = (size * np.random.default_rng(0).uniform(-1, 1, 512)).astype(dtype)
    message, sent = place.empty(cpu.squares_bytes(512, bits), np.uint8), place.empty(512, dtype)
    out, own = place.empty(512, dtype), np.empty(512, dtype)
    with place.flushing():
        gpu.pack_squares(place.put(array), bits, message, sent)
        gpu.unpack_squares(message, [0], [512], bits, out)
    assert cpu.unpack_squares(message.get(), [0], [512], bits, own)
    assert_alike(sent, own)
    assert_alike(out, own)
    assert np.abs(array - own).max() <= np.abs(array).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("counts", [(), (0,), (1,), (600, 600, 600), (300, 0, 7), (9, 8, 7, 3000, 1)])
def test_what_the_host_packs_is_unpacked(joining_place, dtype, bits, counts):
    place = joining_place
    parts, starts, sent = [np.zeros(24, np.uint8)], [], [np.empty(0, dtype)]
    for count in counts:
        starts.append(sum(part.size for part in parts))
        array = made(count, dtype)
        parts += [np.zeros(cpu.squares_bytes(count, bits), np.uint8), np.zeros(24, np.uint8)]
        sent.append(np.empty_like(array))
        cpu.pack_squares(array, bits, parts[-2], sent[-1])
    messages, out = place.put(np.concatenate(parts)), place.empty(sum(counts), dtype)
    with place.quiet():
        right = gpu.unpack_squares(messages, starts, counts, bits, out)
    assert right.item()
    assert_alike(out, np.concatenate(sent))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("where", [0, 3, 5])
@pytest.mark.parametrize("scale", [-1.0, np.inf, np.nan, 3e38])
def test_scales_that_cannot_be_are_told(place, bits, where, scale):
    one = np.zeros(cpu.squares_bytes(700, bits), np.uint8)
    array = np.random.default_rng(0).uniform(1e38, 2e38, 700).astype(np.float32)
    cpu.pack_squares(array, bits, one, array)
    messages = np.concatenate([one, one])
    messages[-6 * 4 :].view(np.float32)[where] = scale
    out, starts = place.empty(1400, np.float32), (0, one.size)
    with place.quiet():
        right = gpu.unpack_squares(place.put(messages), starts, (700, 700), bits, out)
    own = cpu.unpack_squares(messages, starts, (700, 700), bits, np.empty(1400, np.float32))
    assert right.item() is own
    assert not own or scale == 3e38


def test_arrays_that_do_not_fit_are_told_to_the_caller(place):
    array, out = place.zeros(9, np.float32), place.zeros(32, np.uint8)
    with pytest.raises(ValueError, match="9 elements take 16 bytes, got 32"):
        gpu.pack_squares(array, 4, out, array)
    with pytest.raises(ValueError, match="9 elements do not fill an array of 8"):
        gpu.unpack_squares(out, [0], [9], 4, array[:8])
    for start in (-8, 4, 24):
        with pytest.raises(ValueError, match=f"9 elements from byte {start} on are not in 32 bytes, aligned"):
            gpu.unpack_squares(out, [start], [9], 4, array)
