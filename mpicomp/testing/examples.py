"""Something to try laws on, of everything that is registered: nobody keeps a list."""

import contextlib
from dataclasses import fields
from typing import Any

from mpicomp.compressors import COMPRESSORS, Compressor, Sparsifier, get_compressor
from mpicomp.errors import ConfigurationError

_SMALL = {"ratio": 0.05, "rank": 1}  # of what has one: all laws have something to look at
_LENGTH = 1000  # of an array, for the number of selected elements


def example(cls: type[Compressor]) -> Compressor:
    """Return a compressor at its default parameters, but for a ratio of 0.05 and a rank of 1 where it has one.

    Examples
    --------
    >>> import mpicomp
    >>> example(mpicomp.TopK), example(mpicomp.PowerSGD), example(mpicomp.OneBit)
    (TopK(ratio=0.05), PowerSGD(rank=1), OneBit())
    """
    names = {entry.name for entry in fields(cls)}
    return cls(**{name: value for name, value in _SMALL.items() if name in names})


def representatives() -> list[Compressor]:
    """Return a built-in compressor of each kind of message, of known or unknown length, with each kind of numbers."""
    found: dict[Any, Compressor] = {}
    for name in COMPRESSORS.names():
        if COMPRESSORS.plugin(name) is not None:
            continue
        cls = COMPRESSORS.cls(name)
        plain = example(cls)
        for candidate in (plain, *_narrow(plain)):
            varies = isinstance(candidate, Sparsifier) and candidate.count(_LENGTH) is None
            found.setdefault((candidate.message, varies, getattr(candidate, "wire", None)), candidate)
    return list(found.values())


def _narrow(compressor: Compressor) -> list[Compressor]:
    """Return the compressor with values in 16 bits, and in few bits that share scales, where it has such forms."""
    found = []
    for wire in ("bf16", "q4"):
        with contextlib.suppress(ConfigurationError):
            found.append(get_compressor(compressor.get_config() | {"wire": wire}))
    return found
