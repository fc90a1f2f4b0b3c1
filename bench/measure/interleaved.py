"""Kernels timed in turns, each call after a copy of the array, with rows in multiples of a copy."""

import contextlib
import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_SLOW = 20  # copies from which on a kernel is repeated less often


KERNEL_ROW = {
    "name": ("string", "operation"),
    "numel": ("integer", "length of the array"),
    "ratio": ("number or null", "kept fraction that was asked for; null where there is none"),
    "median_s": ("number", "median"),
    "copies": ("number", "`median_s` over that of `memcpy`"),
    "p25_s": ("number", "a quarter of the calls took less"),
    "p75_s": ("number", "three quarters took less"),
    "repeats": ("integer", "timed calls"),
    "threads": ("integer or null", "that share its sweeps; null on a GPU"),
    "behind_s": ("number or null", "median behind other work of the GPU, as of a backward pass; null on the host"),
    "behind_copies": ("number or null", "`behind_s` over that of `memcpy`"),
    "ratio_reached": ("number or null", "mean kept fraction of the timed calls; null where nothing is selected"),
    "config": ("object or null", "the compressor's configuration, as `mpicomp.get_compressor` takes it"),
}
"""Fields of a row of ``bench kernels``, with their types in JSON and meanings."""


@dataclass
class Kernel(ABC):
    """Something that is timed."""

    name: str
    ratio: float | None = field(default=None, kw_only=True)
    threads: int | None = field(default=1, kw_only=True)
    config: dict[str, Any] | None = field(default=None, kw_only=True)  # the compressor's
    seconds: list[float] = field(default_factory=list, init=False)
    kept: list[int] = field(default_factory=list, init=False)  # elements that each call selected

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

    def row(self, numel: int, unit: float) -> dict[str, Any]:
        low, median, high = (float(value) for value in np.percentile(self.seconds, [25, 50, 75]))
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
            "behind_s": None,
            "behind_copies": None,
            "ratio_reached": float(np.mean(self.kept)) / numel if self.kept else None,
            "config": self.config,
        }


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


def take_turns(
    kernels: Sequence[Kernel], copy: Kernel, numel: int, repeats: int, clock: Callable[[Kernel], float] = clock
) -> list[dict[str, Any]]:
    """Time all kernels, round after round, and a copy before each call; return the rows, that of the copy first."""

    def timed(kernel: Kernel) -> float:
        kernel.prepare()
        return clock(kernel)

    copy.seconds.clear()
    copy.warm()
    unit = min(timed(copy) for _ in range(3))
    times = [repeats if timed(kernel) < _SLOW * unit else min(repeats, max(3, repeats // 4)) for kernel in kernels]
    for kernel in kernels:
        kernel.seconds.clear()
        kernel.kept.clear()
    with without_garbage():
        for turn in range(repeats):
            for kernel, calls in zip(kernels, times, strict=True):
                if turn * calls // repeats != (turn + 1) * calls // repeats:
                    kernel.prepare()
                    copy.seconds.append(timed(copy))
                    kernel.seconds.append(clock(kernel))
    unit = float(np.median(copy.seconds))
    return [kernel.row(numel, unit) for kernel in [copy, *kernels]]
