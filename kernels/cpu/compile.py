"""Decorators that compile the kernels of this package with Numba."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from mpicomp.kernels.cache import cached
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])

Bytes = NDArray[np.uint8]
Floats = NDArray[np.floating]
Indices = NDArray[np.uint32]
Singles = NDArray[np.float32]
Words = NDArray[np.uint64]


def kernel(function: Function) -> Function:
    """Compile with Numba: kept on disk, without the GIL, sums reassociated so that they vectorise.

    NaN and infinity keep their meaning (no ``nnan``, no ``ninf``): the kernels have to find them.
    """
    compiled: Function = numba.njit(nogil=True, fastmath={"reassoc", "contract", "nsz"})(function)
    return cached(compiled)


def exact(function: Function) -> Function:
    """Compile as `kernel` does, but so that every processor rounds alike: for what ranks work out for themselves.

    A product and a sum that some processors can do in one go are done in two, and no sum changes its order.
    """
    # Said, since what is left out would be taken over from the first kernel that calls the function.
    compiled: Function = numba.njit(nogil=True, fastmath=False)(function)
    return cached(compiled)
