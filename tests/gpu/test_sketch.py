"""Count sketches are those of `mpicomp.kernels.cpu`, bit for bit: in an emulation on the host, and on a GPU."""

import numpy as np
import pytest
from gpu.alike import assert_alike, with_specials
from marks import slow
from mpicomp.kernels import cpu, gpu
from mpicomp.kernels.gpu.products import PART, ROWS

DTYPES = [np.float32, slow(np.float64)]
SIZES = [0, 1, 7, 8, 257, 2047, 2048, 2049, 5000]
COLUMNS = [1, 37, PART - 1, PART, PART + 1, 5000]
KEY = 0x0123456789ABCDEF


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [slow(1), 3, slow(7)])
@pytest.mark.parametrize("columns", COLUMNS)
def test_tables(place, dtype, rows, columns):
    """Added to what is there, in the order of the elements."""
    for size in SIZES:
        rng = np.random.default_rng(size)
        array = (rng.standard_t(3, size) * 10.0 ** rng.integers(-5, 5, size)).astype(dtype)
        table = rng.normal(size=(rows, columns)).astype(dtype)
        far, there = place.put(array), place.put(table).reshape(rows, columns)
        with place.quiet():
            gpu.sketch_add(far, KEY + rows, there)
        cpu.sketch_add(array, KEY + rows, table)
        assert_alike(there.reshape(-1), table)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_of_numbers_of_all_kinds(place, dtype):
    array = with_specials(np.random.default_rng(0).normal(size=3000).astype(dtype))
    table = np.zeros((3, 100), dtype)
    there = place.put(table).reshape(3, 100)
    gpu.sketch_add(place.put(array), 1, there)
    with np.errstate(all="ignore"):
        cpu.sketch_add(array, 1, table)
    assert 1 < np.isnan(table).sum() < 100
    assert_alike(there.reshape(-1), table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 5, 7, ROWS])
@pytest.mark.parametrize("columns", [1, 37, 3000])
def test_estimates(place, dtype, rows, columns):
    for size in SIZES:
        table = np.random.default_rng(size).normal(size=(rows, columns)).astype(dtype)
        if columns > 1:
            table[:, ::3] = np.round(table[:, ::3])  # equal ones, and zeros of both signs
        if columns > 100:
            table = place.seen(with_specials(table.reshape(-1)).reshape(rows, columns))
        out = np.empty(size, dtype)
        there, there_out = place.put(table).reshape(rows, columns), place.empty(size, dtype)
        with place.quiet():
            gpu.sketch_estimate(there, KEY, there_out)
        cpu.sketch_estimate(table, KEY, out)
        assert_alike(there_out, out)


def test_more_rows_than_a_device_has_room_for(place):
    table = place.zeros((ROWS + 2) * 4, np.float32).reshape(ROWS + 2, 4)
    with pytest.raises(ValueError, match="at most 15 rows, got 17: take fewer rows"):
        gpu.sketch_estimate(table, 1, place.empty(3, np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 300])
def test_cleared_cells(place, dtype, count):
    rng = np.random.default_rng(count)
    table = rng.normal(size=(3, 1000)).astype(dtype)
    indices = np.sort(rng.choice(100_000, count, replace=False)).astype(np.uint32)
    there, chosen = place.put(table).reshape(3, 1000), place.put(indices)
    with place.quiet():
        gpu.sketch_clear(chosen, KEY, there)
    cpu.sketch_clear(indices, KEY, table)
    assert (count == 0) == table.all()
    assert_alike(there.reshape(-1), table)
