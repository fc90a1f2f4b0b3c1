"""A few bits an element: its place on a grid of equal steps that each bucket of elements has for itself.

A bucket is measured by 32 threads: as many buckets as a device has room for at once are measured together, and one
that is as long as the array takes long.
"""

from typing import Any

from mpicomp.kernels.cpu.random import halves
from mpicomp.kernels.gpu.compile import launch, strides
from mpicomp.kernels.gpu.reduce import Partials


def pack_grid(
    array: Any, bucket: int, bits: int, norm: str, steps: Any, words: Any, sent: Any, key: int | None = None
) -> Any:
    """Round to a symmetric grid that reaches as far as the norm of each bucket; see `mpicomp.kernels.cpu.pack_grid`.

    An L2 norm is summed in another order than there: a step may differ in its last bit, which travels with the codes.
    """
    offset = (1 << (bits - 1)) - 1
    launch(
        "grid", "measure_norms", array.dtype, strides(32 * steps.size),
        array, array.size, bucket, int(norm == "l2"), offset, steps, steps.size,
    )  # fmt: skip
    return _pack(array, bucket, bits, 2 * offset, offset, 0, steps, words, sent, key)


def pack_range(
    array: Any, bucket: int, bits: int, bases: Any, steps: Any, words: Any, sent: Any, key: int | None = None
) -> Any:
    """Round to a grid from the least to the largest element of each bucket; see `mpicomp.kernels.cpu.pack_range`."""
    points = (1 << bits) - 1
    launch(
        "grid", "measure_ranges", array.dtype, strides(32 * steps.size),
        array, array.size, bucket, points, bases, steps, steps.size,
    )  # fmt: skip
    return _pack(array, bucket, bits, points, 0, bases, steps, words, sent, key)


def unpack_grid(bases: Any, steps: Any, words: Any, bucket: int, bits: int, out: Any) -> None:
    """Write what `pack_grid` or `pack_range` has packed; see `mpicomp.kernels.cpu.unpack_grid`."""
    _unpack("unpack_grid", bases, steps, words, bucket, bits, 1.0, out)


def unpack_grid_add(bases: Any, steps: Any, words: Any, bucket: int, bits: int, factor: float, out: Any) -> None:
    """Add ``factor`` times what was packed; see `mpicomp.kernels.cpu.unpack_grid_add`."""
    _unpack("unpack_grid_add", bases, steps, words, bucket, bits, float(factor), out)


def _pack(
    array: Any, bucket: int, bits: int, points: int, offset: int, bases: Any, steps: Any, words: Any, sent: Any,
    key: int | None,
) -> Any:  # fmt: skip
    groups = 2 * (words.size // bits)  # of 32 elements
    blocks = strides(32 * groups)
    partials = Partials(blocks, 1)
    low, high = (0, 0) if key is None else map(int, halves(key))
    launch(
        "grid", "pack_codes", array.dtype, blocks,
        array, array.size, bucket, bits, points, offset, bases, steps, int(key is not None), low, high, words, groups,
        sent, partials.memory,
    )  # fmt: skip
    return partials.total(0)


def _unpack(name: str, bases: Any, steps: Any, words: Any, bucket: int, bits: int, factor: float, out: Any) -> None:
    launch(
        "grid", name, out.dtype, strides(out.size),
        0 if bases is None else bases, steps, words, bucket, bits, factor, out, out.size,
    )  # fmt: skip
