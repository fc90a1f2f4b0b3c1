import itertools
import statistics

import numpy as np
import pytest
from device.kinds import with_specials
from mpicomp.kernels import cpu
from mpicomp.kernels.gpu.products import PART, ROWS
from oracle import cells_of, estimates_of, table_of

SIZES = [0, 1, 7, 8, 257, 1025, 2049]
KEY = 0x0123456789ABCDEF


def sketched(kernels, array, key, rows, columns):
    table = np.zeros((rows, columns), array.dtype)
    kernels.sketch_add(array, key, table)
    return table


def estimates(kernels, table, key, size):
    out = np.full(size, np.nan, table.dtype)
    kernels.sketch_estimate(table, key, out)
    return out


@pytest.mark.parametrize(("rows", "columns"), [(1, 37), (3, 64), (5, 1), (7, 37)])
def test_tables_and_estimates_are_those_of_dictionaries(kernels, dtype, rows, columns):
    for size in SIZES:
        # Sums of whole numbers are exact in whatever order they are made.
        array = np.random.default_rng(size).integers(-50, 50, size).astype(dtype)
        key = KEY + rows
        cells = table_of(array, key, rows, columns)
        table = sketched(kernels, array, key, rows, columns)
        np.testing.assert_array_equal(table, [[cells[row, column] for column in range(columns)] for row in range(rows)])
        np.testing.assert_array_equal(
            estimates(kernels, table, key, size), estimates_of(cells, key, rows, columns, size)
        )


@pytest.mark.parametrize("columns", [1, 37, PART - 1, PART, PART + 1, 5000])
@pytest.mark.parametrize("special", [False, True])
def test_sketches_add_in_the_order_of_elements(kernels, dtype, columns, special):
    for size in (7, 257, 2049) if columns < 5000 else (2047, 5000):
        rng = np.random.default_rng(size)
        array = (rng.standard_t(3, size) * 10.0 ** rng.integers(-5, 5, size)).astype(dtype)
        array = kernels.seen(with_specials(array)) if special else array
        table = rng.normal(size=(3, columns)).astype(dtype)
        expected = table.copy()
        with np.errstate(all="ignore"):
            for index, value in enumerate(array):
                for row, column, sign in cells_of(index, KEY, 3, columns):
                    expected[row, column] += sign * value
        kernels.sketch_add(array, KEY, table)
        np.testing.assert_array_equal(table, expected)


@pytest.mark.parametrize("rows", [1, 3, 5, 7, ROWS])
def test_estimates_on_a_gpu_are_those_of_the_host(gpu_kernels, dtype, rows):
    """Also of equal numbers, zeros of both signs and numbers of all kinds; the fixture compares bits."""
    for columns in (1, 37, 3000):
        table = np.random.default_rng(rows).normal(size=(rows, columns)).astype(dtype)
        table[:, 1::3] = np.round(table[:, 1::3])
        if columns > 100:
            table = gpu_kernels.seen(with_specials(table.reshape(-1)).reshape(rows, columns))
        for size in (1, 7, 257, 5000):
            estimates(gpu_kernels, table, KEY, size)


def test_sketches_of_too_many_rows_are_refused_on_a_gpu(gpu_kernels):
    with pytest.raises(ValueError, match="at most 15 rows, got 17: take fewer rows"):
        estimates(gpu_kernels, np.zeros((ROWS + 2, 4), np.float32), 1, 3)


@pytest.mark.parametrize("rows", [1, 3, 5, 7])
def test_the_middle_of_any_order_is_found(kernels, rows):
    """An order that finds the middle of all zeros and ones finds that of all numbers."""
    cells = [list(cells_of(0, 3, rows, 4))]
    for values in itertools.product([0.0, 1.0], repeat=rows):
        table = np.full((rows, 4), np.nan, np.float32)
        for row, column, sign in cells[0]:
            table[row, column] = sign * values[row]
        assert estimates(kernels, table, 3, 1)[0] == statistics.median(values)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_elements_are_found_among_many_small_ones(dtype):
    rng = np.random.default_rng(2)
    array = rng.normal(size=100_000).astype(dtype)
    heavy = rng.choice(array.size, 10, replace=False)
    array[heavy] = np.where(rng.random(10) < 0.5, -1, 1) * rng.uniform(100, 200, 10)
    found = estimates(cpu, sketched(cpu, array, KEY, 5, 5000), KEY, array.size)
    assert set(np.argsort(-np.abs(found))[:10]) == set(heavy)
    noise = np.linalg.norm(array) / np.sqrt(5000)
    assert np.abs(found - array)[heavy].max() < 3 * noise


def test_estimates_are_right_on_the_average_of_keys():
    rng = np.random.default_rng(3)
    array = rng.normal(size=200)
    for rows in (1, 3):
        drawn = np.array([estimates(cpu, sketched(cpu, array, key, rows, 40), key, 200) for key in range(2000)])
        deviation = drawn.std(axis=0) / np.sqrt(2000)
        assert (np.abs(drawn.mean(axis=0) - array) / deviation).max() < 4.5


def test_columns_are_filled_evenly_and_signs_are_even():
    ones = np.ones(1 << 20, np.float64)
    columns = 1000
    expected = ones.size / columns
    for key in (0, 1, KEY):
        table = sketched(cpu, ones, key, 3, columns)  # as many plus as minus, to chance
        assert np.abs(table).max() < 5.5 * np.sqrt(expected)
        assert abs(table.sum()) < 5 * np.sqrt(3 * ones.size)
    counts = np.zeros(columns)
    for index in range(20_000):
        _, column, _ = next(cells_of(index, KEY, 1, columns))
        counts[column] += 1
    chi = np.square(counts - 20).sum() / 20
    assert abs(chi - columns) < 5 * np.sqrt(2 * columns)


def test_rows_and_keys_scatter_apart():
    size, columns = 4000, 64
    places = np.array([[column for _, column, _ in cells_of(index, KEY, 3, columns)] for index in range(size)])
    other = np.array([[column for _, column, _ in cells_of(index, KEY + 1, 3, columns)] for index in range(size)])
    for left, right in [(places[:, 0], places[:, 1]), (places[:, 1], places[:, 2]), (places[:, 0], other[:, 0])]:
        share = (left == right).mean()
        assert abs(share - 1 / columns) < 5 / np.sqrt(size * columns)


def test_cells_are_cleared_where_elements_are(kernels):
    array = np.arange(1, 201, dtype=np.float32)
    table = sketched(kernels, array, 9, 3, 50)
    for chosen in ([], [7], [7, 150], range(0, 200, 7)):
        cleared, expected = table.copy(), table.copy()
        for index in chosen:
            for row, column, _ in cells_of(index, 9, 3, 50):
                expected[row, column] = 0
        kernels.sketch_clear(np.array(chosen, np.uint32), 9, cleared)
        np.testing.assert_array_equal(cleared, expected)
