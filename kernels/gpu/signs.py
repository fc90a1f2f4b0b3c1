"""One bit an element: its sign, and for each block of elements the one magnitude that stands for all of them."""

from typing import Any

from mpicomp.kernels.gpu.compile import THREADS, launch, strides
from mpicomp.kernels.gpu.reduce import Partials


def pack_signs(array: Any, block: int, scales: Any, words: Any, sent: Any = None) -> Any:
    """Reduce an array to its signs and the mean magnitude of each block; see `mpicomp.kernels.cpu.pack_signs`."""
    blocks = strides(scales.size * THREADS)  # of threads, each of which goes through some blocks of elements
    partials = Partials(blocks, 1)
    receiver = 0 if sent is None else sent
    launch(
        "signs", "pack_signs", array.dtype, blocks,
        array, array.size, block, scales, scales.size, words, receiver, partials.memory,
    )  # fmt: skip
    return partials.total(0)


def unpack_signs(scales: Any, words: Any, block: int, out: Any) -> None:
    """Write what `pack_signs` has packed; see `mpicomp.kernels.cpu.unpack_signs`."""
    launch("signs", "unpack_signs", out.dtype, strides(out.size), scales, words, block, 1.0, out, out.size)


def unpack_signs_add(scales: Any, words: Any, block: int, factor: float, out: Any) -> None:
    """Add ``factor`` times what `pack_signs` has packed; see `mpicomp.kernels.cpu.unpack_signs_add`."""
    launch(
        "signs", "unpack_signs_add", out.dtype, strides(out.size), scales, words, block, float(factor), out, out.size
    )
