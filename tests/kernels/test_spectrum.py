import numpy as np
import pytest
from mpicomp.kernels import cpu


def spectrum(kernels, array, **settings):
    counts, energies = np.full(cpu.BINS, -1, np.int64), np.full(cpu.BINS, np.nan)
    kernels.spectrum(array, counts, energies, **settings)
    return counts, energies


def slowly(array):
    edges = cpu.edges()
    finite = edges[np.isfinite(edges)]
    magnitudes = np.abs(array.astype(np.float32)).astype(np.float64)
    places = np.searchsorted(finite, magnitudes, side="right") - 1
    counts, energies = np.zeros(cpu.BINS, np.int64), np.zeros(cpu.BINS)
    np.add.at(counts, places, 1)
    np.add.at(energies, places, array.astype(np.float64) ** 2)
    return counts, energies


@pytest.mark.parametrize("size", [0, 1, 1023, 1025, 70_000, 300_000])
@pytest.mark.parametrize("stride", [1, 3])
def test_spectrum_counts_and_energies(kernels, dtype, size, stride):
    if size == 300_000 and kernels.on_gpu:
        pytest.skip("a GPU has no other path for large arrays")
    array = (np.random.default_rng(size).standard_t(2, size) * 1e-3).astype(dtype)
    array[: size // 10] = 0
    counts, energies = spectrum(kernels, array, stride=stride)
    expected_counts, expected_energies = slowly(array[np.arange(size) // cpu.GROUP % stride == 0])
    np.testing.assert_array_equal(counts, expected_counts)
    np.testing.assert_allclose(energies, expected_energies, rtol=1e-4 if kernels.on_gpu else 4e-3)
    np.testing.assert_allclose(energies.sum(), expected_energies.sum(), rtol=1e-3)
    assert spectrum(kernels, array, stride=stride)[1].tobytes() == energies.tobytes()


def test_spectrum_of_special_numbers(kernels, dtype):
    array = np.array([np.inf, -np.inf, np.nan, 1e-45, 0.0, -0.0, 3.4e38, 1], dtype)
    counts, energies = spectrum(kernels, array)
    assert (counts[2040], counts[2044], counts[0], counts[2039], counts[127 * 8]) == (2, 1, 3, 1, 1)
    assert energies[0] < 1e-70
    if kernels.on_gpu:
        assert energies[2040] == np.inf
        assert np.isnan(energies[2044])
    else:
        counts, _ = spectrum(kernels, np.tile(array, 50_000))
        assert (counts[2040:].sum(), counts.sum()) == (150_000, 400_000)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("stride", [1, 4])
def test_spectrum_of_several_threads_is_the_same(threads, stride):
    array = np.random.default_rng(2).laplace(size=2_000_003).astype(np.float32)
    counts, energies = spectrum(cpu, array, stride=stride)
    other = spectrum(cpu, array, stride=stride, threads=threads)
    np.testing.assert_array_equal(other[0], counts)
    np.testing.assert_allclose(other[1], energies, rtol=1e-12)
