"""Generators of rounds: advanced by a round, run to their end, or observed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mpicomp.errors import RankFailedError
from mpicomp.rounds.round import Request, Rounds

Value = TypeVar("Value")


@dataclass(frozen=True)
class Returned(Generic[Value]):
    """The end of a generator, with its return value."""

    value: Value


def advance(exchange: Rounds[Value], reply: Any = None) -> Request | Returned[Value]:
    """Advance a generator to its next round with a reply, None at first; a `RankFailedError` is raised in it."""
    try:
        return exchange.throw(reply) if isinstance(reply, RankFailedError) else exchange.send(reply)
    except StopIteration as stop:
        return Returned(stop.value)


def drive(exchange: Rounds[Value], answer: Callable[[Request], Any]) -> Value:
    """Run a generator of rounds to its end and return its value.

    ``answer`` runs a round and returns the reply: what was received, or a `Pending` for a round in the background.

    >>> import numpy as np
    >>> from mpicomp.rounds import Round
    >>> def total(number):
    ...     received = yield Round("allreduce", (1,), np.dtype("f8"), send=np.array([number]), recv=np.empty(1))
    ...     return received.tolist()
    >>> drive(total(2.0), lambda task: 3 * task.send)  # as among three ranks
    [6.0]
    """
    request = advance(exchange)
    while not isinstance(request, Returned):
        reply: Any
        try:
            reply = answer(request)
        except RankFailedError as error:
            reply = error
        request = advance(exchange, reply)
    return request.value


def observe(
    exchange: Rounds[Value],
    before: Callable[[Request], None] | None = None,
    after: Callable[[Request], None] | None = None,
) -> Rounds[Value]:
    """Forward a generator's rounds, with a call before and after each. As rounds."""
    reply: Any = None
    while not isinstance(request := advance(exchange, reply), Returned):
        if before is not None:
            before(request)
        reply = yield request
        if after is not None:
            after(request)
    return request.value
