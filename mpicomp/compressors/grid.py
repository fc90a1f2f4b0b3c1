"""The base class of quantisers that round to a grid of equal steps, one grid for each bucket of elements."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.base_compressor import match_layer_setting
from mpicomp.compressors.kinds import Quantiser
from mpicomp.errors import ConfigurationError
from mpicomp.setting_checks import check_choice, is_integer

_WORD = 64  # elements of a bucket come in multiples of this: a bit plane is made of 64-bit words

MOST_BITS = 8
"""Largest number of bits of an element."""


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
        ``"stochastic"`` rounds to one of the two neighbouring grid points at random, so that the expected value is
        exact; ``"nearest"`` rounds to the nearest point.
    layers : mapping of str to int, optional
        Bits of parameters whose names match a pattern (as file names do: ``"embedding.*"``); the first
        pattern that matches counts. Buckets of elements then end where bits change.
    """

    layer_setting: ClassVar[str | None] = "bits"
    least_bits: ClassVar[int]
    numbers: ClassVar[int]
    """float32 numbers per bucket: 1 (the step), or 2 (base and step) if grids are not symmetric."""

    bits: int = 4
    bucket: int = 128
    rounding: str = "stochastic"
    layers: Mapping[str, int] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._check_bits("bits", self.bits)
        if not is_integer(self.bucket) or self.bucket < 1 or self.bucket % _WORD:
            raise ConfigurationError(f"{self.id}: bucket must be a multiple of {_WORD}, got {self.bucket!r}")
        check_choice(self.id, "rounding", self.rounding, ("stochastic", "nearest"))
        object.__setattr__(self, "bits", int(self.bits))
        object.__setattr__(self, "bucket", int(self.bucket))
        if self.layers is not None:
            if not isinstance(self.layers, Mapping):
                raise ConfigurationError(f"{self.id}: layers must map names to bits, got {self.layers!r}")
            for name, bits in self.layers.items():
                self._check_bits(f"layers['{name}']", bits)
            object.__setattr__(self, "layers", {str(name): int(bits) for name, bits in self.layers.items()})

    def _check_bits(self, name: str, bits: object) -> None:
        if not is_integer(bits) or not self.least_bits <= bits <= MOST_BITS:  # type: ignore[operator]
            raise ConfigurationError(
                f"{self.id}: {name} must be a whole number from {self.least_bits} to {MOST_BITS}, got {bits!r}"
            )

    def bind(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        shapes: Sequence[tuple[int, ...]] = (),
        *,
        model: Mapping[str, int] | None = None,
        warm_up: bool = True,
    ) -> Self:
        if not self.layers:
            return self
        parts: list[tuple[int, int]] = []  # elements, bits
        for name, size in zip(names, sizes, strict=True):
            bits = self.bits_of(name)
            if parts and parts[-1][1] == bits:
                parts[-1] = parts[-1][0] + size, bits
            else:
                parts.append((size, bits))
        return replace(self, parts=tuple((size, self.at_bits(bits)) for size, bits in parts))

    def bits_of(self, name: str) -> int:
        """Return the bits of an element of a parameter."""
        return int(match_layer_setting(self.layers, name, self.bits))

    def at_bits(self, bits: int) -> Self:
        """Return one that has these bits for all elements."""
        return replace(self, bits=bits, layers=None, parts=())

    @property
    def contractive(self) -> bool:
        return all(self._contracts(bits) for bits in {self.bits, *(self.layers or {}).values()})

    @abstractmethod
    def _contracts(self, bits: int) -> bool:
        """Return whether less is lost, on the average of random choices, than there is, at these bits."""

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def feedback(self) -> bool:
        # Stochastic rounding is unbiased without it
        return self.rounding == "nearest" and self.contractive

    def packed_bytes(self, numel: int) -> int:
        return 8 * (self.bits * -(-numel // _WORD) + -(-self.numbers * self._buckets(numel) // 2))

    def pack(
        self, array: NDArray[np.floating], message: NDArray[np.uint8], sent: NDArray[np.floating], key: int
    ) -> float:
        message[-8:] = 0  # padding
        words, bases, steps = self._parts(message, array.size)
        return self._pack(array, bases, steps, words, sent, key if self.rounding == "stochastic" else None)

    @abstractmethod
    def _pack(
        self,
        array: NDArray[np.floating],
        bases: NDArray[np.float32] | None,
        steps: NDArray[np.float32],
        words: NDArray[np.uint64],
        sent: NDArray[np.floating],
        key: int | None,
    ) -> float:
        """Choose the grids, and pack; see `Quantiser.pack`."""

    def unpack(self, message: NDArray[np.uint8], out: NDArray[np.floating]) -> None:
        words, bases, steps = self._parts(message, out.size)
        kernels.unpack_grid(bases, steps, words, self.bucket, self.bits, out)

    def unpack_add(self, message: NDArray[np.uint8], factor: float, out: NDArray[np.floating]) -> None:
        words, bases, steps = self._parts(message, out.size)
        kernels.unpack_grid_add(bases, steps, words, self.bucket, self.bits, factor, out)

    def _buckets(self, numel: int) -> int:
        return -(-numel // self.bucket)

    def _parts(
        self, message: NDArray[np.uint8], numel: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.float32] | None, NDArray[np.float32]]:
        """Return a message's words, its bases if it has any, and its steps."""
        self.check_length(message, numel)
        end, buckets = 8 * self.bits * -(-numel // _WORD), self._buckets(numel)
        words, numbers = message[:end].view(np.uint64), message[end:].view(np.float32)
        if self.numbers == 1:
            return words, None, numbers[:buckets]
        return words, numbers[:buckets], numbers[buckets : 2 * buckets]
