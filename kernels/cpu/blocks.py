"""Blocks of neighbours times a small matrix, and back: the products of a linear code.

The last block may be shorter; what it lacks counts as zeros.
"""

from mpicomp.kernels.cpu.compile import Floats, Singles, exact


def encode_blocks(values: Floats, matrix: Singles, out: Floats) -> None:
    """Multiply each block by a float32 matrix of shape (kept, block), with the same bits on every processor.

    ``out`` receives ``kept`` numbers for each block, in the dtype of ``values``.
    """
    _encode_blocks(values, matrix, out)


def decode_blocks(code: Floats, matrix: Singles, out: Floats) -> None:
    """Multiply the numbers of each block by the matrix from the right, ``code @ matrix``, rounded as in encoding."""
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
