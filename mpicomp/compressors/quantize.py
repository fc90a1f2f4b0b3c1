"""Quantisers that round to grids of equal steps: QSGD and its max-norm form, uniform quantisation and TernGrad."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base_compressor import BucketParameters, match_layer_setting
from mpicomp.compressors.kinds import CACHED_NUMEL, Bytes, Floats, Quantiser, sum_numbers
from mpicomp.compressors.wire import SIGNS
from mpicomp.errors import ConfigurationError
from mpicomp.gpu import to_python
from mpicomp.kernels import cpu
from mpicomp.registry import register
from mpicomp.setting_checks import check_choice, check_layers, check_multiple, is_integer, is_number

Words = NDArray[np.uint64]
Grids = tuple[NDArray[np.float32] | None, NDArray[np.float32]]
"""The least point of each bucket's grid, None for grids around zero, and its step."""

_LAUNCH_NUMEL = 1 << 22  # elements that a device packs at a time
MAX_BITS = 8  # largest number of bits of an element


@dataclass(frozen=True, repr=False)
class Grid(Quantiser):
    """Codes in bit planes, followed by one or two float32 for each bucket.

    Parameters
    ----------
    bits : int
        Bits of an element, at most 8.
    bucket : int or None
        Number of elements that share a grid, a multiple of 64; None is the whole array.
    rounding : {"stochastic", "nearest"}
        To one of the two neighbouring grid points at random, exactly in expectation, or to the nearest point.
    layers : mapping of str to int, optional
        Bits of parameters whose names match a pattern (as file names do: ``"embedding.*"``); the first
        pattern that matches counts. Buckets of elements then end where bits change.
    """

    layer_setting: ClassVar[str | None] = "bits"
    least_bits: ClassVar[int]
    numbers: ClassVar[int]  # float32 numbers per bucket: 1 (the step), or 2 (base and step) if grids are not symmetric

    bits: int = 4
    bucket: int | None = 128
    rounding: str = "stochastic"
    layers: Mapping[str, int] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._check_bits("bits", self.bits)
        check_choice(self.id, "rounding", self.rounding, ("stochastic", "nearest"))
        bucket = None if self.bucket is None else check_multiple(self.id, "bucket", self.bucket, SIGNS)
        layers = check_layers(self.id, "bits", self.layers, self._check_bits)
        self._set(bits=int(self.bits), bucket=bucket, layers=layers)

    def _check_bits(self, name: str, bits: Any) -> int:
        if not is_integer(bits) or not self.least_bits <= bits <= MAX_BITS:
            raise ConfigurationError(
                f"{self.id}: {name} must be a whole number from {self.least_bits} to {MAX_BITS}, got {bits!r}"
            )
        return int(bits)

    def bind_to(self, bucket: BucketParameters) -> Self:
        if not self.layers:
            return self
        parts: list[tuple[int, int]] = []  # elements, bits
        for name, size in zip(bucket.names, bucket.sizes, strict=True):
            bits = self.bits_of(name)
            if parts and parts[-1][1] == bits:
                parts[-1] = parts[-1][0] + size, bits
            else:
                parts.append((size, bits))
        return replace(self, parts=tuple((size, self.at_bits(bits)) for size, bits in parts))

    def bits_of(self, name: str) -> int:
        """Return the bits of the elements of a parameter."""
        return int(match_layer_setting(self.layers, name, self.bits))

    def at_bits(self, bits: int) -> Self:
        """Return the same quantiser with these bits for all elements."""
        return replace(self, bits=bits, layers=None, parts=())

    @property
    def contractive(self) -> bool:
        return all(self._contracts(bits) for bits in {self.bits, *(self.layers or {}).values()})

    @abstractmethod
    def _contracts(self, bits: int) -> bool:
        pass  # whether the expected lost energy at these bits is less than all

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def feedback(self) -> bool:  # stochastic rounding is unbiased without it
        return self.rounding == "nearest" and self.contractive

    def packed_bytes(self, numel: int) -> int:
        buckets = -(-numel // self._bucket_of(numel))
        return 8 * (self.bits * -(-numel // SIGNS) + -(-self.numbers * buckets // 2))

    def _bucket_of(self, numel: int) -> int:
        return self.bucket or max(1, -(-numel // SIGNS)) * SIGNS

    def pack(self, array: Floats, message: Bytes, sent: Floats, key: int) -> float:
        message[-8:] = 0  # padding
        words, grids = self._parts(message, array.size)
        key_used = key if self.rounding == "stochastic" else None
        return self._pack(array, self._bucket_of(array.size), grids, words, sent, key_used)

    @property
    def packs_in_place(self) -> bool:
        return self.rounding == "nearest"

    def pack_in_place(self, accumulated: Accumulated, place: slice, message: Bytes, key: int) -> float:
        message[-8:] = 0  # padding
        numel = place.stop - place.start
        words, (bases, steps) = self._parts(message, numel)
        bucket = self._bucket_of(numel)
        chunk = max(1, (CACHED_NUMEL if accumulated.kernels is cpu else _LAUNCH_NUMEL) // bucket) * bucket
        sent, losses = None, list[float]()
        for start in range(0, numel, chunk):
            array = accumulated.part(place.start + start, min(place.start + start + chunk, place.stop))
            sent = np.empty_like(array) if sent is None else sent[: array.size]
            buckets = slice(start // bucket, -(-(start + array.size) // bucket))
            grids = None if bases is None else bases[buckets], steps[buckets]
            part = slice(start // SIGNS * self.bits, -(-(start + array.size) // SIGNS) * self.bits)
            losses.append(self._pack(array, bucket, grids, words[part], sent, None))
            with np.errstate(invalid="ignore", over="ignore"):
                np.subtract(array, sent, out=array)
        return sum_numbers(losses)

    @abstractmethod
    def _pack(self, array: Floats, bucket: int, grids: Grids, words: Words, sent: Floats, key: int | None) -> float:
        pass  # as `Quantiser.pack`; without a key to the nearest

    def unpack(self, message: Bytes, out: Floats) -> None:
        words, grids = self._parts(message, out.size)
        kernels.unpack_grid(*grids, words, self._bucket_of(out.size), self.bits, out)

    def unpack_add(self, message: Bytes, factor: float, out: Floats) -> None:
        words, grids = self._parts(message, out.size)
        kernels.unpack_grid_add(*grids, words, self._bucket_of(out.size), self.bits, factor, out)

    def _parts(self, message: Bytes, numel: int) -> tuple[Words, Grids]:
        self.check_length(message, numel)
        end, buckets = 8 * self.bits * -(-numel // SIGNS), -(-numel // self._bucket_of(numel))
        words, numbers = message[:end].view(np.uint64), message[end:].view(np.float32)
        bases = numbers[:buckets] if self.numbers == 2 else None
        return words, (bases, numbers[(self.numbers - 1) * buckets : self.numbers * buckets])


@register
@dataclass(frozen=True, repr=False)
class QSGD(Grid):
    """QSGD (arXiv 1610.02132): every element to one of ``2 * s + 1`` multiples of its bucket's norm over s.

    ::

        w, s = abs(v).max(), 2 ** (bits - 1) - 1  # v: the elements of a bucket; w: np.linalg.norm(v) with norm="l2"
        levels = np.floor(abs(v) / w * s + random(v.size))  # + 0.5 with rounding="nearest"
        sent = np.copysign(levels * w / s, v)

    Parameters
    ----------
    bits : int
        From 2 to 8, the sign's among them.
    bucket : int or None
        Elements that share a norm, a multiple of 64. The norm adds ``32 / bucket`` bits to an element. None is the
        whole array, as in `MaxNorm`.
    rounding : {"stochastic", "nearest"}
        At random, which is unbiased and needs no error feedback, or to the nearest multiple, which runs with error
        feedback where it contracts.
    norm : {"max", "l2"}
        A bucket's largest magnitude, or the L2 norm of the paper.
    layers : mapping of str to int, optional
        Bits of parameters by patterns of names; see `Grid`.

    Notes
    -----
    Different from the paper: norms of buckets, by default the largest magnitude, and b bits for every element in place
    of an Elias code, which has no fixed length.

    Stochastic rounding has, in a bucket of n elements with norm w, an expected error of ``p * (1 - p)`` squared steps
    an element, p being its place between two points: at most ``n * (w / s)**2 / 4`` in all, and in the L2 form also
    within the paper's ``min(n / s**2, sqrt(n) / s) * norm2(v)``. Rounding to the nearest point never loses more. The
    energy of the bucket is at least ``w**2`` with either norm, so error feedback contracts below ``n = 4 * s**2``. In
    longer buckets the L2 form does not contract. With the largest magnitude and ``"nearest"`` any bucket contracts: the
    largest element is sent, and no error is larger than its element.

    The step travels as a float32, a place on the grid has 23 fractional bits, and norms beyond float32 are clipped.
    """

    gpu_sources: ClassVar[Sequence[str]] = ("accumulate", "grid", "message")

    id: ClassVar[str] = "qsgd"
    paper: ClassVar[str] = (
        "Alistarh et al. 2017, arXiv 1610.02132; norms of buckets, by default the largest magnitude, and codes of one "
        "length"
    )
    least_bits: ClassVar[int] = 2
    numbers: ClassVar[int] = 1

    norm: str = "max"

    @classmethod
    def suggested(cls, normalises: bool = True) -> "list[QSGD]":
        # They contract; other quantisers lose more at the same speed. Under Adam few bits lose more than is predicted.
        return [QSGD(bits=bits, rounding="nearest") for bits in ((8, 4) if normalises else (8, 4, 3, 2))]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.id, "norm", self.norm, ("max", "l2"))

    def _contracts(self, bits: int) -> bool:
        points = 2 ** (bits - 1) - 1
        short = self.bucket is not None and self.bucket < 4 * points**2
        return short or (self.rounding == "nearest" and self.norm == "max")

    @property
    def contractive_variant(self) -> "QSGD":
        return self if self.contractive else replace(self, rounding="nearest", norm="max")

    def _pack(self, array: Floats, bucket: int, grids: Grids, words: Words, sent: Floats, key: int | None) -> float:
        return kernels.pack_grid(array, bucket, self.bits, self.norm, grids[1], words, sent, key)


@register
@dataclass(frozen=True, repr=False)
class MaxNorm(QSGD):
    """QSGD-MaxNorm (arXiv 2109.12497): `QSGD` with one grid for the whole array, up to its largest magnitude.

    Parameters
    ----------
    bits, rounding, norm, layers
        See `QSGD`.
    bucket : int or None
        None is the whole array. On a GPU one warp measures a bucket, so that long ones take long.

    Notes
    -----
    Different from the paper: ranks have grids of their own, and sums are not of integers; bits count the sign, of which
    the paper's ``s = 2**bits - 1`` takes one more; there is one grid.
    """

    id: ClassVar[str] = "maxnorm"
    paper: ClassVar[str] = (
        "QSGD-MaxNorm, arXiv 2109.12497; bits count the sign, each rank has one grid of its own; rounding to the "
        "nearest with error feedback"
    )

    bucket: int | None = None


@register
@dataclass(frozen=True, repr=False)
class Uniform(Grid):
    """Every element to one of ``2**bits`` points between the least and the largest element of its bucket.

    ::

        step = (v.max() - v.min()) / (2**bits - 1)  # v: the elements of a bucket
        levels = np.floor((v - v.min()) / step + 0.5)  # + random(v.size) with rounding="stochastic"
        sent = v.min() + step * levels

    Parameters
    ----------
    bits : int
        From 1 to 8.
    bucket : int or None
        Elements that share a grid, a multiple of 64; None is the whole array. Least element and step add
        ``64 / bucket`` bits to an element.
    rounding : {"nearest", "stochastic"}
        To the nearest point, which runs with error feedback where it contracts, or at random, which is unbiased and
        needs none.
    layers : mapping of str to int, optional
        Bits of parameters by patterns of names; see `Grid`.

    Notes
    -----
    A bucket of n elements over a range R, in ``L = 2**bits - 1`` steps, loses at most ``n * (R / L)**2 / 4``, and its
    energy is at least ``R**2 / 2``. So error feedback contracts below ``n = 2 * L**2``: 3 bits for buckets of 64, 4 for
    those of 256. With fewer bits feedback is refused.

    Zero is rarely a point of the grid and is then not kept: not for gradients that are mostly zero. Bases and steps
    travel as float32; a range that float32 cannot hold ends early, and error feedback sends the rest.
    """

    id: ClassVar[str] = "uniform"
    paper: ClassVar[str] = (
        "min-max quantisation in buckets, as in CGX and L-GreCo, Markov et al. 2022, arXiv 2111.08617 and 2210.17357"
    )
    least_bits: ClassVar[int] = 1
    numbers: ClassVar[int] = 2

    bits: int = 8
    bucket: int | None = 256
    rounding: str = "nearest"

    def _contracts(self, bits: int) -> bool:
        steps = (1 << bits) - 1
        return self.bucket is not None and self.bucket < 2 * steps * steps

    @property
    def contractive_variant(self) -> "Uniform":
        # The shortest buckets contract from 3 bits on
        layers = self.layers and {name: max(3, bits) for name, bits in self.layers.items()}
        return self if self.contractive else replace(self, bits=max(3, self.bits), bucket=64, layers=layers)

    def _pack(self, array: Floats, bucket: int, grids: Grids, words: Words, sent: Floats, key: int | None) -> float:
        bases, steps = grids
        assert bases is not None
        return kernels.pack_range(array, bucket, self.bits, bases, steps, words, sent, key)


_TERNARY = QSGD(bits=2, bucket=None)


@register
@dataclass(frozen=True, repr=False)
class TernGrad(Quantiser):
    """TernGrad (arXiv 1705.07878): an element is sent as w with its sign, with probability ``|x| / w``, or as zero.

    ::

        w = min(abs(x).max(), clip * np.sqrt(np.mean(x**2)))
        chosen = random(x.size) < abs(x) / w
        sent = np.where(chosen, np.copysign(w, x), 0)

    Parameters
    ----------
    clip : float or None
        w is the smaller of the largest magnitude and ``clip`` times the root mean square; larger elements are clipped
        to w. Without clipping (None) nearly all elements are sent as zero, and the mean over draws is the gradient.

    Notes
    -----
    Not for error feedback: the error of an element can be many times the element.

    Different from the paper: ranks do not share a scale; a bucket has one, not each of its layers; and the mean square
    is taken about zero, since the standard deviation of equal elements is zero and would clip them to nothing.
    """

    id: ClassVar[str] = "terngrad"
    paper: ClassVar[str] = (
        "TernGrad, Wen et al. 2017, arXiv 1705.07878; clipped at 2.5 times the root mean square, one scale a bucket "
        "and rank"
    )
    gpu_sources: ClassVar[Sequence[str]] = ("grid", "message")

    clip: float | None = 2.5

    feedback = False
    contractive = False

    def __post_init__(self) -> None:
        if self.clip is not None:
            if not is_number(self.clip) or not 0 < self.clip < math.inf:
                raise ConfigurationError(f"terngrad: clip must be None or a positive number, got {self.clip!r}")
            self._set(clip=float(self.clip))

    @property
    def unbiased(self) -> bool:
        return self.clip is None

    def packed_bytes(self, numel: int) -> int:
        return _TERNARY.packed_bytes(numel)

    def pack(self, array: Floats, message: Bytes, sent: Floats, key: int) -> float:
        [energy] = to_python(kernels.energy(array))
        most = self.clip * math.sqrt(energy / array.size) if self.clip is not None and array.size else 0.0
        if not 0 < most < math.inf:  # NaN and infinity are not clipped, nor are numbers whose squares vanish
            return _TERNARY.pack(array, message, sent, key)
        _TERNARY.pack(np.clip(array, -most, most), message, sent, key)
        lost: float = kernels.energy(array - sent)
        return lost

    def unpack(self, message: Bytes, out: Floats) -> None:
        self.check_length(message, out.size)
        _TERNARY.unpack(message, out)

    def unpack_add(self, message: Bytes, factor: float, out: Floats) -> None:
        self.check_length(message, out.size)
        _TERNARY.unpack_add(message, factor, out)
