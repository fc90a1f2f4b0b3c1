"""Kernels timed in turns, each call after a copy of the array, with rows in multiples of a copy."""

import contextlib
import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict

import numpy as np

_SLOW = 20  # copies from which on a kernel is repeated less often


class KernelRow(TypedDict):
    """A row of ``bench kernels``."""

    name: Annotated[str, "operation"]
    numel: Annotated[int, "length of the array"]
    ratio: Annotated[float | None, "kept fraction that was asked for; null where there is none"]
    median_s: Annotated[float, "median"]
    copies: Annotated[float, "`median_s` over that of `memcpy`"]
    p25_s: Annotated[float, "a quarter of the calls took less"]
    p75_s: Annotated[float, "three quarters took less"]
    repeats: Annotated[int, "timed calls"]
    threads: Annotated[int | None, "that share its sweeps; null on a GPU"]
    behind_s: Annotated[float | None, "median behind other work of the GPU, as of a backward pass; null on the host"]
    behind_copies: Annotated[float | None, "`behind_s` over that of `memcpy`"]
    ratio_reached: Annotated[float | None, "mean kept fraction of the timed calls; null where nothing is selected"]
    config: Annotated[dict[str, Any] | None, "the compressor's configuration, as `mpicomp.get_compressor` takes it"]


@dataclass
class Kernel(ABC):
    """Something that is timed."""

    name: str
    ratio: float | None = field(default=None, kw_only=True)
    threads: int | None = field(default=1, kw_only=True)
    seconds: list[float] = field(default_factory=list, init=False)

    def warm(self) -> None:
        """Compile, touch memory, reach a steady state."""
        for _ in range(2):
            self.prepare()
            self.run()

    def prepare(self) -> None:  # noqa: B027, most have nothing to prepare
        """Prepare a call; not timed."""

    @abstractmethod
    def run(self) -> None:
        """Run the timed part."""

    def reset(self) -> None:
        self.seconds.clear()

    def facts(self) -> dict[str, Any]:
        """Return the columns of its row besides seconds."""
        return {}

    def row(self, numel: int, unit: float) -> dict[str, Any]:
        low, median, high = (float(value) for value in np.percentile(self.seconds, [25, 50, 75]))
        empty = dict.fromkeys(("behind_s", "behind_copies", "ratio_reached", "config"))
        return {
            "name": self.name,
            "numel": numel,
            "ratio": self.ratio,
            "median_s": median,
            "copies": median / unit,
            "p25_s": low,
            "p75_s": high,
            "repeats": len(self.seconds),
            "threads": self.threads,
        } | (empty | self.facts())


@contextlib.contextmanager
def without_garbage() -> Iterator[None]:
    """Collect garbage before the block, and not in it."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def clock(kernel: Kernel) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    kernel.run()
    return time.perf_counter() - start


def take_turns(kernels: Sequence[Kernel], copy: Kernel, repeats: int, clock: Callable[[Kernel], float] = clock) -> None:
    """Time all kernels, round after round, and a copy before each call."""

    def timed(kernel: Kernel) -> float:
        kernel.prepare()
        return clock(kernel)

    copy.warm()
    unit = min(timed(copy) for _ in range(3))
    times = [repeats if timed(kernel) < _SLOW * unit else min(repeats, max(3, repeats // 4)) for kernel in kernels]
    for kernel in kernels:
        kernel.reset()
    with without_garbage():
        for turn in range(repeats):
            for kernel, calls in zip(kernels, times, strict=True):
                if turn * calls // repeats != (turn + 1) * calls // repeats:
                    kernel.prepare()
                    copy.seconds.append(timed(copy))
                    kernel.seconds.append(clock(kernel))


def rows_of(kernels: Sequence[Kernel], copy: Kernel, numel: int) -> list[dict[str, Any]]:
    """Return the rows of kernels that were timed, that of the copy first."""
    unit = float(np.median(copy.seconds))
    return [kernel.row(numel, unit) for kernel in [copy, *kernels]]
