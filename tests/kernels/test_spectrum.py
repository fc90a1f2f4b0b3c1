import numpy as np
import pytest
from marks import slow
from mpicomp.kernels import cpu

DTYPES = [np.float32, slow(np.float64)]


def spectrum(array, **settings):
    counts, energies = np.full(cpu.BINS, -1, np.int64), np.full(cpu.BINS, np.nan)
    cpu.spectrum(array, counts, energies, **settings)
    return counts, energies


def slow(array):
    """Bin by comparing with the edges."""
    edges = cpu.edges()
    finite = edges[np.isfinite(edges)]
    magnitudes = np.abs(array.astype(np.float32)).astype(np.float64)
    places = np.searchsorted(finite, magnitudes, side="right") - 1
    counts, energies = np.zeros(cpu.BINS, np.int64), np.zeros(cpu.BINS)
    np.add.at(counts, places, 1)
    np.add.at(energies, places, array.astype(np.float64) ** 2)
    return counts, energies


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 1023, 1025, 50_000, 300_000])
def test_counts_and_energies(dtype, size):
    array = (np.random.default_rng(size).standard_t(2, size) * 1e-3).astype(dtype)
    array[: size // 10] = 0
    counts, energies = spectrum(array)
    expected_counts, expected_energies = slow(array)
    np.testing.assert_array_equal(counts, expected_counts)
    np.testing.assert_allclose(energies, expected_energies, rtol=4e-3)
    np.testing.assert_allclose(energies.sum(), expected_energies.sum(), rtol=1e-3)


def test_equal_elements_are_the_worst_case():
    for value in (1.0, 1.0039, 3.7, 1e-20):
        array = np.full(400_000, value, np.float32)
        counts, energies = spectrum(array)
        assert counts.max() == array.size
        np.testing.assert_allclose(energies.sum(), array.size * float(array[0]) ** 2, rtol=4e-3)


def test_infinity_nan_denormal_and_zero():
    array = np.array([np.inf, -np.inf, np.nan, 1e-45, 0.0, -0.0, 3.4e38], np.float32)
    counts, _ = spectrum(array)
    assert counts[2040:].sum() == 3
    assert counts[0] == 3
    assert counts[2039] == 1
    assert counts.sum() == 7
    counts, _ = spectrum(np.tile(array, 50_000))
    assert counts[2040:].sum() == 150_000
    assert counts.sum() == 350_000


@pytest.mark.parametrize("size", [10_000, 2_000_000])
def test_a_sample_takes_every_sth_group(size):
    array = np.random.default_rng(1).laplace(size=size).astype(np.float32)
    groups = [array[start : start + 256] for start in range(0, size, 256 * 5)]
    counts, energies = spectrum(array, stride=5)
    expected_counts, expected_energies = slow(np.concatenate(groups))
    np.testing.assert_array_equal(counts, expected_counts)
    np.testing.assert_allclose(energies.sum(), expected_energies.sum(), rtol=1e-4)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("stride", [1, 4])
def test_threads_find_the_same(threads, stride):
    array = np.random.default_rng(2).laplace(size=2_000_003).astype(np.float32)
    counts, energies = spectrum(array, stride=stride)
    also = spectrum(array, stride=stride, threads=threads)
    np.testing.assert_array_equal(also[0], counts)
    np.testing.assert_allclose(also[1], energies, rtol=1e-12)


def test_a_spectrum_tells_threshold_and_gain_of_a_selection():
    array = np.random.default_rng(3).laplace(size=1_000_000).astype(np.float32)
    counts, energies = spectrum(array)
    k = 10_000
    above = np.cumsum(counts[::-1])[::-1]
    bin_of_threshold = np.flatnonzero(above >= k)[-1]
    magnitudes = np.sort(np.abs(array))[::-1]
    edges = cpu.edges()
    assert edges[bin_of_threshold] <= magnitudes[k - 1] < edges[bin_of_threshold + 1]
    kept = energies[bin_of_threshold + 1 :].sum()
    exact = np.square(magnitudes[: above[bin_of_threshold + 1]], dtype=np.float64).sum()
    np.testing.assert_allclose(kept, exact, rtol=1e-4)
