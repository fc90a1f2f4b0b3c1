"""Sums within an error bound, timed in turn with dense ones, on fields such as programs without gradients add."""

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from mpicomp.bench.measure.exchanges import add_over_mpi
from mpicomp.bench.measure.intervals import is_narrow
from mpicomp.bench.measure.timings import gather
from numpy.typing import NDArray

from mpicomp.bounded.allreduce import bounded_rounds
from mpicomp.mpi import Transport
from mpicomp.mpi.rounds import dense_ring_bytes
from mpicomp.reducer import Reducer
from mpicomp.reducer.record import wire_bytes

Field = NDArray[np.float32]

_RING_BUCKET = 1 << 40  # bytes: one bucket, however long the field is
_MIN_TURNS, _ENOUGH_TURNS = 3, 10  # timed turns, at least, and those after which a narrow interval ends the timing
_LAYER = 1 << 16  # elements of a layer of gradients


@dataclass(frozen=True)
class Settings:
    """Lengths and bounds to measure."""

    numels: Sequence[int]
    errors: Sequence[float]  # times the range of the field
    limit_s: float = 10.0  # seconds of timing a row


def smooth(random: np.random.Generator, numel: int) -> Field:
    """Return a sum of twelve waves of 40 to 400 points."""
    places, field = np.arange(numel, dtype=np.float64), np.zeros(numel, np.float32)
    for length, phase in zip(random.uniform(40, 400, 12), random.uniform(0, 2 * np.pi, 12), strict=True):
        field += np.cos(2 * np.pi / length * places + phase).astype(np.float32)
    return field


def turbulence(random: np.random.Generator, numel: int) -> Field:
    """Return a field whose energy falls with the wave number to the power of -5/3."""
    waves = np.arange(numel // 2 + 1)
    spectrum = np.exp(2j * np.pi * random.random(waves.size)) * np.maximum(waves, 1) ** (-5 / 6)
    spectrum[0] = 0
    return np.fft.irfft(spectrum, numel).astype(np.float32)


def noise(random: np.random.Generator, numel: int) -> Field:
    """Return independent normal numbers."""
    return random.standard_normal(numel, np.float32)


def gradient(random: np.random.Generator, numel: int) -> Field:
    """Return Laplace-distributed numbers in layers of different scales."""
    scales = np.exp(random.standard_normal(-(-numel // _LAYER)))
    return random.laplace(size=numel).astype(np.float32) * np.repeat(scales, _LAYER)[:numel].astype(np.float32)


FIELDS: Mapping[str, Callable[[np.random.Generator, int], Field]] = {
    "smooth": smooth, "turbulence": turbulence, "noise": noise, "gradient": gradient,
}  # fmt: skip


def measure(settings: Settings, transport: Transport, print_root: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure every field with every bound; one row each. Collective."""
    rows = []
    for numel in settings.numels:
        for name, make in FIELDS.items():
            field = make(np.random.default_rng([transport.group.rank, numel]), numel)
            for error in settings.errors:
                rows.append({"field": name} | _row(field, error, settings.limit_s, transport))
                print_root(f"{name}, {numel} elements, error {error:g} of the range: {rows[-1]['median_s']:.4g} s")
    return rows


def _row(field: Field, error: float, limit_s: float, transport: Transport) -> dict[str, Any]:
    group = transport.group
    bound = error * float(gather(np.array([np.ptp(field)], np.float64), transport).max())
    result, summed = np.empty_like(field), np.empty_like(field)
    reducer = Reducer("dense", "ring", comm=transport, bucket_bytes=_RING_BUCKET)
    within_bound = partial(bounded_rounds, field, None, bound, "mean", result, group)
    calls: dict[str, Callable[[], object]] = {
        "median_s": lambda: transport.run(within_bound()),
        "ring_s": lambda: reducer.reduce({"field": field}),
        "allreduce_s": lambda: add_over_mpi(transport, field, summed),
    }
    log = transport.log = []
    transport.run(within_bound())
    transport.log, sent = None, wire_bytes(log)
    for call in calls.values():  # kernels are compiled and connections opened
        call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    turns = 0
    while turns < _MIN_TURNS or not (
        sum(map(sum, samples.values())) > limit_s or (turns >= _ENOUGH_TURNS and all(map(is_narrow, samples.values())))
    ):
        turns += 1
        for name, call in calls.items():
            gather(np.zeros(1), transport)  # all begin at once
            begin = time.perf_counter()
            call()
            slowest = gather(np.array([time.perf_counter() - begin]), transport).max()
            samples[name].append(float(slowest))
    reducer.close()

    exact = np.empty(field.size)
    add_over_mpi(transport, field.astype(np.float64), exact)
    largest = float(np.abs(result - exact / group.size).max(initial=0))
    facts = gather(np.array([largest, zlib.crc32(result.view(np.uint8).data), sent], np.float64), transport)
    largest = float(facts[:, 0].max())
    medians = {name: float(np.median(seconds)) for name, seconds in samples.items()}
    most_sent = float(facts[:, 2].max())
    return {
        "numel": field.size, "relative": error, "error": bound, "ranks": group.size, "hosts": transport.group.hosts,
        **medians, "samples": turns, "wire_bytes": most_sent,
        "wire_less": dense_ring_bytes(field.size, group.size) / most_sent if most_sent else None,
        "over_ring": medians["ring_s"] / medians["median_s"],
        "over_allreduce": medians["allreduce_s"] / medians["median_s"], "largest": largest / bound,
        "correct": largest <= bound and len(set(facts[:, 1].tolist())) == 1,
    }  # fmt: skip
