"""One sweep shared by several threads: kernels run without the GIL, each on a part of the array."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Outcome = TypeVar("Outcome")

_GRAIN = 1 << 16  # elements; less than that is swept sooner than a thread is woken


def cut(size: int, threads: int) -> list[slice]:
    """Cut ``size`` elements into at most ``threads`` parts, none of them too short to be worth a thread.

    Examples
    --------
    >>> cut(10, 4), cut(1 << 20, 2)
    ([slice(0, 10, None)], [slice(0, 524288, None), slice(524288, 1048576, None)])
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
