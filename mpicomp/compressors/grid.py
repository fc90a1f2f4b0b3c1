"""The base class of quantisers that round to a grid of equal steps, one grid for each bucket of elements."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.base_compressor import BucketParameters, match_layer_setting
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.kinds import CACHED, Bytes, Floats, Quantiser, sum_numbers
from mpicomp.compressors.wire_format import SIGNS
from mpicomp.errors import ConfigurationError
from mpicomp.kernels import cpu
from mpicomp.setting_checks import check_choice, check_layers, check_multiple, is_integer

Words = NDArray[np.uint64]
Grids = tuple[NDArray[np.float32] | None, NDArray[np.float32]]
"""The least point of each bucket's grid, None for grids around zero, and its step."""

_LAUNCHED = 1 << 22  # elements that a device packs at a time
MOST_BITS = 8  # largest number of bits of an element


@dataclass(frozen=True, repr=False)
class Grid(Quantiser):
    """Codes in bit planes, followed by one or two float32 for each bucket.

    Parameters
    ----------
    bits : int
        Bits of an element, at most 8.
    bucket : int
        Number of elements that share a grid, a multiple of 64.
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
    bucket: int = 128
    rounding: str = "stochastic"
    layers: Mapping[str, int] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._check_bits("bits", self.bits)
        check_choice(self.id, "rounding", self.rounding, ("stochastic", "nearest"))
        bucket = check_multiple(self.id, "bucket", self.bucket, SIGNS)
        layers = check_layers(self.id, "bits", self.layers, self._check_bits)
        self._set(bits=int(self.bits), bucket=bucket, layers=layers)

    def _check_bits(self, name: str, bits: Any) -> int:
        if not is_integer(bits) or not self.least_bits <= bits <= MOST_BITS:
            raise ConfigurationError(
                f"{self.id}: {name} must be a whole number from {self.least_bits} to {MOST_BITS}, got {bits!r}"
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
        """Return whether the expected lost energy at these bits is less than all."""

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def feedback(self) -> bool:  # stochastic rounding is unbiased without it
        return self.rounding == "nearest" and self.contractive

    def packed_bytes(self, numel: int) -> int:
        return 8 * (self.bits * -(-numel // SIGNS) + -(-self.numbers * -(-numel // self.bucket) // 2))

    def pack(self, array: Floats, message: Bytes, sent: Floats, key: int) -> float:
        message[-8:] = 0  # padding
        words, grids = self._parts(message, array.size)
        return self._pack(array, grids, words, sent, key if self.rounding == "stochastic" else None)

    @property
    def packs_in_place(self) -> bool:
        return self.rounding == "nearest"

    def pack_in_place(self, accumulated: GradientWithResidual, place: slice, message: Bytes, key: int) -> float:
        message[-8:] = 0  # padding
        numel = place.stop - place.start
        words, (bases, steps) = self._parts(message, numel)
        chunk = max(1, (CACHED if accumulated.kernels is cpu else _LAUNCHED) // self.bucket) * self.bucket
        sent, losses = None, list[float]()
        for start in range(0, numel, chunk):
            array = accumulated.part(place.start + start, min(place.start + start + chunk, place.stop))
            sent = np.empty_like(array) if sent is None else sent[: array.size]
            buckets = slice(start // self.bucket, -(-(start + array.size) // self.bucket))
            grids = None if bases is None else bases[buckets], steps[buckets]
            part = slice(start // SIGNS * self.bits, -(-(start + array.size) // SIGNS) * self.bits)
            losses.append(self._pack(array, grids, words[part], sent, None))
            with np.errstate(invalid="ignore", over="ignore"):
                np.subtract(array, sent, out=array)
        return sum_numbers(losses)

    @abstractmethod
    def _pack(self, array: Floats, grids: Grids, words: Words, sent: Floats, key: int | None) -> float:
        """Choose the grids, and pack; see `Quantiser.pack`. Without a key, round to the nearest."""

    def unpack(self, message: Bytes, out: Floats) -> None:
        words, grids = self._parts(message, out.size)
        kernels.unpack_grid(*grids, words, self.bucket, self.bits, out)

    def unpack_add(self, message: Bytes, factor: float, out: Floats) -> None:
        words, grids = self._parts(message, out.size)
        kernels.unpack_grid_add(*grids, words, self.bucket, self.bits, factor, out)

    def _parts(self, message: Bytes, numel: int) -> tuple[Words, Grids]:
        self.check_length(message, numel)
        end, buckets = 8 * self.bits * -(-numel // SIGNS), -(-numel // self.bucket)
        words, numbers = message[:end].view(np.uint64), message[end:].view(np.float32)
        bases = numbers[:buckets] if self.numbers == 2 else None
        return words, (bases, numbers[(self.numbers - 1) * buckets : self.numbers * buckets])
