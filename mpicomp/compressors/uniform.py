"""Uniform quantisation: a few bits an element, on a grid from the least to the largest element of each bucket."""

from dataclasses import dataclass, replace
from typing import ClassVar

from mpicomp import kernels
from mpicomp.compressors.grid import Grid, Grids, Words
from mpicomp.compressors.kinds import Floats
from mpicomp.registry import register


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
    bucket : int
        Elements that share a grid, a multiple of 64. Least element and step add ``64 / bucket`` bits to an element.
    rounding : {"nearest", "stochastic"}
        To the nearest point, which runs with error feedback where it contracts, or at random, which is unbiased and
        needs none.
    layers : mapping of str to int, optional
        Bits of parameters by patterns of names; see `Grid`.

    Notes
    -----
    A bucket of n elements over a range R, in ``L = 2**bits - 1`` steps, loses at most ``n * (R / L)**2 / 4``: to the
    nearest point in any case, at random in expectation. Its energy is at least that of its two ends: ``R**2 / 2`` if
    they lie on both sides of zero, else more. So error feedback contracts below ``n = 2 * L**2``: 3 bits for buckets of
    64, 4 for those of 256. With fewer bits feedback is refused.

    Zero is rarely a point of the grid and is then not kept: not for gradients that are mostly zero. Bases and steps
    travel as float32; a range that float32 cannot hold ends early, and error feedback sends the rest.

    Examples
    --------
    >>> import numpy as np
    >>> compressor, array = Uniform(bits=2), np.array([1, -2, 0.1], np.float32)
    >>> message, sent = np.empty(compressor.packed_bytes(3), np.uint8), np.empty(3, np.float32)
    >>> lost = compressor.pack(array, message, sent, key=0)
    >>> sent.tolist()
    [1.0, -2.0, 0.0]
    """

    id: ClassVar[str] = "uniform"
    paper: ClassVar[str] = (
        "min-max quantisation in buckets, as in CGX and L-GreCo, Markov et al. 2022, arXiv 2111.08617 and 2210.17357"
    )
    least_bits: ClassVar[int] = 1
    numbers: ClassVar[int] = 2

    bits: int = 8
    bucket: int = 256
    rounding: str = "nearest"

    def _contracts(self, bits: int) -> bool:
        steps = (1 << bits) - 1
        return self.bucket < 2 * steps * steps

    @property
    def contractive_variant(self) -> "Uniform":
        # The shortest buckets contract from 3 bits on
        layers = self.layers and {name: max(3, bits) for name, bits in self.layers.items()}
        return self if self.contractive else replace(self, bits=max(3, self.bits), bucket=64, layers=layers)

    def _pack(self, array: Floats, grids: Grids, words: Words, sent: Floats, key: int | None) -> float:
        bases, steps = grids
        assert bases is not None
        return kernels.pack_range(array, self.bucket, self.bits, bases, steps, words, sent, key)
