"""Nine bits an element: its sign, and the power of two to which its magnitude is rounded at random."""

from typing import Any

from mpicomp.kernels.cpu.random import halves
from mpicomp.kernels.gpu.compile import launch, strides
from mpicomp.kernels.gpu.reduce import Partials


def pack_exponents(array: Any, words: Any, exponents: Any, sent: Any, key: int) -> Any:
    """Round every magnitude to one of the two powers of two beside it; see `mpicomp.kernels.cpu.pack_exponents`."""
    blocks = strides(64 * words.size)
    partials = Partials(blocks, 1)
    launch(
        "exponents", "pack_exponents", array.dtype, blocks,
        array, array.size, *map(int, halves(key)), words, 2 * words.size, exponents, sent, partials.memory,
    )  # fmt: skip
    return partials.total(0)


def unpack_exponents(words: Any, exponents: Any, out: Any) -> None:
    """Write what `pack_exponents` has packed; see `mpicomp.kernels.cpu.unpack_exponents`."""
    launch("exponents", "unpack_exponents", out.dtype, strides(out.size), words, exponents, out, out.size)


def unpack_exponents_add(words: Any, exponents: Any, factor: float, out: Any) -> None:
    """Add ``factor`` times what `pack_exponents` has packed; see `mpicomp.kernels.cpu.unpack_exponents_add`."""
    launch(
        "exponents", "unpack_exponents_add", out.dtype, strides(out.size),
        words, exponents, float(factor), out, out.size,
    )  # fmt: skip
