"""The compressors that the joint choice chooses among."""

from typing import Any

from mpicomp.compressors import COMPRESSORS, Compressor, Quantiser


def families(named: Compressor | None) -> tuple[list[Compressor], list[Quantiser]]:
    """Return the compressors with a ratio, and the quantisers.

    Where a compressor is named it is the only one; else they are what registered compressors suggest.
    """
    if named is not None:
        return [named], []
    names = sorted(COMPRESSORS.names(), key=lambda name: COMPRESSORS.plugin(name) is not None)
    # A class that derives from another one suggests the same.
    suggested: list[Any] = list(dict.fromkeys(each for name in names for each in COMPRESSORS.cls(name).suggested()))
    return (
        [compressor for compressor in suggested if compressor.selects_by_ratio],
        [compressor for compressor in suggested if compressor.message == "packed"],
    )
