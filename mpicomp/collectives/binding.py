"""Bind a compressor to a collective that carries its messages."""

from typing import Any, ClassVar

import numpy as np

from mpicomp.collectives.ar_topk import exchange_at
from mpicomp.collectives.dense import ScatterReduce
from mpicomp.collectives.scheme import COLLECTIVES, Exchange, Scheme
from mpicomp.collectives.two_phase import TwoPhase
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base_compressor import Compressor
from mpicomp.compressors.context import Context
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.kinds import SharedSparsifier
from mpicomp.compressors.quantize import MaxNorm
from mpicomp.compressors.wire import SHARING
from mpicomp.errors import ConfigurationError, IncompatiblePairError
from mpicomp.mpi.rounds import Group, Round

list_collectives = COLLECTIVES.names
collective_class = COLLECTIVES.cls


def fitting(compressor: type[Compressor] | Compressor) -> list[str]:
    """Return the collectives that carry a compressor's messages, the preferred one first.

    >>> from mpicomp.compressors import TopK
    >>> fitting(TopK)[:2]
    ['allgather', 'star-topk']
    """
    if isinstance(compressor, SharedSparsifier):
        return fitting(_values_of(compressor))
    if isinstance(compressor, type) and issubclass(compressor, SharedSparsifier):
        return fitting(type(_values_of(compressor())))
    carriers = [cls for cls in COLLECTIVES.classes() if cls.supports(compressor)]
    return [cls.id for cls in sorted(carriers, key=lambda cls: cls.precedence)]


def bind(compressor: Compressor, collective: str) -> Scheme[Any]:
    """Bind a compressor to a collective.

    Parameters
    ----------
    compressor : Compressor
        Compressor that turns arrays into messages.
    collective : str
        Its name. One that is built on another may name it behind a colon, as in ``"star-topk:ring"``; by default it is
        the first one that fits. For packed messages ``"scatter-reduce"`` is another name of ``"two-phase"``.

    Raises
    ------
    UnknownNameError
        Where there is no such collective.
    IncompatiblePairError
        Where it does not carry this compressor's messages; the text names those that do.

    Examples
    --------
    >>> from mpicomp.compressors import TopK
    >>> bind(TopK(), "star-topk:scatter-reduce").id
    'star-topk:scatter-reduce'
    >>> bind(TopK(), "allreduce")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mpicomp.errors.IncompatiblePairError: topk: does not fit collective 'allreduce', which sums dense messages; \
use allgather, star-topk, ...
    """
    name, _, inner = collective.partition(":")
    if name in inner.split(":"):
        raise ConfigurationError(f"{name}: is not built on itself, got '{collective}'")
    if name == ScatterReduce.id and TwoPhase.supports(compressor):
        name = TwoPhase.id
    cls = collective_class(name)
    if isinstance(compressor, SharedSparsifier) and cls.supports(_values_of(compressor)):
        return SharedPositions(compressor, bind(_values_of(compressor), collective))
    if not cls.supports(compressor):
        does = f"{'sums' if cls.messages == 'dense' else 'carries'} {cls.messages} messages"
        if cls.messages == "own":
            does = f"only {cls.owner.id} has"
        elif not compressor.averages:
            does = "averages parts of arrays"
        elif compressor.shares_positions:
            does += ", not values at positions that all ranks know"
        if (
            not cls.needs_whole_message
            and getattr(compressor, "wire", None) in SHARING
            and cls.supports(type(compressor))
        ):
            does = "cuts messages or adds to them, whose values share scales here"
        *others, last = fitting(compressor)
        subject = repr(compressor) if name in fitting(type(compressor)) else compressor.id
        raise IncompatiblePairError(
            f"{subject}: does not fit collective '{name}', which {does}; "
            f"use {', '.join(others) + ' or ' if others else ''}{last}"
        )
    carried = cls.inner_compressor(compressor)
    if carried is None:
        if inner:
            raise ConfigurationError(f"{name}: is not built on another collective, got '{collective}'")
        return cls(compressor)
    scheme: Scheme[Any] = cls(compressor, bind(carried, inner or fitting(carried)[0]))  # type: ignore[call-arg]
    scheme.id = collective  # type: ignore[misc]  # one class for as many names as there are inner collectives
    return scheme


def variants(compressor: Compressor) -> list[str]:
    """Return everything that `bind` takes for a compressor: the collectives that fit, on all those that they may use.

    >>> from mpicomp.compressors import TopK
    >>> variants(TopK())[:3]
    ['allgather', 'star-topk:allreduce', 'star-topk:scatter-reduce']
    """
    return _variants(compressor, ())


def _variants(compressor: Compressor, above: tuple[str, ...]) -> list[str]:
    names = []  # no collective is built on itself
    values = _values_of(compressor) if isinstance(compressor, SharedSparsifier) else compressor
    for name in fitting(values):
        carried = collective_class(name).inner_compressor(values)
        if carried is None:
            names.append(name)
        elif name not in above:
            names += [f"{name}:{inner}" for inner in _variants(carried, (*above, name))]
    return names


def _values_of(compressor: SharedSparsifier) -> Compressor:
    return MaxNorm(bits=8, rounding="nearest") if compressor.wire == "q8" else Dense(wire=compressor.wire)


class SharedPositions(Scheme[SharedSparsifier]):
    """No indices on the wire: the values at the common positions are exchanged as a short array."""

    paper: ClassVar[str] = "none: the collective's own, on a shorter array"
    messages: ClassVar[str] = "dense"

    def __init__(self, compressor: SharedSparsifier, inner: Scheme[Any]) -> None:
        super().__init__(compressor)
        self._inner = inner
        self.id = inner.id  # type: ignore[misc]  # one class for as many names as there are collectives

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        return self._inner.rounds(self.compressor.count(numel), dtype, group, step)

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        numel = accumulated.numel
        indices = self.compressor.drawn(numel, context)
        return (yield from exchange_at(indices, accumulated, context, self._inner))
