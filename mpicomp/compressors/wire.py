"""The storage format of the values and indices of a sparse message, and the choice between plain and coded indices."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicomp.kernels import sizes
from mpicomp.settings import check_choice

BITS = {"q8": 8, "q4": 4, "q2": 2}
"""Bits of a value; see `mpicomp.kernels.cpu.squares`."""
SHARING = ("signs", *BITS)
"""Forms in which values share a scale with others: they can neither be cut out of a message nor added in it."""
VALUES = (None, "fp16", "bf16", *SHARING)
INDICES = ("plain", "elias-fano")
SIGNS = 64
"""Signs in a word."""

_FEW = 64  # indices: fewer are never coded, see `compact`


@dataclass(frozen=True)
class Wire:
    """Storage format of the values and indices of a sparse message.

    Parameters
    ----------
    values : {None, "fp16", "bf16", "signs", "q8", "q4", "q2"}
        None: in the dtype of the array; ``"signs"``: a bit each, with one magnitude for all; ``"q8"``, ``"q4"`` and
        ``"q2"``: in so many bits each, with two scales for every 256.
    indices : {"plain", "elias-fano"}
        As integers of 32 bits, or coded; `compact` tells what is worth it.
    """

    values: str | None = None
    indices: str = "plain"

    def __post_init__(self) -> None:
        check_choice("message", "values", self.values, VALUES)
        check_choice("message", "indices", self.indices, INDICES)


def compact(count: int, numel: int) -> str:
    """Return the storage format for ``count`` indices below ``numel``; the same on all ranks, since only shapes decide.

    They are coded where there are at least 64 and the code is at most three quarters as long as plain integers. Coding
    takes about 1.5 nanoseconds an index, and decoding as long, and together 3 microseconds however few there are.
    Below 64 indices that outweighs the bytes that are saved even at 1 Gbit/s, and a saving of less than a byte
    an index is not worth its nanoseconds from 5 Gbit/s on.

    Examples
    --------
    >>> compact(63, 100_000), compact(64, 100_000), compact(64, 2**32 - 1)
    ('plain', 'elias-fano', 'plain')
    """
    return "elias-fano" if count >= _FEW and sizes.index_bytes(count, numel) <= 3 * count else "plain"


def value_bytes(count: int, dtype: np.dtype[Any], stored: str | None) -> int:
    """Return the bytes that ``count`` values take, stored as `Wire` says; without padding.

    Examples
    --------
    >>> [value_bytes(100, np.dtype(np.float32), stored) for stored in (None, "fp16", "q8", "q4", "q2", "signs")]
    [400, 200, 112, 64, 40, 20]
    """
    if stored in BITS:
        return sizes.squares_bytes(count, BITS[stored])
    if stored == "signs":
        return 8 * -(-count // SIGNS) + 4 * (count > 0)
    return count * (2 if stored in ("fp16", "bf16") else dtype.itemsize)
