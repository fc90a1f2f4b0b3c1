"""Blocks of neighbours times a small matrix, and back: the products of a linear code.

The last block may be shorter; what it lacks counts as zeros.
"""

import numpy as np
from mpicomp.kernels.cpu.compile import exact
from numpy.typing import NDArray


def encode_blocks(values: NDArray[np.floating], matrix: NDArray[np.float32], out: NDArray[np.floating]) -> None:
    """Multiply each block by a matrix from the left.

    Parameters
    ----------
    values : array, shape (n,)
        float32 or float64.
    matrix : array of float32, shape (kept, block)
        Contiguous.
    out : array, shape (ceil(n / block) * kept,)
        Receives the products, in the dtype of ``values``: the same bits on every processor.

    Examples
    --------
    >>> import numpy as np
    >>> values, out = np.array([1, 2, 3], np.float32), np.empty(2, np.float32)
    >>> encode_blocks(values, np.array([[10, 1]], np.float32), out)
    >>> out.tolist()
    [12.0, 30.0]
    """
    _encode_blocks(values, matrix, out)


def decode_blocks(code: NDArray[np.floating], matrix: NDArray[np.float32], out: NDArray[np.floating]) -> None:
    """Multiply the numbers of each block by a matrix from the right: ``code @ matrix``.

    Parameters
    ----------
    code : array, shape (ceil(n / block) * kept,)
        float32 or float64.
    matrix : array of float32, shape (kept, block)
        Contiguous.
    out : array, shape (n,)
        Receives the blocks, in the dtype of ``code``: the same bits on every processor.

    Examples
    --------
    >>> import numpy as np
    >>> code, out = np.array([2, 3], np.float32), np.empty(3, np.float32)
    >>> decode_blocks(code, np.array([[10, 1]], np.float32), out)
    >>> out.tolist()
    [20.0, 2.0, 30.0]
    """
    _decode_blocks(code, matrix, out)


@exact
def _encode_blocks(values, matrix, out):  # type: ignore[no-untyped-def]
    number = out.dtype.type
    kept, block = matrix.shape
    for place in range(out.size // kept):
        start = place * block
        stop = min(start + block, values.size)
        for row in range(kept):
            product = number(0)
            for i in range(start, stop):
                product += number(matrix[row, i - start]) * values[i]
            out[place * kept + row] = product


@exact
def _decode_blocks(code, matrix, out):  # type: ignore[no-untyped-def]
    number = out.dtype.type
    kept, block = matrix.shape
    for place in range(code.size // kept):
        start = place * block
        stop = min(start + block, out.size)
        for i in range(start, stop):
            out[i] = number(0)
        for row in range(kept):
            factor = code[place * kept + row]
            for i in range(start, stop):
                out[i] += factor * number(matrix[row, i - start])
