"""Gradient plus residual, summed in the sweep that suits whoever asks for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpicomp.kernels import cpu

TAIL = 2
"""Elements behind the array in its buffer: room for flags that travel with it through a sum."""


@dataclass
class Piece:
    """One parameter's gradient inside a bucket: where it starts, and a host array of any float type and strides.

    A bfloat16 gradient is given as uint16.
    """

    offset: int
    gradient: NDArray[np.generic]


class Accumulated:
    """What error feedback hands to a compressor: gradients, the residual, and room for their sum.

    The sum is made once, by `array` or by `candidates`, whichever is asked for first: a compressor that knows what
    it is looking for finds it in the sweep that makes the sum. The residual is left as it is, so that a
    step can be undone.

    Parameters
    ----------
    buffer : array, shape (numel + TAIL,)
        float32 or float64; receives the sum.
    residual : array, shape (numel,), or None
        Of the dtype of ``buffer``; None where there is no error feedback.
    pieces : sequence of Piece
        The gradients, which together fill the bucket; an empty sequence stands for zeros with no residual.
    """

    def __init__(
        self,
        buffer: NDArray[np.floating],
        residual: NDArray[np.floating] | None,
        pieces: Sequence[Piece],
        stale: bool = False,
    ) -> None:
        self._buffer = buffer
        self._residual = residual
        self._pieces = pieces
        self._done = False
        self.stale = stale
        self.energy = 0.0
        """Squared L2 norm of the sum, in float64."""
        self.finite = True
        """Whether every element of the sum is a finite number; set by the sweep."""

    @property
    def numel(self) -> int:
        """Number of elements, the tail left out."""
        return self._buffer.size - TAIL

    @property
    def dtype(self) -> np.dtype:
        """float32 or float64."""
        return self._buffer.dtype

    def array(self) -> NDArray[np.floating]:
        """Give the sum, a contiguous array of shape (numel,)."""
        out = self._buffer[: self.numel]
        if not self._done:
            self._start(out)
            for part, gradient, residual in self._parts(out):
                energy, top = cpu.accumulate(gradient, residual, out[part])
                self._add(energy, top)
        return out

    def candidates(self, bound: int, index: NDArray[np.uint32], bits: NDArray[np.unsignedinteger]) -> int:
        """Make the sum and list its elements of at least a magnitude, in one sweep.

        Parameters
        ----------
        bound : int
            Magnitude bits (`mpicomp.kernels.cpu.magnitude_bits`).
        index, bits : arrays
            Filled with the elements' positions, ascending, and their magnitude bits.

        Returns
        -------
        int
            How many there are; more than ``index.size`` where they did not fit. -1 where the sum was made before.
        """
        if self._done:
            return -1
        out = self._buffer[: self.numel]
        self._start(out)
        count = 0
        for part, gradient, residual in self._parts(out):
            count, energy, top = cpu.accumulate_candidates(
                gradient, residual, out[part], bound, part.start, index, bits, count
            )
            self._add(energy, top)
        return count

    def with_tail(self, *flags: float) -> NDArray[np.floating]:
        """Give the sum with ``flags`` behind it, a contiguous array of shape (numel + TAIL,)."""
        self.array()
        self._buffer[self.numel :] = flags
        return self._buffer

    def _start(self, out: NDArray[np.floating]) -> None:
        self._done = True
        if not self._pieces:
            out[:] = 0

    def _add(self, energy: float, top: int) -> None:
        self.energy += energy
        self.finite = self.finite and cpu.is_finite(top, self.dtype)

    def _parts(self, out: NDArray[np.floating]):  # type: ignore[no-untyped-def]
        for piece in self._pieces:
            part = slice(piece.offset, piece.offset + piece.gradient.size)
            gradient = piece.gradient
            if gradient.dtype == self.dtype and gradient.dtype.isnative and gradient.flags.c_contiguous:
                flat = gradient.reshape(-1)
            else:
                # Widened or packed where the sum will stand, which the kernel then adds to in place.
                flat = out[part]
                _copy(gradient, flat)
            yield part, flat, None if self._residual is None else self._residual[part]


def _copy(gradient: NDArray[np.generic], out: NDArray[np.floating]) -> None:
    """Widen or pack a gradient into a flat array, without another one in between."""
    contiguous = gradient.flags.c_contiguous and gradient.dtype.isnative
    if contiguous and gradient.dtype in (np.uint16, np.float16):
        cpu.widen(gradient.reshape(-1).view(np.uint16), "bf16" if gradient.dtype == np.uint16 else "fp16", out)
    elif gradient.dtype == np.uint16:
        words = out.view(np.uint32)  # bfloat16 is the upper half of a float32
        np.copyto(words.reshape(gradient.shape), gradient)
        np.left_shift(words, 16, out=words)
    else:
        np.copyto(out.reshape(gradient.shape), gradient, casting="same_kind")
