import numpy as np
import pytest
from device.kinds import with_specials

SIZES = [0, 1, 31, 32, 33, 63, 64, 65, 255, 257, 1000, 1024, 1025, 5000]


def pack(kernels, array, key=5):
    words = np.full(-(-array.size // 64), 0xDEADBEEFDEADBEEF, np.uint64)
    exponents = np.full(array.size, 99, np.uint8)
    sent = np.full(array.size, np.nan, array.dtype)
    return words, exponents, sent, kernels.pack_exponents(array, words, exponents, sent, key)


def made(size, dtype):
    """Numbers of all magnitudes, zeros of both signs, and powers of two."""
    rng = np.random.default_rng(size)
    array = (rng.laplace(size=size) * 10.0 ** rng.integers(-36, 36, size)).astype(dtype)
    array[::5] = 0
    array[1::10] = -0.0
    array[2::7] = 2.0 ** rng.integers(-20, 20, array[2::7].size)
    return array


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("key", [0, 0x0123456789ABCDEF])
def test_exponents_are_the_powers_of_two_next_to_elements(kernels, dtype, shift, key):
    kernels.shift = shift
    for size in SIZES:
        array = kernels.seen(made(size, dtype))
        words, exponents, sent, lost = pack(kernels, array, key)
        below = np.where(array == 0, 0, np.ldexp(0.5, np.frexp(np.abs(array.astype(np.float32)))[1]))
        magnitudes = np.abs(sent)
        assert ((magnitudes == below) | (magnitudes == 2 * below)).all()
        exactly = below == np.abs(array.astype(np.float32))
        assert (magnitudes[exactly] == below[exactly]).all()
        np.testing.assert_array_equal(np.signbit(sent), np.signbit(array))
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        np.testing.assert_array_equal(bits[:size], np.signbit(array))
        assert not bits[size:].any()
        np.testing.assert_array_equal(np.where(exponents == 0, 0, 2.0 ** (exponents.astype(float) - 127)), magnitudes)
        np.testing.assert_allclose(lost, np.square(array.astype(np.float64) - sent).sum(), rtol=1e-6)


@pytest.mark.parametrize("shift", [0, 1])
def test_exponents_unpack_to_what_was_sent(kernels, dtype, shift):
    kernels.shift = shift
    for size in SIZES:
        array = np.random.default_rng(size).normal(size=size).astype(dtype)
        words, exponents, sent, _ = pack(kernels, with_specials(array) if size > 200 else array)
        out = np.full(size, np.nan, dtype)
        kernels.unpack_exponents(words, exponents, out)
        np.testing.assert_array_equal(out, sent)
        total = np.arange(size).astype(dtype)
        expected = total + dtype(0.3) * sent
        kernels.unpack_exponents_add(words, exponents, 0.3, total)
        np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("value", [1.0, 1.5, 1.001, 1.999, 3.0e-39, 1e-40, 2.0**-126 * 1.25])
def test_exponents_are_right_on_average(kernels, value):
    """Subnormal numbers, too, which are rounded to the smallest normal one or to zero."""
    exact = float(kernels.seen(np.array(value, np.float32))) / 2.0**-126
    array, keys = np.full(4000, value, np.float32), range(10 if kernels.on_gpu else 50)
    draws = np.array([pack(kernels, array, key)[2] for key in keys], np.float64) / 2.0**-126
    assert abs(draws.mean() - exact) <= 4 * draws.std() / np.sqrt(draws.size) + 1e-12 * exact


def test_exponents_lose_an_eighth_of_the_energy_at_most(kernels):
    """The most is lost at 4/3 times a power of two."""
    for value, expected in ((4 / 3, 1 / 8), (1.5, 1 / 9), (1.0, 0.0), (1.75, 0.25 * 0.75 / 1.75**2)):
        array = np.full(100_000, value, np.float32)
        lost = pack(kernels, array)[3] / np.square(array, dtype=np.float64).sum()
        assert lost == pytest.approx(expected, abs=2e-3)
        assert lost <= 1 / 8 + 2e-3


def test_nonfinite_exponents_spoil_nothing_else(kernels, dtype):
    array = np.ones(300, dtype)
    array[[5, 100, 200]] = (np.nan, np.inf, -np.inf)
    sent, lost = pack(kernels, array)[2:]
    assert np.flatnonzero(~np.isfinite(sent)).tolist() == [5, 100, 200]
    assert (sent[100], sent[200]) == (np.inf, -np.inf)
    assert not np.isfinite(lost)


def test_exponents_without_a_power_of_two_above_saturate(kernels):
    assert (pack(kernels, np.full(1000, -3.3e38, np.float32))[2] == -(2.0**127)).all()
    assert (pack(kernels, np.full(1000, 1e300))[2] == 2.0**127).all()


@pytest.mark.parametrize("size", [1e-45, 1e-40, 2.0**-126, 3.3e38, 1e300])
def test_exponents_at_the_ends_of_the_range(kernels, dtype, size):
    with np.errstate(over="ignore"):
        array = np.full(300, size).astype(dtype)
    array[::3] *= -1
    sent = pack(kernels, kernels.seen(array), 4)[2]
    np.testing.assert_array_equal(np.signbit(sent), np.signbit(array))


def test_exponents_follow_the_key(kernels):
    array = np.random.default_rng(0).normal(size=1000)
    assert pack(kernels, array, 7)[2].tobytes() == pack(kernels, array, 7)[2].tobytes()
    for other in (8, 7 + 2**32):
        assert 0.2 < np.mean(pack(kernels, array, 7)[2] != pack(kernels, array, other)[2]) < 0.6
