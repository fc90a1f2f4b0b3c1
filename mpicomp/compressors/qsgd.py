"""QSGD: a few bits an element, on a grid around zero that each bucket's norm scales."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mpicomp import kernels
from mpicomp.compressors.grid import Grid, Grids, Words
from mpicomp.compressors.kinds import Floats
from mpicomp.registry import register
from mpicomp.setting_checks import check_choice


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
    bucket : int
        Elements that share a norm, a multiple of 64. The norm adds ``32 / bucket`` bits to an element.
    rounding : {"stochastic", "nearest"}
        At random, which is unbiased and needs no error feedback, or to the nearest multiple, which runs with error
        feedback where it contracts.
    norm : {"max", "l2"}
        A bucket's largest magnitude, or the L2 norm of the paper.
    layers : mapping of str to int, optional
        Bits of parameters by patterns of names; see `Grid`.

    Notes
    -----
    Different from the paper: norms of buckets, by default the largest magnitude in place of the L2 norm, and
    b bits for every element in place of an Elias code, which has no fixed length. At 4 bits, 15 of 16 codes are used.

    Stochastic rounding has, in a bucket of n elements with norm w, an expected error of ``p * (1 - p)`` squared steps
    an element, p being its place between two points: at most ``n * (w / s)**2 / 4`` in all, and in the L2 form also
    within the paper's ``min(n / s**2, sqrt(n) / s) * norm2(v)``. Rounding to the nearest point never loses more. The
    energy of the bucket is at least ``w**2`` with either norm, so error feedback contracts below ``n = 4 * s**2``.

    In longer buckets the L2 form does not contract. At random, the error of n equal elements is some ``sqrt(n) / s``
    times their energy, and the residual grows by that from step to step; to the nearest point all of them lie below
    half a step and are never sent. With the largest magnitude and ``"nearest"`` any bucket contracts: the largest
    element is sent, and no error is larger than its element.

    The step travels as a float32, a place on the grid has 23 fractional bits, and norms of float64 elements beyond
    float32 are clipped to nearly its largest number.

    Examples
    --------
    >>> import numpy as np
    >>> compressor, array = QSGD(bits=3, rounding="nearest"), np.array([1, -3, 0.4], np.float32)
    >>> message, sent = np.empty(compressor.packed_bytes(3), np.uint8), np.empty(3, np.float32)
    >>> lost = compressor.pack(array, message, sent, key=0)
    >>> sent.tolist()
    [1.0, -3.0, 0.0]
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
        check_choice("qsgd", "norm", self.norm, ("max", "l2"))

    def _contracts(self, bits: int) -> bool:
        points = 2 ** (bits - 1) - 1
        return (self.rounding == "nearest" and self.norm == "max") or self.bucket < 4 * points**2

    @property
    def contractive_variant(self) -> "QSGD":
        return self if self.contractive else replace(self, rounding="nearest", norm="max")

    def _pack(self, array: Floats, grids: Grids, words: Words, sent: Floats, key: int | None) -> float:
        return kernels.pack_grid(array, self.bucket, self.bits, self.norm, grids[1], words, sent, key)
