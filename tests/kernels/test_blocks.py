import numpy as np
import pytest

SHAPES = [(1, 2), (4, 16), (7, 8)]
SIZES = [1, 2, 7, 15, 16, 17, 31, 32, 100, 1000, 5000]


def products(values, matrix):
    """In the order of the definition, with every product and every sum rounded: an independent slow computation."""
    number = values.dtype.type
    kept, block = matrix.shape
    code = []
    for start in range(0, values.size, block):
        for row in range(kept):
            total = number(0)
            for place, value in enumerate(values[start : start + block]):
                total = number(total + number(number(matrix[row, place]) * value))
            code.append(total)
    return np.array(code, values.dtype)


def sums(code, matrix, size):
    number = code.dtype.type
    kept, block = matrix.shape
    values = []
    for place in range(size):
        total = number(0)
        for row in range(kept):
            total = number(total + number(code[place // block * kept + row] * number(matrix[row, place % block])))
        values.append(total)
    return np.array(values, code.dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_coded_by_definition_to_the_bit(kernels, dtype, shape):
    """A rank has to decode what all others decode, whether or not their processors fuse products and sums."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal(shape).astype(np.float32)
    for size in SIZES if shape == (7, 8) else SIZES[:-1]:
        values = rng.standard_normal(size).astype(dtype)
        code = np.full(-(-size // shape[1]) * shape[0], np.nan, dtype)  # rubbish: every number has to be written
        kernels.encode_blocks(values, matrix, code)
        np.testing.assert_array_equal(code, products(values, matrix))
        out = np.full(size, np.nan, dtype)
        kernels.decode_blocks(code, matrix, out)
        np.testing.assert_array_equal(out, sums(code, matrix, size))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_elements_stay_in_their_block(kernels, bad):
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((2, 8)).astype(np.float32)
    values = rng.standard_normal(24).astype(np.float32)
    clean, code, out = np.empty(6, np.float32), np.empty(6, np.float32), np.empty(24, np.float32)
    kernels.encode_blocks(values, matrix, clean)
    values[11] = bad
    kernels.encode_blocks(values, matrix, code)
    assert not np.isfinite(code[2:4]).any()
    np.testing.assert_array_equal(code[[0, 1, 4, 5]], clean[[0, 1, 4, 5]])
    kernels.decode_blocks(code, matrix, out)
    assert not np.isfinite(out[8:16]).any()
    assert np.isfinite(out[:8]).all()
    assert np.isfinite(out[16:]).all()
