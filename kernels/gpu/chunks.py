"""The largest magnitudes of each chunk of an array; equal ones go to the lowest index."""

from typing import Any

from mpicomp.kernels.gpu.compile import launch


def select_in_chunks(array: Any, chunk: int, k: int, rest: int, indices: Any, values: Any) -> None:
    """Write the largest elements of each chunk, in one launch; see `mpicomp.kernels.cpu.select_in_chunks`."""
    blocks = -(-array.size // chunk)
    launch("chunks", "select_in_chunks", array.dtype, blocks, array, array.size, chunk, k, rest, indices, values)
