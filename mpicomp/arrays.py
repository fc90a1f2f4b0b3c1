"""Conversion of NumPy, CuPy and torch arrays to host arrays and back, without an import of torch or CuPy."""

import functools
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.errors import ArrayTypeError

WORK_DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float32),
    "bfloat16": np.dtype(np.float32),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
"""The dtype of sums and residuals for each gradient dtype."""

_BFLOAT16_EXPONENT = 0x7F80  # bits that are all set in infinity and NaN


@dataclass(frozen=True)
class ArraySpec:
    """Name, dtype and shape of one array, the same on all ranks."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def work_dtype(self) -> np.dtype[Any]:
        """The dtype that the array is summed in."""
        return WORK_DTYPES[self.dtype]


@functools.cache  # a tenth of the time in which NumPy formats a name
def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _library(array: Any) -> str | None:
    kind: type = type(array)
    return _library_of(kind)


@functools.cache
def _library_of(kind: type) -> str | None:
    if issubclass(kind, np.ndarray):
        return "numpy"
    for cls in kind.__mro__:
        module = cls.__module__.partition(".")[0]
        if (module, cls.__name__) in (("torch", "Tensor"), ("cupy", "ndarray")):
            return module
    return None


def describe(arrays: Mapping[str, Any]) -> list[ArraySpec]:
    """Return the specs of a mapping's arrays; raise `ArrayTypeError` for an unknown kind of mapping, name or array."""
    if not isinstance(arrays, Mapping):
        raise ArrayTypeError(f"reduce: a mapping from names to arrays is needed, got {type(arrays).__name__}")
    described = []
    for name, array in arrays.items():
        if not isinstance(name, str):
            raise ArrayTypeError(f"reduce: names must be strings, got {name!r}")
        library = _library(array)
        if library is None:
            raise ArrayTypeError(
                f"reduce: '{name}' must be a NumPy, CuPy or torch array, got {type(array).__name__}; use numpy.asarray"
            )
        check_not_masked(f"reduce: '{name}'", array)
        if library == "torch" and str(array.layout) != "torch.strided":
            raise ArrayTypeError(f"reduce: '{name}' must be a dense tensor, got {array.layout}; use .to_dense()")
        dtype = _name_of(array.dtype)
        if library == "numpy" and not array.dtype.isnative:
            dtype = array.dtype.newbyteorder("=").name
        if dtype not in WORK_DTYPES:
            raise ArrayTypeError(
                f"reduce: '{name}' must be one of {', '.join(WORK_DTYPES)}, got {dtype}; cast it first"
            )
        described.append(ArraySpec(name, dtype, tuple(int(size) for size in array.shape)))
    return described


def check_not_masked(subject: str, array: Any) -> None:
    """Refuse a masked array: an element masked on one rank would count on others."""
    if isinstance(array, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
        raise ArrayTypeError(
            f"{subject} is a masked array, whose mask would be lost; pass array.filled(0), and average the mask, as an "
            "array of numbers, by itself"
        )


def to_host(array: Any) -> NDArray[Any]:
    """Return a NumPy array with the same numbers and strides, in host memory without a copy; bfloat16 as uint16."""
    match _library(array):
        case "torch":
            torch = sys.modules["torch"]
            tensor = array.detach()
            if tensor.dtype == torch.bfloat16:
                tensor = tensor.view(torch.int16)
                return tensor.cpu().numpy().view(np.uint16)  # type: ignore[no-any-return]
            return tensor.cpu().numpy()  # type: ignore[no-any-return]
        case "cupy":
            host: NDArray[Any] = array.get()
        case _:
            host = array
    return host.view(np.uint16) if _name_of(host.dtype) == "bfloat16" else host


def is_finite(array: Any) -> bool:
    """Return whether all numbers of an array are finite."""
    values = to_host(array)
    if values.dtype == np.uint16:
        return bool((values & _BFLOAT16_EXPONENT != _BFLOAT16_EXPONENT).all())
    return bool(np.isfinite(values).all())


def from_host(mean: NDArray[np.floating], described: ArraySpec, like: Any, out: NDArray[Any] | None) -> Any:
    """Return a flat host mean as an array of the kind, dtype and shape of ``like``, read-only in NumPy.

    It shares memory with ``mean`` or, for 16-bit dtypes, with ``out`` if it stays in host memory.
    """
    host: NDArray[Any] = mean
    if described.dtype in ("float16", "bfloat16"):
        assert out is not None
        narrow(mean, described.dtype, out)
        host = out.view(np.float16) if described.dtype == "float16" else out
    host = host.reshape(described.shape)
    match _library(like):
        case "torch":
            torch = sys.modules["torch"]
            if described.dtype == "bfloat16":
                return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16).to(like.device)
            return torch.from_numpy(host).to(like.device)
        case "cupy":
            device: Any = sys.modules["cupy"].asarray(host.view(like.dtype) if out is not None else host)
            return device
        case _:
            view = host.view(like.dtype.newbyteorder("=")) if out is not None else host.view()
            view.flags.writeable = False
            return view


def as_kind_of(like: Any, array: Any) -> Any:
    """Return a CuPy array as one of the library of ``like``, in the same memory."""
    if _library(like) != "torch":
        return array
    torch = sys.modules["torch"]
    if like.dtype == torch.bfloat16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def narrow(mean: NDArray[np.floating], dtype: str, out: NDArray[np.uint16]) -> None:
    """Round to ``"float16"`` or ``"bfloat16"``; larger numbers become the largest one, not infinity."""
    kernels.narrow(mean, "fp16" if dtype == "float16" else "bf16", out)
