"""Collectives: how the ranks' messages become the same mean on every rank. One file each, no MPI."""

from typing import Any

from mpicomp.collectives.allgather import Allgather
from mpicomp.collectives.allreduce import Allreduce
from mpicomp.collectives.round import Group, Round, dense_ring_bytes
from mpicomp.collectives.scatter_reduce import ScatterReduce
from mpicomp.collectives.scheme import Context, Exchange, Result, Scheme
from mpicomp.collectives.shared import SharedPositions
from mpicomp.collectives.star_topk import StarTopk
from mpicomp.compressors.base import Compressor, SharedSparsifier
from mpicomp.errors import IncompatiblePairError, UnknownNameError

__all__ = [
    "Context",
    "Exchange",
    "Group",
    "Result",
    "Round",
    "Scheme",
    "bind",
    "collective_class",
    "dense_ring_bytes",
    "fitting",
    "list_collectives",
]

# In the order in which they are preferred where nothing has been measured.
_classes: dict[str, type[Scheme[Any]]] = {cls.id: cls for cls in (Allreduce, Allgather, ScatterReduce, StarTopk)}


def list_collectives() -> list[str]:
    """Give the names of all collectives, sorted.

    Examples
    --------
    >>> list_collectives()
    ['allgather', 'allreduce', 'scatter-reduce', 'star-topk']
    """
    return sorted(_classes)


def collective_class(name: str) -> type[Scheme[Any]]:
    """Give the class behind a name."""
    if name not in _classes:
        raise UnknownNameError("collective", name, _classes)
    return _classes[name]


def fitting(compressor: type[Compressor] | Compressor) -> list[str]:
    """Give the collectives that carry a compressor's messages, the preferred one first.

    Examples
    --------
    >>> from mpicomp.compressors import TopK
    >>> fitting(TopK)
    ['allgather', 'star-topk']
    """
    return [name for name, cls in _classes.items() if _carries(cls, compressor)]


def bind(compressor: Compressor, collective: str) -> Scheme[Any]:
    """Bind a compressor to a collective.

    Raises
    ------
    UnknownNameError
        Where there is no such collective.
    IncompatiblePairError
        Where it does not carry this compressor's messages; the message names those that do.

    Examples
    --------
    >>> from mpicomp.compressors import TopK
    >>> bind(TopK(), "allreduce")
    Traceback (most recent call last):
    mpicomp.errors.IncompatiblePairError: topk: does not fit collective 'allreduce', which sums dense messages; \
use allgather or star-topk
    """
    cls = collective_class(collective)
    if not _carries(cls, compressor):
        verb = "sums" if cls.messages == "dense" else "carries"
        raise IncompatiblePairError(
            f"{compressor.id}: does not fit collective '{collective}', which {verb} {cls.messages} messages; "
            f"use {' or '.join(fitting(compressor))}"
        )
    if isinstance(compressor, SharedSparsifier):
        return SharedPositions(compressor, cls)
    return cls(compressor)


def _carries(cls: type[Scheme[Any]], compressor: type[Compressor] | Compressor) -> bool:
    """Tell whether messages fit; values at positions that all ranks share are summed as any dense array is."""
    return cls.messages == ("dense" if compressor.message == "shared" else compressor.message)
