"""Timing of compressors and their kernels, in multiples of one memcpy of the array, on the host or on a GPU."""

import importlib
import importlib.util
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpicomp.bench.measure.feedback import Gradients, Selecting, Settled, make_bucket, write_plain
from mpicomp.bench.timed_kernels import (
    Argpartition,
    Compress,
    Copy,
    Decode,
    Kernel,
    Pack,
    Spectrum,
    TorchTopk,
    Unpack,
    take_turns,
)
from numpy.typing import NDArray

from mpicomp.compressors import Compressor, Context, Quantiser, Sparsifier, TopK, compressor_class, list_compressors
from mpicomp.gpu import HOST, Device
from mpicomp.mpi.rounds import Group
from mpicomp.reducer.bucket import Bucket
from mpicomp.workspace import Workspace

SUITED = {"threshold": {"limit": 14.0}}
"""Parameters without which a compressor has no sensible ratio on these gradients: here about 1 %."""

_RANKS = 4  # number of messages that are decoded into a mean
_SETTLING_NUMEL = 1 << 18  # of the array on which a residual is brought to its steady state
_AHEAD_S = 1e-3  # seconds of other work before a call, in which the host gets ahead of the device
_GPU_COMPRESSORS = ("topk", "sidco")  # those with a GPU kernel of their own from gradient to selection


@dataclass(frozen=True)
class Settings:
    """Array length, ratios, compressors and threads to measure with."""

    numel: int  # elements of the arrays, which are float32
    ratios: Sequence[float]  # ratios for kernels that select and are no compressors
    compressors: Sequence[Compressor]  # sparsifiers, each with the ratio at which it is measured, and quantisers
    threads: int = 1  # number of threads that share a sweep
    # Number of times that each kernel is timed; slow ones a quarter as often, and at least three times
    repeats: int = 20


def measurable(device: str = "cpu") -> list[str]:
    """Return the names of the compressors that can be measured: all that select elements, or pack all of them.

    >>> "topk" in measurable(), "qsgd" in measurable(), "dense" in measurable()
    (True, True, False)
    """
    kinds = Sparsifier | Quantiser
    names = [name for name in list_compressors() if issubclass(compressor_class(name), kinds)]
    return names if device == "cpu" else [name for name in names if name in _GPU_COMPRESSORS]


def measure(settings: Settings, device: Device = HOST) -> list[dict[str, Any]]:
    """Measure everything in turns, so that other load on the machine affects all kernels equally.

    Each timed call follows a copy of the array, under the same conditions, and finds the same things in the caches. A
    GPU is measured twice: idle, where a call includes the host's time to launch it, and behind other work, as in a
    training.
    """
    with device.active():
        numel, on_host = settings.numel, device.number is None
        gradients = Gradients(numel, device=device)
        copy = Copy("memcpy", gradients, threads=1 if on_host else None)
        measured = list((_host_kernels if on_host else _gpu_kernels)(settings, gradients))
        for kernel in measured:
            kernel.warm()
        if on_host:
            return take_turns(measured, copy, numel, settings.repeats)
        rows = take_turns(measured, copy, numel, settings.repeats, _event_clock)
        copies = math.ceil(_AHEAD_S / rows[0]["median_s"])

        def busy_clock(kernel: Kernel) -> float:
            for _ in range(copies):
                copy.run()
            return _event_clock(kernel)

        for row, queued in zip(rows, take_turns(measured, copy, numel, settings.repeats, busy_clock), strict=True):
            row |= {"behind_s": queued["median_s"], "behind_copies": queued["copies"]}
        return rows


def _event_clock(kernel: Kernel) -> float:
    cuda = importlib.import_module("cupy").cuda
    start, stop = cuda.Event(), cuda.Event()
    start.record()
    kernel.run()
    stop.record()
    stop.synchronize()
    return float(cuda.get_elapsed_time(start, stop)) / 1e3


def _host_kernels(settings: Settings, gradients: Gradients) -> Iterator[Kernel]:
    short = Gradients(min(_SETTLING_NUMEL, settings.numel), seed=1)
    numel, threads = settings.numel, settings.threads
    buckets: dict[Any, Bucket] = {}
    workspace = Workspace()
    for compressor in settings.compressors:
        assert isinstance(compressor, Sparsifier | Quantiser)
        kind = (compressor.entry, compressor.feedback)
        if kind not in buckets:  # memory does not hold as many residuals as compressors
            buckets[kind] = make_bucket(numel, compressor, compressor.feedback, threads)
        context = Context(workspace=workspace) if isinstance(compressor, Quantiser) else Context()
        selecting, settled = Selecting(compressor, numel, context), Settled(compressor, short)
        ratio = getattr(compressor, "ratio", None)
        name = f"{compressor.id}.compress"
        yield Compress(name, selecting, buckets[kind], gradients, settled, ratio=ratio, threads=threads)
        if isinstance(compressor, Quantiser):
            yield (packing := Pack(f"{compressor.id}.pack", compressor, gradients, workspace))
            yield Unpack(f"{compressor.id}.unpack", packing, _RANKS)
    magnitudes = np.zeros(numel, np.float32)
    arrays = []
    selecting_kernels: list[Kernel] = []
    for ratio in settings.ratios:
        array, k, messages = _rank_messages(ratio, gradients, short)
        arrays.append(array)
        selecting_kernels += [
            Decode("decode", messages, numel, HOST, ratio=ratio),
            *_torch_topk(array, k, HOST, ratio, threads),
            Argpartition("numpy.argpartition", array, k, magnitudes, ratio=ratio),
        ]
    yield Spectrum("spectrum", arrays[0], HOST, threads=threads)
    yield from sorted(selecting_kernels, key=lambda kernel: kernel.name)


def _gpu_kernels(settings: Settings, gradients: Gradients) -> Iterator[Kernel]:
    device, numel = gradients.device, gradients.numel
    for compressor in settings.compressors:
        yield compress_on_gpu(compressor, gradients)
    arrays = []
    selecting_kernels: list[Kernel] = []
    for ratio in settings.ratios:
        array, k, messages = _step_messages(ratio, gradients)
        arrays.append(array)
        selecting_kernels.append(Decode("decode", messages, numel, device, ratio=ratio, threads=None))
        selecting_kernels += _torch_topk(array, k, device, ratio, None)
    yield Spectrum("spectrum", arrays[0], device, threads=None)
    yield from sorted(selecting_kernels, key=lambda kernel: kernel.name)


def compress_on_gpu(compressor: Compressor, gradients: Gradients) -> Compress:
    """Return the kernel that times a compressor, with a bucket of its own where the gradients are."""
    assert isinstance(compressor, Sparsifier)
    numel, device = gradients.numel, gradients.device
    selecting = Selecting(compressor, numel, Context(workspace=Workspace(device)), finite=True)
    bucket = make_bucket(numel, compressor, compressor.feedback, device=device)
    ratio = getattr(compressor, "ratio", None)
    return Compress(f"{compressor.id}.compress", selecting, bucket, gradients, ratio=ratio, threads=None)


def _torch_topk(array: Any, k: int, device: Device, ratio: float, threads: int | None) -> Iterable[Kernel]:
    if importlib.util.find_spec("torch") is None or (
        device.number is not None and not importlib.import_module("torch").cuda.is_available()
    ):
        return []
    return [TorchTopk("torch.topk", array, k, device, ratio=ratio, threads=threads)]


def _rank_messages(
    ratio: float, gradients: Gradients, short: Gradients
) -> tuple[NDArray[np.float32], int, list[NDArray[np.uint8]]]:
    # The accumulated gradient and the kept elements of the last rank, and the messages of all.
    numel, compressor = gradients.numel, TopK(ratio=ratio)
    settled = Settled(compressor, short)
    bucket = make_bucket(numel, compressor, True)
    messages = []
    for rank in range(_RANKS):
        settled.fill(bucket, shift=rank * short.numel // _RANKS)
        accumulated, context = bucket.accumulate([gradients.fresh()]), Context(group=Group(rank, rank + 1))
        selection = compressor.select(accumulated, context)
        messages.append(write_plain(selection, accumulated, context))
    return accumulated.array(), selection.indices.size, messages


def _step_messages(ratio: float, gradients: Gradients) -> tuple[Any, int, list[Any]]:
    # An accumulated gradient, its kept elements, and messages of one rank's steps, unlike as ranks' are.
    kernel = compress_on_gpu(TopK(ratio=ratio), gradients)
    kernel.warm()
    compressor, context, messages = kernel.selecting.compressor, kernel.selecting.context, []
    assert isinstance(compressor, Sparsifier)
    for _ in range(_RANKS):
        accumulated = kernel.bucket.accumulate([gradients.fresh()])
        selection = compressor.select(accumulated, context)
        messages.append(write_plain(selection, accumulated, context).copy())
        array = accumulated.array().copy()
        kernel.bucket.keep(selection, finite=True)
    return array, selection.indices.size, messages
