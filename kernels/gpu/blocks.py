"""Blocks of neighbours times a small matrix, and back: the products of a linear code."""

from typing import Any

from mpicomp.kernels.gpu.compile import launch, strides


def encode_blocks(values: Any, matrix: Any, out: Any) -> None:
    """Multiply each block by a matrix from the left; see `mpicomp.kernels.cpu.encode_blocks`."""
    kept, block = matrix.shape
    blocks = strides(out.size)
    launch("blocks", "encode_blocks", out.dtype, blocks, values, values.size, matrix, kept, block, out, out.size)


def decode_blocks(code: Any, matrix: Any, out: Any) -> None:
    """Multiply the numbers of each block by a matrix from the right; see `mpicomp.kernels.cpu.decode_blocks`."""
    kept, block = matrix.shape
    launch("blocks", "decode_blocks", out.dtype, strides(out.size), code, matrix, kept, block, out, out.size)
