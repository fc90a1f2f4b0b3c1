"""The compressors that the joint choice chooses among."""

from typing import Any, cast

from mpicomp.compressors import COMPRESSORS, Compressor, Learner, Quantiser


def families(named: Compressor | None) -> tuple[list[Compressor], list[Quantiser], list[Learner]]:
    """Return the compressors with a ratio, the quantisers, and the codes that may be learnt.

    Where a compressor is named it is the only one; else they are what registered compressors suggest.
    """
    if named is not None:
        return ([], [], [cast(Learner, named).at_once]) if named.learns else ([named], [], [])
    names = sorted(COMPRESSORS.names(), key=lambda name: COMPRESSORS.plugin(name) is not None)
    # What derives from another one suggests the same.
    found: list[Any] = list(dict.fromkeys(own for name in names for own in COMPRESSORS.cls(name).suggested()))
    return (
        [own for own in found if own.selects_by_ratio],
        [own for own in found if own.message == "packed"],
        [own for own in found if own.learns],
    )
