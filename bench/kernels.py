"""Timing of compressors and their kernels, in multiples of one memcpy of the array."""

import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mpicomp.bench.measure.feedback import DTYPE, Selecting, make_bucket, write_plain
from mpicomp.bench.measure.gradients import POOL, Gradients, Settled
from mpicomp.bench.measure.interleaved import Kernel, rows_of, take_turns
from mpicomp.kernels import cpu
from numpy.typing import NDArray

from mpicomp.collectives.sparse_mean import SparseMean
from mpicomp.compressors import (
    Compressor,
    Context,
    Quantiser,
    SharedSparsifier,
    Sparsifier,
    TopK,
    compressor_class,
    list_compressors,
)
from mpicomp.compressors.message import read_message
from mpicomp.errors import ConfigurationError
from mpicomp.reducer.bucket import Bucket
from mpicomp.rounds import Group
from mpicomp.workspace import Workspace

RANKS = 4
"""Number of messages that are decoded into a mean."""
STRIDE = 8
"""Stride of the sampled spectrum: one group of elements in so many is looked at."""
SUITED = {"threshold": {"limit": 14.0}}
"""Parameters without which a compressor has no sensible ratio on these gradients: here about 1 %."""

_SMALL = 1 << 18  # elements of the array on which a residual is brought to its steady state
_WARM = 20  # steps of a compressor at full length that are not timed: it finds its bounds and stages
_LIMIT = 1 << 32  # elements; indices travel in 32 bits


@dataclass(frozen=True)
class Settings:
    """Array length, ratios, compressors and threads to measure with.

    Parameters
    ----------
    numel : int
        Elements of the arrays, which are float32.
    ratios : sequence of float
        Ratios for kernels that select and are no compressors.
    compressors : sequence of Compressor
        Sparsifiers, each with the ratio at which it is measured, and quantisers.
    threads : int
        Number of threads that share a sweep.
    repeats : int
        Number of times that each kernel is timed; slow ones a quarter as often, and at least three times.
    """

    numel: int
    ratios: Sequence[float]
    compressors: Sequence[Compressor]
    threads: int = 1
    repeats: int = 20


def measurable() -> list[str]:
    """Return the names of the compressors that can be measured: all that select elements, or pack all of them.

    Examples
    --------
    >>> "topk" in measurable(), "qsgd" in measurable(), "dense" in measurable()
    (True, True, False)
    """
    kinds = Sparsifier | SharedSparsifier | Quantiser
    return [name for name in list_compressors() if issubclass(compressor_class(name), kinds)]


def check_memory(settings: Settings) -> None:
    """Refuse arrays that are too long to be selected from, or that would not fit into memory.

    Raises
    ------
    ConfigurationError
        For either.
    """
    if settings.numel >= _LIMIT:
        raise ConfigurationError(f"bench kernels: --numel must be below 2**32, got {settings.numel}")
    # Gradients, the bucket, the copy, magnitudes, the rivals' results and, for each ratio, a sum and a mean; what
    # quantisers send, which they share, and a mean.
    arrays = POOL + 2 + 1 + 1 + 6 + 2 * len(settings.ratios) + 2
    needed, free = arrays * settings.numel * DTYPE.itemsize, _available_bytes()
    if free is not None and needed > free:
        raise ConfigurationError(
            f"bench kernels: --numel {settings.numel} needs {needed / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB "
            "are free; choose a smaller one"
        )


def measure(settings: Settings) -> list[dict[str, Any]]:
    """Measure everything in turns, so that other load on the machine affects all kernels alike.

    Each timed call follows a copy of the array: the copies are as many as the calls, see the same conditions, and
    leave the same things in the caches.

    Returns
    -------
    list of dict
        The rows; docs/benchmarks.md says what is in them.
    """
    gradients, short = Gradients(settings.numel), Gradients(min(_SMALL, settings.numel), seed=1)
    copy = _Copy("memcpy", gradients)
    kernels = [*_compressing(settings, gradients, short), *_others(settings, gradients, short)]
    for kernel in kernels:
        kernel.warm()
    take_turns(kernels, copy, settings.repeats)
    return rows_of(kernels, copy, settings.numel)


@dataclass
class _Copy(Kernel):
    gradients: Gradients

    def __post_init__(self) -> None:
        self._out = np.zeros(self.gradients.numel, np.float32)
        self._source = self.gradients.fresh()

    def prepare(self) -> None:
        self._source = self.gradients.fresh()

    def run(self) -> None:
        np.copyto(self._out, self._source)


@dataclass
class _Compress(Kernel):
    """Error feedback, selection and message on a fresh gradient, and the residual that follows."""

    selecting: Selecting
    bucket: Bucket
    settled: Settled
    gradients: Gradients

    def __post_init__(self) -> None:
        self._kept: list[int] = []
        self._gradient = self.gradients.fresh()

    def warm(self) -> None:
        for _ in range(_WARM):
            self.prepare()
            self.run()

    def reset(self) -> None:
        super().reset()
        self._kept.clear()

    def prepare(self) -> None:
        # Compressors take turns with one bucket: as many residuals as compressors would not fit into memory.
        self.settled.advance()
        self.settled.give(self.bucket)
        self._gradient = self.gradients.fresh()

    def run(self) -> None:
        self._kept.append(self.selecting.step(self.bucket, self._gradient, message=True))

    def facts(self) -> dict[str, Any]:
        reached = float(np.mean(self._kept)) / self.gradients.numel
        return {"ratio_reached": reached, "config": self.selecting.compressor.get_config()}


@dataclass
class _Pack(Kernel):
    """A fresh array in few bits, and what receivers will see."""

    compressor: Quantiser
    gradients: Gradients
    workspace: Workspace

    def __post_init__(self) -> None:
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

    def facts(self) -> dict[str, Any]:
        return {"config": self.compressor.get_config()}


@dataclass
class _Unpack(Kernel):
    """One rank's packed array, added to a mean."""

    packing: _Pack

    def warm(self) -> None:
        self.packing.workspace.array("mean", self.packing.gradients.numel, DTYPE)[:] = 0
        super().warm()

    def run(self) -> None:
        mean = self.packing.workspace.array("mean", self.packing.gradients.numel, DTYPE)
        self.packing.compressor.unpack_add(self.packing.message, 1 / RANKS, mean)

    def facts(self) -> dict[str, Any]:
        return self.packing.facts()


@dataclass
class _Decode(Kernel):
    messages: list[NDArray[np.uint8]]
    numel: int

    def __post_init__(self) -> None:
        self._workspace = Workspace()

    def run(self) -> None:
        mean = SparseMean.cleared(self._workspace, self.numel, DTYPE)
        for message in self.messages:
            selection = read_message(message, self.numel, DTYPE, self._workspace).selection
            mean.add(selection.indices, selection.values, 1 / len(self.messages))


@dataclass
class _Indices(Kernel):
    """Encoding of the indices of a selection, or the way back."""

    indices: NDArray[np.uint32]
    numel: int
    back: bool

    def __post_init__(self) -> None:
        self._code = np.zeros(cpu.index_bytes(self.indices.size, self.numel), np.uint8)
        self._out = np.zeros_like(self.indices)
        cpu.encode_indices(self.indices, self.numel, self._code)

    def run(self) -> None:
        if self.back:
            cpu.decode_indices(self._code, self.indices.size, self.numel, self._out)
        else:
            cpu.encode_indices(self.indices, self.numel, self._code)

    def facts(self) -> dict[str, Any]:
        return {"bits_per_index": 8 * self._code.size / self.indices.size}


@dataclass
class _Spectrum(Kernel):
    array: NDArray[np.float32]
    stride: int

    def __post_init__(self) -> None:
        self._counts, self._energies = np.zeros(cpu.BINS, np.int64), np.zeros(cpu.BINS)

    def run(self) -> None:
        cpu.spectrum(self.array, self._counts, self._energies, self.stride, self.threads or 1)


@dataclass
class _Argpartition(Kernel):
    """Selection of the largest elements by `numpy.argpartition`, for comparison."""

    array: NDArray[np.float32]
    k: int
    magnitudes: NDArray[np.float32]

    def run(self) -> None:
        np.abs(self.array, out=self.magnitudes)
        indices = np.argpartition(self.magnitudes, self.array.size - self.k)[self.array.size - self.k :]
        self.array[indices]


@dataclass
class _TorchTopk(Kernel):
    """Selection of the largest elements by `torch.topk`, for comparison."""

    array: NDArray[np.float32]
    k: int
    magnitudes: NDArray[np.float32]

    def __post_init__(self) -> None:
        self._torch = importlib.import_module("torch")  # where it is installed; nothing else here needs it
        self._array, self._magnitudes = map(self._torch.from_numpy, (self.array, self.magnitudes))

    def run(self) -> None:
        before = self._torch.get_num_threads()
        self._torch.set_num_threads(self.threads)
        self._torch.abs(self._array, out=self._magnitudes)
        _, indices = self._torch.topk(self._magnitudes, self.k, sorted=False)
        self._array[indices]
        self._torch.set_num_threads(before)


def _compressing(settings: Settings, gradients: Gradients, short: Gradients) -> Iterable[Kernel]:
    """Return the compressors, which share buckets; those that pack share arrays of all elements, too."""
    buckets: dict[Any, Bucket] = {}
    workspace = Workspace()
    for compressor in settings.compressors:
        assert isinstance(compressor, Sparsifier | SharedSparsifier | Quantiser)
        kind = (compressor.entry, compressor.feedback)
        if kind not in buckets:
            buckets[kind] = make_bucket(settings.numel, compressor, compressor.feedback, settings.threads)
        context = Context(workspace=workspace) if isinstance(compressor, Quantiser) else Context()
        yield _Compress(
            f"{compressor.id}.compress",
            Selecting(compressor, settings.numel, context),
            buckets[kind],
            Settled(compressor, short),
            gradients,
            ratio=getattr(compressor, "ratio", None),
            threads=settings.threads,
        )
        if isinstance(compressor, Quantiser):
            yield (packing := _Pack(f"{compressor.id}.pack", compressor, gradients, workspace))
            yield _Unpack(f"{compressor.id}.unpack", packing)


def _others(settings: Settings, gradients: Gradients, short: Gradients) -> Iterable[Kernel]:
    """Return the kernels that are no compressors, on what exact top-k with error feedback leads to."""
    numel, threads = settings.numel, settings.threads
    magnitudes = np.zeros(numel, np.float32)
    sums = []
    selecting: list[Kernel] = []
    for ratio in settings.ratios:
        array, indices, messages = _ranks(ratio, gradients, short)
        sums.append(array)
        selecting.append(_Decode("decode", messages, numel, ratio=ratio))
        selecting.append(_Indices("indices.encode", indices, numel, False, ratio=ratio))
        selecting.append(_Indices("indices.decode", indices, numel, True, ratio=ratio))
        if importlib.util.find_spec("torch") is not None:
            selecting.append(_TorchTopk("torch.topk", array, indices.size, magnitudes, ratio=ratio, threads=threads))
        selecting.append(_Argpartition("numpy.argpartition", array, indices.size, magnitudes, ratio=ratio))
    return [
        _Spectrum("spectrum", sums[0], 1, threads=threads),
        _Spectrum("spectrum.sampled", sums[0], STRIDE, threads=threads),
        *sorted(selecting, key=lambda kernel: kernel.name),
    ]


def _ranks(
    ratio: float, gradients: Gradients, short: Gradients
) -> tuple[NDArray[np.float32], NDArray[np.uint32], list[NDArray[np.uint8]]]:
    """Return the accumulated gradient of the last rank, its indices, and the messages of all."""
    numel, compressor = gradients.numel, TopK(ratio=ratio)
    settled = Settled(compressor, short)
    bucket = make_bucket(numel, compressor, True)
    messages = []
    for rank in range(RANKS):
        settled.give(bucket, shift=rank * short.numel // RANKS)
        accumulated, context = bucket.accumulate([gradients.fresh()]), Context(group=Group(rank, rank + 1))
        selection = compressor.select(accumulated, context)
        messages.append(write_plain(selection, accumulated, context))
    return accumulated.array(), selection.indices, messages


def _available_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) if found else None
