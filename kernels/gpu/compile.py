"""Compilation and launch of the GPU sources. CuPy is not imported here: callers that pass its arrays have loaded it."""

import functools
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np

THREADS = 256  # threads of a block
WARPS = THREADS // 32  # warps of a block
LIMIT = 2112  # blocks of a sweep: 16 for each of an H200's multiprocessors, and the same number on any other device

Parameters = ParamSpec("Parameters")

_COMPILED_AT_ONCE = 8  # sources
_HEADERS = {"pieces": "pieces", "signs": "pieces"} | dict.fromkeys(("indices", "message", "select"), "message")
_REAL = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}


def twin_of(host: Callable[Parameters, Any]) -> Callable[[Callable[..., Any]], Callable[Parameters, Any]]:
    """Copy types and docstring of the host's kernel of the same name to a device kernel.

    Its arrays are device arrays, numbers that it returns are 0-d device arrays, and ``threads`` has no meaning.
    """

    def decorate(device: Callable[..., Any]) -> Callable[Parameters, Any]:
        device.__doc__, device.__annotations__ = host.__doc__, host.__annotations__
        return device

    return decorate


def code_of(source: str) -> str:
    """Return the text of the headers and of a source: NVRTC includes no files."""
    header = [f"{_HEADERS[source]}.cuh"] if source in _HEADERS else []
    names = ["common.cuh", "sums.cuh", *header, f"{source}.cu"]
    return "".join(Path(__file__).with_name(name).read_text() for name in names)


def library() -> Any:
    """Return the module cupy, which callers with CuPy arrays have imported."""
    try:
        return sys.modules["cupy"]
    except KeyError:
        raise ImportError("mpicomp.kernels.gpu works on CuPy arrays: import cupy first") from None


def launch(source: str, name: str, dtype: Any, blocks: int, *arguments: Any) -> None:
    """Put a kernel of ``source``.cu into the current stream of the current device, with at least one block.

    Arguments are device arrays, int for 64-bit integers and null pointers, and float for doubles.
    """
    cupy = library()
    kernel = _kernel(cupy, cupy.cuda.runtime.getDevice(), source, name, np.dtype(dtype))
    kernel((max(1, blocks),), (THREADS,), arguments)


def tile(dtype: Any) -> int:
    """Return the number of elements of a tile: 16 KiB, handled by a block at a time."""
    return 16384 // int(np.dtype(dtype).itemsize)


def tiles(size: int, dtype: Any) -> int:
    """Return the number of tiles of an array."""
    return -(-size // tile(dtype))


def sweeps(size: int, dtype: Any) -> int:
    """Return the number of blocks that sweep over an array."""
    return max(1, min(LIMIT, tiles(size, dtype)))


def remaining(size: int, stride: int) -> int:
    """Return the number of elements, the last group filled up, when of groups of 1024 every ``stride``-th remains."""
    return -(-size // (1024 * stride)) * 1024


def strides(size: int) -> int:
    """Return the number of blocks whose threads go through an array one element at a time."""
    return max(1, min(LIMIT, -(-size // THREADS)))


def word_of(dtype: Any) -> Any:
    """Return the unsigned integer type as wide as float32 or float64."""
    return np.uint32 if np.dtype(dtype) == np.float32 else np.uint64


def on_device(value: Any) -> bool:
    """Return whether a value is a device array, and not a number."""
    return hasattr(value, "dtype") and isinstance(value, library().ndarray)


def scalar_arg(value: Any, dtype: Any) -> tuple[Any, Any]:
    """Return the two arguments by which kernels take a scalar: its address, or 0, and the number.

    ``dtype`` is the type that the kernel reads at the address: numpy.int64, numpy.uint64 or numpy.float64.
    """
    zero = 0.0 if dtype == np.float64 else 0
    if on_device(value):
        return value.astype(dtype, copy=False), zero
    return 0, float(value) if dtype == np.float64 else int(value)


@functools.cache
def _kernel(cupy: Any, device: int, source: str, name: str, dtype: np.dtype[Any]) -> Any:
    return _compilation(cupy, device, source, dtype).result().get_function(name)


def compile_ahead(sources: Iterable[str], dtype: Any) -> None:
    """Begin to compile sources in parallel for the current device; launches of their kernels wait for it."""
    cupy = library()
    for source in sources:
        _compilation(cupy, cupy.cuda.runtime.getDevice(), source, np.dtype(dtype))


@functools.cache
def _compilation(cupy: Any, device: int, source: str, dtype: np.dtype[Any]) -> Future[Any]:
    return _compiler().submit(_compile, cupy, device, source, dtype)


@functools.cache
def _compiler() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_COMPILED_AT_ONCE, "mpicomp-compile")


def _compile(cupy: Any, device: int, source: str, dtype: np.dtype[Any]) -> Any:
    cupy.cuda.runtime.setDevice(device)  # of this thread
    module = cupy.RawModule(code=code_of(source), options=("-std=c++17", f"-DREAL={_REAL[dtype]}"))
    module.compile()  # CuPy keeps it on disk, by a file that appears whole
    return module
