"""The storage format of the values and indices of a sparse message, and the choice between plain and coded indices."""

from dataclasses import dataclass

from mpicomp.errors import ConfigurationError
from mpicomp.kernels import sizes

VALUES = (None, "fp16", "bf16", "signs")
INDICES = ("plain", "elias-fano")

_FEW = 64  # indices: fewer are never coded, see `compact`


@dataclass(frozen=True)
class Wire:
    """Storage format of the values and indices of a sparse message.

    Parameters
    ----------
    values : {None, "fp16", "bf16", "signs"}
        None: in the dtype of the array; ``"signs"``: a bit each, with one magnitude for all.
    indices : {"plain", "elias-fano"}
        As integers of 32 bits, or coded; `compact` tells what is worth it.
    """

    values: str | None = None
    indices: str = "plain"

    def __post_init__(self) -> None:
        if self.values not in VALUES:
            raise ConfigurationError(f"message: values must be None, 'fp16', 'bf16' or 'signs', got {self.values!r}")
        if self.indices not in INDICES:
            raise ConfigurationError(f"message: indices must be 'plain' or 'elias-fano', got {self.indices!r}")


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
