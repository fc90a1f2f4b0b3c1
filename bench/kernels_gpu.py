"""Timing of the kernels of `mpicomp.bench.kernels` on a GPU."""

import importlib
import importlib.util
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpicomp.bench.kernels import RANKS, STRIDE, Settings
from mpicomp.bench.measure.feedback import DTYPE
from mpicomp.bench.measure.gradients import Gradients, steps_to_settle
from mpicomp.bench.measure.interleaved import Kernel, rows_of, take_turns
from mpicomp.kernels import gpu

from mpicomp.compressors import Compressor
from mpicomp.compressors.base import kept
from mpicomp.errors import ConfigurationError

COMPRESSORS = ("topk", "sidco")
"""Compressors with a GPU kernel of their own, from gradient to message."""

_ROOM = 4  # room for candidates, as a multiple of k
_SPARE = 1024  # elements that an estimate may select beyond that room


def device_name() -> str:
    """Return the name of the current GPU.

    Raises
    ------
    ConfigurationError
        Where there is none, or no CuPy.
    """
    try:
        runtime = _cupy().cuda.runtime
    except ImportError as error:
        raise ConfigurationError(
            f"bench kernels: --device gpu needs CuPy ({error}); pip install 'mpicomp[cuda12]' or 'mpicomp[cuda13]'"
        ) from error
    try:
        if runtime.getDeviceCount() == 0:
            raise ConfigurationError("bench kernels: --device gpu: there is no GPU; use --device cpu")
        name = runtime.getDeviceProperties(runtime.getDevice())["name"]
    except RuntimeError as error:  # CuPy's own is one
        raise ConfigurationError(f"bench kernels: --device gpu: {error}; use --device cpu") from error
    return name.decode() if isinstance(name, bytes) else str(name)


def measure(settings: Settings) -> list[dict[str, Any]]:
    """Measure everything, taking turns; see `mpicomp.bench.kernels.measure`.

    Memory is plenty here, so that each compressor goes on with a residual of its own.
    """
    cupy = _cupy()
    gradients = Gradients(settings.numel, put=cupy.asarray)
    copy = _Copy("memcpy", gradients, threads=None)
    kernels = [*_compressing(settings, gradients), *_others(settings, gradients)]
    for kernel in kernels:
        kernel.warm()

    def clock(kernel: Kernel) -> float:
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        kernel.run()
        stop.record()
        stop.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, stop)) / 1e3

    take_turns(kernels, copy, settings.repeats, clock)
    return rows_of(kernels, copy, settings.numel)


@dataclass
class _Copy(Kernel):
    gradients: Gradients

    def __post_init__(self) -> None:
        self._out = _cupy().zeros(self.gradients.numel, DTYPE)
        self._source = self.gradients.fresh()

    def prepare(self) -> None:
        self._source = self.gradients.fresh()

    def run(self) -> None:
        _cupy().copyto(self._out, self._source)


@dataclass
class _Compress(Kernel):
    """Error feedback, selection, and the residual that follows; indices and values are the message."""

    compressor: Compressor
    gradients: Gradients

    def __post_init__(self) -> None:
        cupy, numel = _cupy(), self.gradients.numel
        self.k = kept(getattr(self.compressor, "ratio", 0.01), numel)
        self.residual, self.out = cupy.zeros(numel, DTYPE), cupy.zeros(numel, DTYPE)
        self.bound = cupy.zeros(1, np.uint64)
        self.workspace = gpu.Workspace(numel, _ROOM * self.k, DTYPE)
        room = self.room()
        self.indices, self.values = cupy.zeros(room, np.uint32), cupy.zeros(room, DTYPE)
        self.gradient = self.gradients.fresh()

    def warm(self) -> None:
        for _ in range(steps_to_settle(self.compressor)):
            self.prepare()
            self.run()

    def prepare(self) -> None:
        self.gradient = self.gradients.fresh()

    def run(self) -> None:
        self.select()
        self.residual, self.out = self.out, self.residual

    @abstractmethod
    def room(self) -> int:
        """Return the number of elements that can be selected."""

    @abstractmethod
    def select(self) -> None:
        """Put the sum without what was selected into ``out``."""

    def facts(self) -> dict[str, Any]:
        return {"ratio_reached": self.k / self.gradients.numel, "config": self.compressor.get_config()}


@dataclass
class TopK(_Compress):
    """Exact top-k."""

    def room(self) -> int:
        """Return k."""
        return self.k

    def select(self) -> None:
        """Select the k largest."""
        gpu.topk(self.gradient, self.residual, self.out, self.bound, self.indices, self.values, self.workspace)


@dataclass
class SIDCo(_Compress):
    """An estimated threshold; the number of stages is the one that the compressor begins with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._count = _cupy().zeros(1, np.int64)
        self._counts: list[int] = []
        ratio, stages = getattr(self.compressor, "ratio", 0.01), getattr(self.compressor, "stages", None)
        self._stages = stages or (3 if ratio < 0.05 else 2 if ratio < 0.25 else 1)

    def prepare(self) -> None:
        """Note the number of elements that the previous call has selected."""
        super().prepare()
        self._counts.append(int(self._count[0]))

    def reset(self) -> None:
        """Drop the measurements so far."""
        super().reset()
        self._counts.clear()

    def room(self) -> int:
        """Return the largest number of elements in a message."""
        return min(self.gradients.numel, _ROOM * self.k + _SPARE)

    def select(self) -> None:
        """Select the elements above the threshold."""
        gpu.sidco(
            self.gradient,
            self.residual,
            self.out,
            self.k,
            getattr(self.compressor, "distribution", "exponential"),
            self._stages,
            self.bound,
            self.indices,
            self.values,
            self._count,
            self.workspace,
        )

    def facts(self) -> dict[str, Any]:
        """Return the ratio that was reached, too."""
        return super().facts() | {"ratio_reached": float(np.mean(self._counts)) / self.gradients.numel}


@dataclass
class _Decode(Kernel):
    messages: list[tuple[Any, Any]]
    numel: int

    def __post_init__(self) -> None:
        self._mean = _cupy().zeros(self.numel, DTYPE)

    def run(self) -> None:
        for indices, _ in self.messages:  # the step before has written there
            gpu.clear_at(indices, self._mean)
        for indices, values in self.messages:
            gpu.scatter_add(indices, values, 1 / len(self.messages), self._mean)


@dataclass
class _Spectrum(Kernel):
    array: Any
    stride: int

    def __post_init__(self) -> None:
        cupy = _cupy()
        self._counts, self._energies = cupy.zeros(gpu.BINS, np.int64), cupy.zeros(gpu.BINS, np.float64)

    def run(self) -> None:
        gpu.spectrum(self.array, self._counts, self._energies, self.stride)


@dataclass
class _TorchTopk(Kernel):
    array: Any
    k: int

    def __post_init__(self) -> None:
        self._torch = importlib.import_module("torch")
        self._array = self._torch.from_dlpack(self.array)
        self._magnitudes = self._torch.empty_like(self._array)

    def run(self) -> None:
        self._torch.abs(self._array, out=self._magnitudes)
        _, indices = self._torch.topk(self._magnitudes, self.k, sorted=False)
        self._array[indices]


def _compressing(settings: Settings, gradients: Gradients) -> Iterable[Kernel]:
    for compressor in settings.compressors:
        kind = TopK if compressor.id == "topk" else SIDCo
        ratio = getattr(compressor, "ratio", None)
        yield kind(f"{compressor.id}.compress", compressor, gradients, ratio=ratio, threads=None)


def _others(settings: Settings, gradients: Gradients) -> Iterable[Kernel]:
    """Return the kernels that are no compressors, on what exact top-k with error feedback leads to."""
    from mpicomp.compressors import TopK as Exact

    selecting: list[Kernel] = []
    first = None
    for ratio in settings.ratios:
        topk = TopK("topk.compress", Exact(ratio=ratio), gradients, ratio=ratio)
        topk.warm()
        messages = []
        for _ in range(RANKS):  # of one rank at different steps, which overlap as little as those of several do
            topk.indices, topk.values = _cupy().zeros(topk.k, np.uint32), _cupy().zeros(topk.k, DTYPE)
            topk.prepare()
            topk.run()
            messages.append((topk.indices, topk.values))
        array = _cupy().zeros(settings.numel, DTYPE)
        gpu.accumulate(gradients.fresh(), topk.residual, array)
        first = array if first is None else first
        selecting.append(_Decode("decode", messages, settings.numel, ratio=ratio, threads=None))
        if _torch_sees_a_gpu():
            selecting.append(_TorchTopk("torch.topk", array, topk.k, ratio=ratio, threads=None))
    yield _Spectrum("spectrum", first, 1, threads=None)
    yield _Spectrum("spectrum.sampled", first, STRIDE, threads=None)
    yield from sorted(selecting, key=lambda kernel: kernel.name)


def _torch_sees_a_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    return bool(importlib.import_module("torch").cuda.is_available())


def _cupy() -> Any:
    return importlib.import_module("cupy")
