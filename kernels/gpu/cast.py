"""16-bit wires: rounding to nearest even, saturating, with what was lost at hand."""

from typing import Any

from mpicomp.kernels.gpu.compile import launch, sweeps
from mpicomp.kernels.gpu.reduce import Partials


def narrow(array: Any, wire: str, out: Any, sent: Any = None) -> Any:
    """Round to 16 bits; see `mpicomp.kernels.cpu.narrow`.

    Parameters
    ----------
    array : device array, shape (n,)
        float32 or float64, contiguous.
    wire : {"fp16", "bf16"}
        IEEE half precision or bfloat16.
    out : device array of uint16, shape (n,)
        The 16-bit numbers as integers.
    sent : device array, shape (n,), optional
        Receives what the receiver will see, in the dtype of ``array``.

    Returns
    -------
    0-d device array
        Squared L2 norm of ``array - sent``.
    """
    blocks = sweeps(array.size, array.dtype)
    partials = Partials(blocks, 1)
    receiver = 0 if sent is None else sent
    launch("cast", f"narrow_{wire}", array.dtype, blocks, array, array.size, out, receiver, partials.memory)
    return partials.total(0)


def widen(source: Any, wire: str, out: Any) -> None:
    """Write 16-bit numbers, given as integers, to a float32 or float64 array of the same length."""
    launch("cast", f"widen_{wire}", out.dtype, sweeps(out.size, out.dtype), source, out.size, out)


def widen_add(source: Any, wire: str, out: Any) -> None:
    """Add 16-bit numbers, given as integers, to a float32 or float64 array of the same length."""
    launch("cast", f"widen_add_{wire}", out.dtype, sweeps(out.size, out.dtype), source, out.size, out)
