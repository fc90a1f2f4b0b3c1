"""How every kernel here is compiled."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from mpicomp.kernels.cache import cached

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """Compile with Numba: kept on disk, without the GIL, sums reassociated so that they vectorise.

    NaN and infinity keep their meaning (no ``nnan``, no ``ninf``): the kernels have to find them.
    """
    compiled: Function = numba.njit(nogil=True, fastmath={"reassoc", "contract", "nsz"})(function)
    return cached(compiled)
