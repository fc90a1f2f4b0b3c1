import numpy as np
import oracle
import pytest
from device.kinds import with_specials
from mpicomp.kernels import cpu, gpu

BITS = [2, 4, 8]
SIZES = [0, 1, 7, 8, 9, 31, 33, 255, 256, 257, 1000]
LARGEST = np.finfo(np.float32).max


def pack(kernels, array, bits):
    # Rubbish first: all that is packed has to be written.
    out, sent = np.full(cpu.quadratic_bytes(array.size, bits), 0xA5, np.uint8), np.full_like(array, np.nan)
    lost = kernels.pack_quadratic(array, bits, out, sent)
    return out, sent, lost


def scales_of(out, size, bits):
    return out[8 * -(-size * bits // 64) :].view(np.float32).reshape(-1, 2)


def made(size, dtype):
    """Blocks of all sizes of numbers, with zeros of both signs among them."""
    rng = np.random.default_rng(size)
    array = rng.standard_t(2, size) * np.repeat(10.0 ** rng.integers(-30, 30, size // 256 + 1), 256)[:size]
    array[::97] = 0
    array[1::97] = -0.0
    return array.astype(dtype)


def energies(array, sent):
    """The energy of each block, and what it loses, in units of the largest element: nothing vanishes or overflows."""
    top = np.abs(array.astype(np.float64)).max(initial=0.0) or 1.0
    exact, seen = array.astype(np.float64) / top, sent.astype(np.float64) / top
    starts = range(0, array.size, 256)
    return [(np.sum(exact[s : s + 256] ** 2), np.sum((exact - seen)[s : s + 256] ** 2)) for s in starts]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_quadratic_levels_are_packed_by_definition(kernels, dtype, bits, size):
    kernels.shift = size % 2
    array = np.random.default_rng(size).standard_t(3, size).astype(dtype)
    array += np.copysign(1, array)
    array[3::50] = 0
    out, sent, lost = pack(kernels, array, bits)
    # A base is computed from sums, whose last bits depend on their order.
    np.testing.assert_allclose(sent, oracle.few_bits(array, bits), rtol=3e-7)
    np.testing.assert_array_equal(np.signbit(sent), np.signbit(array))
    np.testing.assert_allclose(lost, np.square(array.astype(np.float64) - sent).sum(), rtol=1e-12)
    codes = np.unpackbits(out[: 8 * -(-size * bits // 64)], bitorder="little")
    assert not codes[size * bits :].any()
    codes = codes[: size * bits].reshape(-1, bits)
    np.testing.assert_array_equal(codes[:, -1], np.signbit(array))
    j = codes[:, :-1] @ (1 << np.arange(bits - 1))
    base, step = np.repeat(scales_of(out, size, bits).astype(np.float64), 256, axis=0)[:size].T
    np.testing.assert_array_equal(np.abs(sent), (base + j**2 * step).astype(dtype))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("counts", [(), (0,), (1,), (600, 600, 600), (0, 1, 600, 256, 7), (9, 8, 7, 3000, 1)])
def test_quadratic_levels_of_several_messages_unpack_to_what_was_sent(kernels, dtype, bits, counts):
    parts, starts, sent = [np.zeros(24, np.uint8)], [], [np.empty(0, dtype)]
    for count in counts:
        starts.append(sum(part.size for part in parts))
        packed, seen, _ = pack(cpu, made(count, dtype), bits)
        parts += [packed, np.zeros(24, np.uint8)]
        sent.append(seen)
    out, expected = np.full(sum(counts), np.nan, dtype), np.concatenate(sent)
    assert kernels.unpack_quadratic(np.concatenate(parts), starts, counts, bits, out)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("bits", BITS)
def test_quadratic_levels_in_place(kernels, dtype, bits):
    array = np.random.default_rng(0).laplace(size=700).astype(dtype)
    out, sent, lost = pack(kernels, array, bits)
    again = np.empty_like(out)
    assert kernels.pack_quadratic(array, bits, again, array) == lost
    assert (array.tobytes(), again.tobytes()) == (sent.tobytes(), out.tobytes())


def awkward(dtype):
    tiny, largest = float(np.finfo(dtype).smallest_subnormal), float(np.finfo(dtype).max)
    few = np.arange(256)
    return {
        "zeros": np.zeros(256),
        "negative zeros": np.full(256, -0.0),
        "equal": np.where(few % 3, 2.5, -2.5),
        "one element": np.array([-3.0]),
        "two elements": np.array([1e-3, 1e3]),
        "one huge": np.where(few == 9, 1e30, 1.0),
        "one small": np.where(few == 9, 1e-30, 1.0),
        "one that is not zero": np.where(few == 9, -1.0, 0.0),
        "half zeros": np.where(few % 2, 1.0 + few, 0.0),
        "all sizes": 10.0 ** ((few - 128) / 4),
        "smallest": np.full(256, tiny),
        "subnormal": tiny * (few + 1),
        "around the least normal": 2.0**-126 * (0.5 + few / 100),
        "largest float32": np.where(few % 2, LARGEST, -LARGEST),
        "near the largest float32": float(LARGEST) * (1 - few / 1000),
        "largest": np.where(few % 2, largest, -largest),
        "smallest and largest": np.where(few % 2, tiny, largest),
    }


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", awkward(np.float32))
def test_no_awkward_block_loses_more_than_it_has(kernels, dtype, name, bits):
    array = awkward(dtype)[name].astype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        out, sent, _ = pack(kernels, array, bits)
    scales = scales_of(out, array.size, bits)
    assert np.isfinite(scales).all()
    assert ((scales == 0) | (scales >= np.finfo(np.float32).tiny)).all()
    assert np.isfinite(sent).all()
    assert all(lost <= energy for energy, lost in energies(array, sent))
    if name in ("zeros", "equal", "one element", "largest float32", "one that is not zero"):
        np.testing.assert_allclose(sent, array, rtol=3e-7)
    back = np.empty_like(array)
    assert kernels.unpack_quadratic(out, [0], [array.size], bits, back)
    assert back.tobytes() == sent.tobytes()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_nonfinite_elements_spoil_their_block(kernels, dtype, bits, bad):
    array = np.random.default_rng(0).laplace(size=700).astype(dtype)
    array[300] = bad
    out, sent, lost = pack(kernels, array, bits)
    assert np.flatnonzero(~np.isfinite(sent)).tolist() == list(range(256, 512))
    assert np.isnan(lost)
    back = np.empty_like(array)
    assert not kernels.unpack_quadratic(out, [0], [array.size], bits, back)
    np.testing.assert_array_equal(back, sent)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scale", [-1.0, -np.inf, np.inf, np.nan])
def test_scales_that_cannot_be_are_found(kernels, bits, scale):
    sound, _, _ = pack(kernels, np.random.default_rng(0).uniform(1, 2, 700).astype(np.float32), bits)
    for place in (0, 1, 4, 5):
        out = sound.copy()
        scales_of(out, 700, bits).reshape(-1)[place] = scale
        assert not kernels.unpack_quadratic(out, [0], [700], bits, np.empty(700, np.float32))


@pytest.mark.parametrize("bits", BITS)
def test_levels_beyond_float32_are_found(kernels, bits):
    out, _, _ = pack(kernels, np.ones(10, np.float32), bits)
    for base, step, sound in ((LARGEST, 0, True), (LARGEST / 2, LARGEST / 2, bits == 2), (LARGEST, LARGEST, False)):
        scales_of(out, 10, bits)[0] = base, step
        assert kernels.unpack_quadratic(out, [0], [10], bits, np.empty(10, np.float32)) == sound


@pytest.mark.parametrize(("bits", "middle", "codes"), [(2, 1.0, 0b01_10_00), (4, 5.5, 0x7D0), (8, 5.5, 0x7FDA00)])
def test_bytes_of_squares_by_hand(kernels, bits, middle, codes):
    """Levels go from 1 to 10 as 1 + 9 (j / 7)**2 does: 5.5 is nearest to j = 5, and to 90 where 127 stands for 7."""
    out, _, _ = pack(kernels, np.array([1, -middle, 10], np.float32), bits)
    assert int(out[:8].view(np.uint64)[0]) == codes
    np.testing.assert_allclose(out[8:].view(np.float32), [1, 9 / (2 ** (bits - 1) - 1) ** 2], rtol=1e-6)


def test_quadratic_levels_refuse_arrays_that_do_not_fit(kernels):
    array, out = np.ones(9, np.float32), np.zeros(32, np.uint8)
    with pytest.raises(ValueError, match="9 elements take 16 bytes, got 32"):
        kernels.pack_quadratic(array, 4, out, array)
    with pytest.raises(ValueError, match="9 elements do not fill an array of 8"):
        kernels.unpack_quadratic(out, [0], [9], 4, array[:8])
    for start in (-8, 4, 24):
        with pytest.raises(ValueError, match=f"9 elements from byte {start} on are not in 32 bytes, aligned"):
            kernels.unpack_quadratic(out, [start], [9], 4, array)


@pytest.mark.parametrize("bits", BITS)
def test_quadratic_levels_of_all_kinds_of_numbers_have_the_hosts_bits(gpu_kernels, dtype, bits):
    """The fixture compares them."""
    for size in (0, 1, 255, 1000, 5000):
        pack(gpu_kernels, made(size, dtype), bits)
    _, sent, _ = pack(gpu_kernels, with_specials(made(5000, dtype)), bits)
    assert 256 < np.isnan(sent).sum() < 5000


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-39, 1e-38, 1e-36])
def test_quadratic_levels_are_read_equally_where_subnormals_are_zero(place, dtype, bits, size):
    """CuPy has kernels treat them so. Hosts decode the same from the message: no scale is subnormal."""
    array = (size * np.random.default_rng(0).uniform(-1, 1, 512)).astype(dtype)
    message, sent = place.empty(cpu.quadratic_bytes(512, bits), np.uint8), place.empty(512, dtype)
    out, on_host = place.empty(512, dtype), np.empty(512, dtype)
    with place.flushing():
        gpu.pack_quadratic(place.put(array), bits, message, sent)
        gpu.unpack_quadratic(message, [0], [512], bits, out)
    assert cpu.unpack_quadratic(message.get(), [0], [512], bits, on_host)
    np.testing.assert_array_equal(sent.get(), on_host)
    np.testing.assert_array_equal(out.get(), on_host)
    assert np.abs(array - on_host).max() <= np.abs(array).max()
