"""Whole-array sweeps that belong to no family."""

import numpy as np
from mpicomp.kernels.cpu.bits import as_bits, mask_of
from mpicomp.kernels.cpu.compile import kernel
from numpy.typing import NDArray


def scale(array: NDArray[np.floating], factor: float) -> int:
    """Multiply in place and give the largest magnitude of the result as bits (see `is_finite`).

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.kernels.cpu import is_finite
    >>> array = np.array([2, np.nan], np.float32)
    >>> is_finite(scale(array, 0.5), array.dtype), float(array[0])
    (False, 1.0)
    """
    return int(_scale(array, as_bits(array), mask_of(array.dtype), array.dtype.type(factor)))


@kernel
def _scale(array, bits, mask, factor):  # type: ignore[no-untyped-def]
    top = mask ^ mask
    for i in range(array.size):
        array[i] *= factor
        top = max(top, bits[i] & mask)
    return top
