"""Check of a mean by a few sums, so that no array of a rank has to travel.

Each rank adds up, with random signs that all ranks share, gradient plus residual before, minus residual after: its
contribution to the mean. Over all ranks these sums are the ranks times the same sums of the mean, or something was lost
or made up: the law of conservation, at full size.
"""

import math
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCKS = 64  # sums of an array, each of a part of it

_PERIOD = 8_191  # a prime, so that errors that repeat do not keep step; below the length that BLAS cuts among threads
_UNIT = 2.0**-24  # largest relative error of rounding to float32
_SIGMAS = 8  # beyond which signed sums of rounding errors lie with a probability of 3e-14 (Hoeffding)

_SIGNS = np.random.default_rng(0).choice([-1.0, 1.0], _PERIOD)


@dataclass(frozen=True)
class Check:
    """Result of a check of the mean: its error, the tolerance, and whether it is the same on all ranks."""

    error: float  # largest difference of a sum over the norm of all exact sums
    # Largest error that rounding to float32 explains; infinite where the exchange is not meant to keep everything
    tolerance: float
    identical: bool  # whether the mean has the same bits on every rank

    @property
    def correct(self) -> bool:
        return self.identical and self.error <= self.tolerance


def signed_sums(array: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the signed sums of an array's blocks, in float64."""
    sums = np.zeros(BLOCKS)
    bounds = [array.size * block // BLOCKS for block in range(BLOCKS + 1)]
    for block in range(BLOCKS):
        for start in range(bounds[block], bounds[block + 1], _PERIOD):
            part = array[start : min(start + _PERIOD, bounds[block + 1])]
            sums[block] += float(np.dot(part.astype(np.float64), _SIGNS[: part.size]))
    return sums


def norm(array: NDArray[np.floating]) -> float:
    """Return the L2 norm, summed in float64."""
    parts = (array[start : start + _PERIOD].astype(np.float64) for start in range(0, array.size, _PERIOD))
    return math.sqrt(sum(float(np.dot(part, part)) for part in parts))


def statement(
    gradient: NDArray[np.floating],
    before: NDArray[np.floating] | None,
    after: NDArray[np.floating] | None,
    mean: NDArray[np.floating],
) -> NDArray[np.float64]:
    """Return the numbers of one rank that `judge` needs."""
    sent, size = signed_sums(gradient), norm(gradient)
    if before is not None and after is not None:
        sent += signed_sums(before) - signed_sums(after)
        size += norm(before) + norm(after)
    checksum = float(zlib.crc32(np.ascontiguousarray(mean).data))
    return np.concatenate((sent, signed_sums(mean), [size, checksum]))


def judge(statements: NDArray[np.float64], lossless: bool) -> Check:
    """Compare the numbers of the ranks; the same on all ranks that were given the same.

    An element of rank r is rounded when residual and gradient are added, when the sent part is subtracted, and on its
    way through a sum of all ranks and a division: at most ranks + 3 times. Errors of different signs add up like a
    random walk, of which each sum's length is at most the arrays' norms.
    """
    ranks = len(statements)
    exact = statements[:, :BLOCKS].sum(axis=0)
    mean, sizes, checksums = statements[0, BLOCKS : 2 * BLOCKS], statements[:, -2], statements[:, -1]
    scale = float(np.linalg.norm(exact)) or 1.0
    error = float(np.abs(exact - ranks * mean).max())
    bound = _SIGMAS * _UNIT * (ranks + 3) * float(sizes.sum())
    identical = bool((checksums == checksums[0]).all())
    return Check(error / scale, bound / scale if lossless else math.inf, identical)
