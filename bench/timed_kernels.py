"""Kernels that are timed in turns, each call after a copy of the array, with rows in multiples of a copy."""

import contextlib
import gc
import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Annotated, Any, TypedDict

import numpy as np
from mpicomp.bench.measure.feedback import DTYPE, Gradients, Selecting, Settled, steps_to_settle
from mpicomp.kernels import cpu
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.allgather import mean_of_messages
from mpicomp.compressors import Quantiser
from mpicomp.compressors.wire import HEADER_BYTES, read_sparse_header
from mpicomp.gpu import Device, to_python
from mpicomp.reducer.bucket import Bucket
from mpicomp.workspace import Workspace

_WARM_STEPS = 20  # of a compressor at full length that are not timed: it finds its bounds and stages
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
    timed: Sequence[Kernel], copy: Kernel, numel: int, repeats: int, clock: Callable[[Kernel], float] = clock
) -> list[dict[str, Any]]:
    """Time all kernels, round after round, and a copy before each call; return the rows, that of the copy first."""

    def seconds(kernel: Kernel) -> float:
        kernel.prepare()
        return clock(kernel)

    copy.seconds.clear()
    copy.warm()
    unit = min(seconds(copy) for _ in range(3))
    times = [repeats if seconds(kernel) < _SLOW * unit else min(repeats, max(3, repeats // 4)) for kernel in timed]
    for kernel in timed:
        kernel.seconds.clear()
        kernel.kept.clear()
    with without_garbage():
        for turn in range(repeats):
            for kernel, calls in zip(timed, times, strict=True):
                if turn * calls // repeats != (turn + 1) * calls // repeats:
                    kernel.prepare()
                    copy.seconds.append(seconds(copy))
                    kernel.seconds.append(clock(kernel))
    unit = float(np.median(copy.seconds))
    return [kernel.row(numel, unit) for kernel in [copy, *timed]]


@dataclass
class Copy(Kernel):
    """A copy of the array."""

    gradients: Gradients

    def __post_init__(self) -> None:
        self._out = self.gradients.device.zeros(self.gradients.numel, DTYPE)
        self.prepare()

    def prepare(self) -> None:
        self._source = self.gradients.fresh()

    def run(self) -> None:
        np.copyto(self._out, self._source)


@dataclass
class Compress(Kernel):
    """The step of a reducer without its exchange: sum, selection, message, and the residual that follows."""

    selecting: Selecting
    bucket: Bucket
    gradients: Gradients
    settled: Settled | None = None
    """The residual of a bucket that other compressors use in turn; None for a bucket of this one alone."""

    def __post_init__(self) -> None:
        self.config = self.selecting.compressor.get_config()
        self.gradient = self.gradients.fresh()

    def warm(self) -> None:
        for _ in range(steps_to_settle(self.selecting.compressor) if self.settled is None else _WARM_STEPS):
            self.prepare()
            self.run()

    def prepare(self) -> None:
        if self.settled is not None:
            self.settled.advance()
            self.settled.fill(self.bucket)
        self.gradient = self.gradients.fresh()

    def run(self) -> None:
        self.kept.append(self.selecting.step(self.bucket, self.gradient, message=True))


@dataclass
class Pack(Kernel):
    """A fresh array in few bits, and its decoded values."""

    compressor: Quantiser
    gradients: Gradients
    workspace: Workspace

    def __post_init__(self) -> None:
        self.config = self.compressor.get_config()
        self.message = np.zeros(self.compressor.packed_bytes(self.gradients.numel), np.uint8)
        self._calls = 0
        self._array = self.gradients.fresh()
        self.run()

    def prepare(self) -> None:
        self._array = self.gradients.fresh()

    def run(self) -> None:
        self._calls += 1
        sent = self.workspace.array("sent", self._array.size, DTYPE)
        self.compressor.pack(self._array, self.message, sent, key=self._calls)


@dataclass
class Unpack(Kernel):
    """Packed arrays of some ranks, added to a mean."""

    packing: Pack
    ranks: int

    def warm(self) -> None:
        self.config = self.packing.config
        self.packing.workspace.array("mean", self.packing.gradients.numel, DTYPE)[:] = 0
        self._messages = np.tile(self.packing.message, (self.ranks, 1))
        super().warm()

    def run(self) -> None:
        mean = self.packing.workspace.array("mean", self.packing.gradients.numel, DTYPE)
        self.packing.compressor.unpack_add_all(self._messages, slice(0, self._messages.shape[1]), 1 / self.ranks, mean)


@dataclass
class Decode(Kernel):
    """Messages, with headers that the host has read, added to a mean."""

    messages: Sequence[Any]
    numel: int
    device: Device

    def __post_init__(self) -> None:
        self._workspace = Workspace(self.device)
        bounds = list(pairwise(accumulate((message.size for message in self.messages), initial=0)))
        self._all = self.device.empty(bounds[-1][1], np.uint8)
        for (start, stop), message in zip(bounds, self.messages, strict=True):
            self._all[start:stop] = message
        self._headers = []
        for start, stop in bounds:
            head = self.device.to_host(self._all[start : start + HEADER_BYTES])  # no exchange has brought it there
            self._headers.append(read_sparse_header(self._all[start:stop], self.numel, DTYPE, start=start, head=head))

    def run(self) -> None:
        factor = 1 / len(self._headers)
        write, answers = mean_of_messages(self._all, self._headers, factor, self.numel, DTYPE, self._workspace)
        to_python(*answers)
        write(self._workspace.array("mean", self.numel, DTYPE))


@dataclass
class Spectrum(Kernel):
    """Counts and energies of magnitudes."""

    array: Any
    device: Device

    def __post_init__(self) -> None:
        self._counts, self._energies = self.device.zeros(cpu.BINS, np.int64), self.device.zeros(cpu.BINS, np.float64)

    def run(self) -> None:
        kernels.spectrum(self.array, self._counts, self._energies, 1, self.threads or 1)


@dataclass
class Argpartition(Kernel):
    """Selection of the largest elements by `numpy.argpartition`, for comparison."""

    array: NDArray[np.float32]
    k: int
    magnitudes: NDArray[np.float32]

    def run(self) -> None:
        np.abs(self.array, out=self.magnitudes)
        indices = np.argpartition(self.magnitudes, self.array.size - self.k)[self.array.size - self.k :]
        self.array[indices]


@dataclass
class TorchTopk(Kernel):
    """Selection of the largest elements by `torch.topk`, for comparison; on a GPU in the same stream."""

    array: Any
    k: int
    device: Any

    def __post_init__(self) -> None:
        self._torch = importlib.import_module("torch")  # where it is installed; nothing else here needs it
        with self._stream():
            self._array = self._torch.from_dlpack(self.array)
            self._magnitudes = self._torch.empty_like(self._array)

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        torch = self._torch
        if self.device.number is not None:
            with torch.cuda.stream(torch.cuda.ExternalStream(self.device.stream.ptr, device=self.device.number)):
                yield
            return
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        yield
        torch.set_num_threads(before)

    def run(self) -> None:
        with self._stream():
            self._torch.abs(self._array, out=self._magnitudes)
            _, indices = self._torch.topk(self._magnitudes, self.k, sorted=False)
            self._array[indices]
