import numpy as np
import pytest
from marks import slow
from mpicomp.kernels import cpu

DTYPES = [np.float32, slow(np.float64)]
SIZES = [0, 1, 63, 64, 65, 1000, 1024, 1025, 5000]


def pack(array, key=5):
    words = np.full(-(-array.size // 64), 0xDEADBEEFDEADBEEF, np.uint64)
    exponents = np.full(array.size, 99, np.uint8)
    sent = np.full(array.size, np.nan, array.dtype)
    return words, exponents, sent, cpu.pack_exponents(array, words, exponents, sent, key)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 1])
def test_powers_of_two_beside_the_elements(dtype, size, shift):
    rng = np.random.default_rng(size)
    array = (rng.laplace(size=size + shift) * 10.0 ** rng.integers(-20, 20, size + shift)).astype(dtype)[shift:]
    array[::5] = 0
    array[1::10] = -0.0
    array[2::7] = 2.0 ** rng.integers(-20, 20, array[2::7].size)
    words, exponents, sent, lost = pack(array)
    below = np.where(array == 0, 0, np.ldexp(0.5, np.frexp(np.abs(array.astype(np.float32)))[1]))
    magnitudes = np.abs(sent)
    assert ((magnitudes == below) | (magnitudes == 2 * below)).all()
    exactly = below == np.abs(array.astype(np.float32))
    assert (magnitudes[exactly] == below[exactly]).all()
    np.testing.assert_array_equal(np.signbit(sent), np.signbit(array))
    seen = np.unpackbits(words.view(np.uint8), bitorder="little")
    np.testing.assert_array_equal(seen[:size], np.signbit(array))
    assert not seen[size:].any()
    np.testing.assert_array_equal(np.where(exponents == 0, 0, 2.0 ** (exponents.astype(float) - 127)), magnitudes)
    np.testing.assert_allclose(lost, np.square(array.astype(np.float64) - sent).sum(), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 1])
def test_unpacking_gives_what_was_sent(dtype, size, shift):
    array = np.random.default_rng(size).normal(size=size).astype(dtype)
    words, exponents, sent, _ = pack(array)
    out = np.full(size + shift, np.nan, dtype)[shift:]
    cpu.unpack_exponents(words, exponents, out)
    assert out.tobytes() == sent.tobytes()
    total = np.arange(size + shift).astype(dtype)[shift:]
    expected = total + dtype(0.3) * sent
    cpu.unpack_exponents_add(words, exponents, 0.3, total)
    np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("value", [1.0, 1.5, 1.001, 1.999, 3.0e-39, 1e-40, 2.0**-126 * 1.25])
def test_the_mean_of_many_draws_is_the_element(value):
    """Subnormal numbers, too, which are rounded to the least normal one or to zero."""
    array = np.full(4000, value, np.float32)
    draws = np.array([pack(array, key)[2] for key in range(50)], np.float64) / 2.0**-126
    exact = float(np.float32(value)) / 2.0**-126
    assert abs(draws.mean() - exact) <= 4 * draws.std() / np.sqrt(draws.size) + 1e-12 * exact


def test_an_eighth_of_the_energy_is_lost_at_most():
    """The most is lost at 1.5 times a power of two: its half, squared, of 2.25."""
    for value, expected in ((4 / 3, 1 / 8), (1.5, 1 / 9), (1.0, 0.0), (1.75, 0.25 * 0.75 / 1.75**2)):
        array = np.full(100_000, value, np.float32)
        lost = pack(array)[3] / np.square(array, dtype=np.float64).sum()
        assert lost == pytest.approx(expected, abs=2e-3)
        assert lost <= 1 / 8 + 2e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so_and_spoils_nothing_else(dtype):
    array = np.ones(300, dtype)
    array[[5, 100, 200]] = (np.nan, np.inf, -np.inf)
    sent, lost = pack(array)[2:]
    assert np.flatnonzero(~np.isfinite(sent)).tolist() == [5, 100, 200]
    assert sent[100] == np.inf
    assert sent[200] == -np.inf
    assert not np.isfinite(lost)


def test_what_has_no_power_of_two_above_it_saturates():
    array = np.full(1000, -3.3e38, np.float32)
    assert (pack(array)[2] == -(2.0**127)).all()
    assert (pack(np.full(1000, 1e300))[2] == 2.0**127).all()


def test_keys_decide():
    array = np.random.default_rng(0).normal(size=1000)
    assert pack(array, 7)[2].tobytes() == pack(array, 7)[2].tobytes()
    for other in (8, 7 + 2**32):
        assert 0.2 < np.mean(pack(array, 7)[2] != pack(array, other)[2]) < 0.6
