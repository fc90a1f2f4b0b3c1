"""Timing of the kernels of `mpicomp.bench.kernels` on a GPU, with CUDA events in the stream that they are put into."""

import functools
import importlib
import importlib.util
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from mpicomp.bench import devices
from mpicomp.bench.kernels import RANKS, STRIDE, Settings
from mpicomp.bench.measure.feedback import DTYPE, Selecting, make_bucket, write_plain
from mpicomp.bench.measure.gradients import Gradients, steps_to_settle
from mpicomp.bench.measure.interleaved import Kernel, rows_of, take_turns
from mpicomp.kernels import cpu
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.sparse_mean import SparseMean
from mpicomp.compressors import Compressor, Context, SharedSparsifier, Sparsifier
from mpicomp.compressors import TopK as Exact
from mpicomp.compressors.message import look_at
from mpicomp.places import Place, numbers
from mpicomp.reducer.bucket import Bucket
from mpicomp.workspace import Workspace

COMPRESSORS = ("topk", "sidco")
"""Compressors that are measured here: those with a kernel of their own from gradient to selection."""

_COMMAND = "bench kernels"
_AHEAD_S = 1e-3  # seconds of other work before a call, in which the host gets ahead of the device


def device_name() -> str:
    """Return the name of the current GPU; see `mpicomp.bench.devices.device_name`."""
    return devices.device_name(_COMMAND)


def measure(settings: Settings, place: Place | None = None) -> list[dict[str, Any]]:
    """Measure everything, taking turns; see `mpicomp.bench.kernels.measure`.

    Twice: with a device that has nothing else to do, where a call takes what the host takes to begin it as well, and
    behind other work, as in a training. Memory is plenty here, so that each compressor goes on with a residual of its
    own.

    Parameters
    ----------
    settings : Settings
        Threads are of no meaning here.
    place : CudaPlace, optional
        Of the GPU; None stands for the current one.
    """
    cupy = devices.cupy_of(_COMMAND)
    place = place or devices.place_on(_COMMAND, cupy.cuda.runtime.getDevice())

    def clock(kernel: Kernel, before: int = 0) -> float:
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        for _ in range(before):
            copy.run()
        start.record()
        kernel.run()
        stop.record()
        stop.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, stop)) / 1e3

    with place.current():
        gradients = Gradients(settings.numel, place=place)
        copy = _Copy("memcpy", gradients, threads=None)
        measured = [*_compressing(settings, gradients), *_others(settings, gradients)]
        for kernel in measured:
            kernel.warm()
        take_turns(measured, copy, settings.repeats, clock)
        rows = rows_of(measured, copy, settings.numel)
        before = math.ceil(_AHEAD_S / rows[0]["median_s"])
        copy.reset()
        take_turns(measured, copy, settings.repeats, functools.partial(clock, before=before))
        for row, behind in zip(rows, rows_of(measured, copy, settings.numel), strict=True):
            row |= {"behind_s": behind["median_s"], "behind_copies": behind["copies"]}
        return rows


@dataclass
class _Copy(Kernel):
    gradients: Gradients

    def __post_init__(self) -> None:
        self._out = self.gradients.place.zeros(self.gradients.numel, DTYPE)
        self._source = self.gradients.fresh()

    def prepare(self) -> None:
        self._source = self.gradients.fresh()

    def run(self) -> None:
        np.copyto(self._out, self._source)


@dataclass
class Compress(Kernel):
    """What a reducer does in a step, but for its exchange: sum, selection, message, and the residual that follows."""

    selecting: Selecting
    bucket: Bucket
    gradients: Gradients

    def __post_init__(self) -> None:
        self._kept: list[int] = []
        self.gradient = self.gradients.fresh()

    def warm(self) -> None:
        """Bring the residual to its steady state."""
        for _ in range(steps_to_settle(self.selecting.compressor)):
            self.prepare()
            self.run()

    def reset(self) -> None:
        """Drop the measurements so far."""
        super().reset()
        self._kept.clear()

    def prepare(self) -> None:
        """Take another gradient."""
        self.gradient = self.gradients.fresh()

    def run(self) -> None:
        """Do a step."""
        self._kept.append(self.selecting.step(self.bucket, self.gradient, message=True))

    def facts(self) -> dict[str, Any]:
        """Return the ratio that was reached, and the configuration."""
        reached = float(np.mean(self._kept)) / self.gradients.numel
        return {"ratio_reached": reached, "config": self.selecting.compressor.get_config()}


@dataclass
class _Decode(Kernel):
    """Messages that have arrived, whose headers were read on the host on their way."""

    messages: Sequence[Any]
    numel: int
    place: Place

    def __post_init__(self) -> None:
        self._workspace = Workspace(self.place)
        bounds = list(pairwise(accumulate((own.size for own in self.messages), initial=0)))
        self._all = self.place.empty(bounds[-1][1], np.uint8)
        for (start, stop), message in zip(bounds, self.messages, strict=True):
            self._all[start:stop] = message
        self._told = [look_at(self._all[start:stop], self.numel, DTYPE, start=start) for start, stop in bounds]

    def run(self) -> None:
        mean = SparseMean.cleared(self._workspace, self.numel, DTYPE)
        numbers(mean.add_messages(self._all, self._told, 1 / len(self._told)))  # whether indices were right


@dataclass
class _Spectrum(Kernel):
    array: Any
    stride: int
    place: Place

    def __post_init__(self) -> None:
        self._counts, self._energies = self.place.zeros(cpu.BINS, np.int64), self.place.zeros(cpu.BINS, np.float64)

    def run(self) -> None:
        kernels.spectrum(self.array, self._counts, self._energies, self.stride)


@dataclass
class _TorchTopk(Kernel):
    """Selection of the largest elements by `torch.topk`, in the same stream, for comparison."""

    array: Any
    k: int
    place: Any

    def __post_init__(self) -> None:
        self._torch = importlib.import_module("torch")
        self._stream = self._torch.cuda.ExternalStream(self.place.stream, device=self.place.device)
        with self._torch.cuda.stream(self._stream):
            self._array = self._torch.from_dlpack(self.array)
            self._magnitudes = self._torch.empty_like(self._array)

    def run(self) -> None:
        with self._torch.cuda.stream(self._stream):
            self._torch.abs(self._array, out=self._magnitudes)
            _, indices = self._torch.topk(self._magnitudes, self.k, sorted=False)
            self._array[indices]


def compress_kernel(compressor: Compressor, gradients: Gradients) -> Compress:
    """Return what times a compressor, with a bucket of its own where the gradients are."""
    assert isinstance(compressor, Sparsifier | SharedSparsifier)
    numel, place = gradients.numel, gradients.place
    selecting = Selecting(compressor, numel, Context(workspace=Workspace(place)), finite=True)
    bucket = make_bucket(numel, compressor, compressor.feedback, place=place)
    ratio = getattr(compressor, "ratio", None)
    return Compress(f"{compressor.id}.compress", selecting, bucket, gradients, ratio=ratio, threads=None)


def _compressing(settings: Settings, gradients: Gradients) -> Iterable[Kernel]:
    for compressor in settings.compressors:
        yield compress_kernel(compressor, gradients)


def _others(settings: Settings, gradients: Gradients) -> Iterable[Kernel]:
    """Return the kernels that are no compressors, on what exact top-k with error feedback leads to."""
    place, numel = gradients.place, gradients.numel
    selecting: list[Kernel] = []
    first = None
    for ratio in settings.ratios:
        array, k, messages = _steady(ratio, gradients)
        first = array if first is None else first
        selecting.append(_Decode("decode", messages, numel, place, ratio=ratio, threads=None))
        if _torch_sees_a_gpu():
            selecting.append(_TorchTopk("torch.topk", array, k, place, ratio=ratio, threads=None))
    yield _Spectrum("spectrum", first, 1, place, threads=None)
    yield _Spectrum("spectrum.sampled", first, STRIDE, place, threads=None)
    yield from sorted(selecting, key=lambda kernel: kernel.name)


def _steady(ratio: float, gradients: Gradients) -> tuple[Any, int, list[NDArray[np.uint8]]]:
    """Return an accumulated gradient, the number of elements that are kept of it, and messages.

    They are one rank's at different steps, which overlap as little as those of several ranks do.
    """
    kernel = compress_kernel(Exact(ratio=ratio), gradients)
    kernel.warm()
    compressor, context, messages = kernel.selecting.compressor, kernel.selecting.context, []
    assert isinstance(compressor, Sparsifier)
    for _ in range(RANKS):
        accumulated = kernel.bucket.accumulate([gradients.fresh()])
        selection = compressor.select(accumulated, context)
        messages.append(write_plain(selection, accumulated, context).copy())
        array = accumulated.array().copy()
        kernel.bucket.commit(selection, finite=True)
    return array, selection.indices.size, messages


def _torch_sees_a_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    return bool(importlib.import_module("torch").cuda.is_available())
