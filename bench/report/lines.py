"""Lines of --metrics as arrays over steps, read fast enough for 10,000 steps of 100 layers."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from mpicomp.errors import ConfigurationError

PHASES = ("compute", "compress", "exchange", "decode", "update", "other")
"""Parts of a step, in the order in which they are drawn."""

Array = NDArray[np.float64]

_BUFFER = 1 << 20  # bytes that are read at a time


class _Layer(msgspec.Struct, gc=False):
    name: str
    numel: int
    ratio: float
    gain: float | None = None


class _Bucket(msgspec.Struct, gc=False):
    bucket: int
    numel: int
    compressor: msgspec.Raw
    collective: str
    ratio_reached: float
    phases_s: dict[str, float]
    layers: list[_Layer]
    ratio: float | None = None
    gain: float | None = None
    energy: float | None = None
    predicted_s: float | None = None


class _Line(msgspec.Struct, gc=False):
    step: int
    seconds: float
    phases_s: dict[str, float]
    wire_bytes: float
    dense_wire_bytes: float
    buckets: list[_Bucket]
    loss: float | None = None
    quality: float | None = None
    skipped: bool = False
    lost_ranks: list[int] = []


@dataclass
class Rows:
    """Values of layers, or of buckets, over steps.

    Attributes
    ----------
    names : list of str
        In the order in which they came.
    numels : list of int
        Elements of each.
    ratio, gain : array, shape (steps, names)
        NaN where nothing was recorded.
    """

    names: list[str] = field(default_factory=list)
    numels: list[int] = field(default_factory=list)
    ratio: Array = field(default_factory=lambda: np.zeros((0, 0)))
    gain: Array = field(default_factory=lambda: np.zeros((0, 0)))


@dataclass
class Lines:
    """What rank 0 has recorded of every step; NaN stands for what was not recorded.

    Attributes
    ----------
    step : array
        Numbers of the steps.
    seconds, loss, quality, wire_bytes, dense_wire_bytes : array, shape (steps,)
    phases : array, shape (steps, 6)
        Seconds of `PHASES`.
    ratio : array, shape (steps,)
        Kept fraction of the whole.
    behind : array, shape (steps,)
        Energy that waits in residuals after a step over the energy that it sent.
    predicted, measured : array, shape (steps,)
        Seconds of the buckets that have a prediction.
    layers, buckets : Rows
    plans : list of str
        What was run, in words, from what carried most.
    shares : array, shape (steps, plans)
        Share of a step's elements that each plan carried.
    skipped : list of int
        Steps that delivered zeros.
    lost : list of tuple of int
        Steps before which ranks died, each with a rank.
    """

    step: Array
    seconds: Array
    loss: Array
    quality: Array
    wire_bytes: Array
    dense_wire_bytes: Array
    phases: Array
    ratio: Array
    behind: Array
    predicted: Array
    measured: Array
    layers: Rows
    buckets: Rows
    plans: list[str]
    shares: Array
    skipped: list[int]
    lost: list[tuple[int, int]]


class _Columns:
    """Collects rows whose columns have names, which may differ from step to step."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._numels: list[int] = []
        self._last: list[str] = []
        self._last_places: NDArray[np.intp] = np.zeros(0, np.intp)
        self._rows: list[tuple[NDArray[np.intp], Array, Array]] = []

    def add(
        self, names: list[str], parts: Sequence[_Layer | _Bucket], ratios: list[float], gains: list[float | None]
    ) -> None:
        """Take up a step."""
        if names != self._last:
            for name, part in zip(names, parts, strict=True):
                if name not in self._places:
                    self._places[name] = len(self._places)
                    self._numels.append(part.numel)
            self._last = names
            self._last_places = np.array([self._places[name] for name in names], np.intp)
        # Millions of Python's numbers would take longer to keep than to read. None becomes NaN.
        self._rows.append((self._last_places, np.array(ratios, np.float64), np.array(gains, np.float64)))

    def rows(self) -> Rows:
        """Return all as arrays."""
        shape = len(self._rows), len(self._places)
        ratio, gain = np.full(shape, np.nan), np.full(shape, np.nan)
        for step, (places, ratios, gains) in enumerate(self._rows):
            ratio[step, places] = ratios
            gain[step, places] = gains
        return Rows(list(self._places), self._numels, ratio, gain)


def read_lines(path: str) -> Lines:
    """Read a file of --metrics.

    Raises
    ------
    ConfigurationError
        Where a line is none of --metrics. A last line that was cut off, as a job that dies leaves it, is left out.
    """
    numbers: list[tuple[float, ...]] = []
    layers, buckets = _Columns(), _Columns()
    carried: list[dict[tuple[bytes, str], int]] = []
    skipped: list[int] = []
    lost: list[tuple[int, int]] = []
    for line in _decoded(path):
        own = line.buckets
        numbers.append((*_numbers(line), *_sums(own)))
        parts = [layer for bucket in own for layer in bucket.layers]
        layers.add(
            [layer.name for layer in parts],
            parts,
            [layer.ratio for layer in parts],
            [layer.gain for layer in parts],
        )
        buckets.add(
            [f"bucket {bucket.bucket}" for bucket in own],
            own,
            [bucket.ratio_reached for bucket in own],
            [bucket.gain for bucket in own],
        )
        plans: dict[tuple[bytes, str], int] = {}
        for bucket in own:
            plan = bytes(bucket.compressor), bucket.collective
            plans[plan] = plans.get(plan, 0) + bucket.numel
        carried.append(plans)
        skipped += [line.step] if line.skipped else []
        lost += [(line.step, rank) for rank in line.lost_ranks]
    if not numbers:
        raise ConfigurationError(f"report: '{path}' holds no step; name a file that train has written with --metrics")
    table = np.array(numbers, np.float64)
    names, shares = _shares(carried)
    head = len(_HEAD)
    return Lines(
        **{name: table[:, place] for place, name in enumerate(_HEAD)},
        phases=table[:, head : head + len(PHASES)],
        **{name: table[:, head + len(PHASES) + place] for place, name in enumerate(_SUMS)},
        layers=layers.rows(),
        buckets=buckets.rows(),
        plans=names,
        shares=shares,
        skipped=skipped,
        lost=lost,
    )


_HEAD = ("step", "seconds", "loss", "quality", "wire_bytes", "dense_wire_bytes")
_SUMS = ("ratio", "behind", "predicted", "measured")


def _numbers(line: _Line) -> tuple[float, ...]:
    loss = math.nan if line.loss is None else line.loss
    quality = math.nan if line.quality is None else line.quality
    phases = line.phases_s
    head = (line.step, line.seconds, loss, quality, line.wire_bytes, line.dense_wire_bytes)
    return (*head, *(phases.get(name, 0.0) for name in PHASES))


def _sums(buckets: list[_Bucket]) -> tuple[float, float, float, float]:
    """Return what a step's buckets come to together: `_SUMS`."""
    numel = kept = waits = sent = predicted = measured = 0.0
    known = told = False
    for own in buckets:
        numel += own.numel
        kept += own.numel * own.ratio_reached
        if own.gain is not None and own.energy is not None:
            known = True
            waits += (1 - own.gain) * own.energy
            sent += own.gain * own.energy
        if own.predicted_s is not None:
            told = True
            predicted += own.predicted_s
            measured += sum(own.phases_s.values())
    return (
        kept / numel if numel else math.nan,
        waits / sent if known and sent > 0 else math.nan,
        predicted if told else math.nan,
        measured if told else math.nan,
    )


def _decoded(path: str) -> Iterator[_Line]:
    """Yield the lines of a file."""
    decode = msgspec.json.Decoder(_Line).decode
    with open(path, "rb", buffering=_BUFFER) as file:
        for number, text in enumerate(file, 1):
            try:
                yield decode(text)
            except msgspec.DecodeError as error:
                line = _with_nan(text)
                if line is not None:
                    yield line
                elif text.endswith(b"\n"):
                    raise ConfigurationError(
                        f"report: line {number} of '{path}' is no step of --metrics ({error}); name files that "
                        "train has written with --json or --metrics"
                    ) from error


def _with_nan(text: bytes) -> _Line | None:
    """Read a line that has NaN or Infinity in it, which JSON has not and Python writes; None where it is not one."""
    try:
        return msgspec.convert(_without_raw(json.loads(text)), _Line)
    except (ValueError, msgspec.ValidationError, TypeError, AttributeError, KeyError):
        return None


def _without_raw(line: dict[str, object]) -> dict[str, object]:
    buckets = line["buckets"]
    if isinstance(buckets, list):
        for own in buckets:
            own["compressor"] = msgspec.Raw(json.dumps(own["compressor"]).encode())
    return line


def _shares(carried: list[dict[tuple[bytes, str], int]]) -> tuple[list[str], Array]:
    """Return the plans in words, from the one that carried most, and their shares of every step."""
    words: dict[tuple[bytes, str], str] = {}
    totals: dict[str, int] = {}
    for step in carried:
        for plan, numel in step.items():
            if plan not in words:
                words[plan] = plan_in_words(json.loads(plan[0]), plan[1])
            totals[words[plan]] = totals.get(words[plan], 0) + numel
    names = sorted(totals, key=lambda name: -totals[name])
    places = {name: place for place, name in enumerate(names)}
    shares = np.zeros((len(carried), len(names)))
    for row, step in zip(shares, carried, strict=True):
        for plan, numel in step.items():
            row[places[words[plan]]] += numel
    return names, shares / np.maximum(shares.sum(axis=1, keepdims=True), 1)


def plan_in_words(compressor: dict[str, object], collective: str) -> str:
    """Return the compressor, its ratio and the collective.

    Examples
    --------
    >>> plan_in_words({"id": "topk", "ratio": 0.01}, "allgather")
    'topk 0.01 by allgather'
    """
    ratio = compressor.get("ratio")
    layers = compressor.get("layers")
    size = " by layer" if layers else f" {ratio:.3g}" if isinstance(ratio, float | int) else ""
    return f"{compressor.get('id', '?')}{size} by {collective}"
