"""Compilation of the kernels of this package with Numba, and sweeps that several threads share.

Kernels run without the GIL, each on a part of the array.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numba
import numpy as np
from mpicomp.kernels.cache import cached
from numpy.typing import NDArray

from mpicomp.errors import ConfigurationError

Function = TypeVar("Function", bound=Callable[..., Any])
Outcome = TypeVar("Outcome")

Bytes = NDArray[np.uint8]
Floats = NDArray[np.floating]
Indices = NDArray[np.uint32]
Singles = NDArray[np.float32]
Words = NDArray[np.uint64]

# Nothing calls a kernel back from C: the wrapper for that took 6 % of compiling.
_OPTIONS: dict[str, Any] = {"nogil": True, "no_cfunc_wrapper": True}
_GRAIN = 1 << 16  # elements; less than that is swept sooner than a thread is woken


def kernel(function: Function) -> Function:
    """Compile with Numba: kept on disk, without the GIL, sums reassociated so that they vectorise.

    NaN and infinity keep their meaning (no ``nnan``, no ``ninf``): the kernels have to find them.
    """
    return _compiled(function, {"reassoc", "contract", "nsz"})


def exact(function: Function) -> Function:
    """Compile without FMA and reassociation, so that results that every rank computes for itself have the same bits."""
    # Explicit: Numba would take a missing option from the first kernel that calls the function.
    return _compiled(function, False)


def _compiled(function: Function, fastmath: set[str] | bool) -> Function:
    if numba.config.DISABLE_JIT:
        refuses: Any = functools.wraps(function)(lambda *_, **__: check_compiler())
        return refuses  # type: ignore[no-any-return]
    compiled: Function = numba.njit(**_OPTIONS, fastmath=fastmath)(function)
    return cached(compiled)


def check_compiler() -> None:
    """Refuse to run where kernels are not compiled: their vector instructions need a compiler."""
    if numba.config.DISABLE_JIT:
        raise ConfigurationError(
            "kernels: NUMBA_DISABLE_JIT=1 keeps Numba from compiling them, and they do not run uncompiled; unset it. "
            "Debuggers and coverage see the rest of mpicomp without it"
        )


def cut(size: int, threads: int) -> list[slice]:
    """Cut ``size`` elements into at most ``threads`` parts, each long enough to be worth a thread.

    >>> cut(10, 4), cut(1 << 20, 2)
    ([slice(0, 10, None)], [slice(0, 524288, None), slice(524288, 1048576, None)])
    >>> len(cut(400_001, 3))
    3
    """
    parts = max(1, min(threads, size // _GRAIN))
    length = -(-size // parts // 64) * 64  # parts begin where cache lines do, if the array does
    return [slice(start, min(start + length, size)) for start in range(0, size, length)] if size else [slice(0, 0)]


def spread(task: Callable[[slice], Outcome], parts: list[slice]) -> list[Outcome]:
    """Run a task on every part, the first one on this thread, and return the outcomes in order."""
    if len(parts) == 1:
        return [task(parts[0])]
    others = [_pool(len(parts) - 1).submit(task, part) for part in parts[1:]]
    return [task(parts[0]), *(other.result() for other in others)]


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="mpicomp-kernel")
