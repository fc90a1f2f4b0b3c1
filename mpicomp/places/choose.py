"""Which place arrays belong to."""

import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from mpicomp.places import driver as cuda
from mpicomp.places.cuda import CudaPlace
from mpicomp.places.place import HOST, Place


def common_place(arrays: Sequence[Any]) -> Place:
    """Return a place for a bucket of arrays: that of a GPU where all of them are on it, else the host.

    Without CuPy, or without CUDA's driver, it is the host, to which they are then copied whole.
    """
    driver = cuda.driver()
    devices = set()
    for array in arrays:
        found = cuda.device_array(array)
        if found is None or driver is None:
            return HOST
        if found.size:
            devices.add(driver.device_of(found.address))
    if len(devices) != 1 or not _has_cupy():
        return HOST
    return CudaPlace(devices.pop())


def on_device(arrays: Iterable[Any]) -> bool:
    """Return whether a bucket of some of these arrays would live on a GPU."""
    return cuda.driver() is not None and any(cuda.device_array(array) is not None for array in arrays) and _has_cupy()


@functools.cache
def _has_cupy() -> bool:
    try:
        import cupy  # noqa: F401
    except ImportError:
        warnings.warn(
            "mpicomp: gradients are on a GPU and CuPy is not installed, so they are copied to the host whole; "
            "pip install 'mpicomp[cuda12]' (or cuda13) has them compressed on the GPU",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
