"""Seconds inside of calls, counted where they are made: what something costs where whole steps differ by more."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
from mpicomp.bench.measure.intervals import block_interval
from numpy.typing import NDArray

from mpicomp.rounds import Round
from mpicomp.transport import Transport


class Inside:
    """Counts the seconds that calls take, on all threads: those of a call within another one once.

    They are seconds on the clock of the wall, those of counting included: where others have the processor they are
    too many.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._one_at_a_time = threading.Lock()
        self._thread = _Thread()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count what happens until the end of the block."""
        outer, self._thread.within = self._thread.within, True
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._add(begin, outer)

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and is counted."""
        thread, clock = self._thread, time.perf_counter

        # A call that takes a microsecond is not to be counted as two: what is around it is kept short.
        @functools.wraps(function)
        def counted(*words: Any, **named: Any) -> Any:
            outer, thread.within = thread.within, True
            begin = clock()
            try:
                return function(*words, **named)
            finally:
                self._add(begin, outer)

        return counted

    def of_rounds(self, function: Callable[..., Generator[Any, Any, Any]]) -> Callable[..., Generator[Any, Any, Any]]:
        """Return rounds that are the same, and are counted, waiting included."""

        @functools.wraps(function)
        def counted(*words: Any, **named: Any) -> Generator[Any, Any, Any]:
            with self.counted():
                return (yield from function(*words, **named))

        return counted

    def _add(self, begin: float, outer: bool) -> None:
        seconds = time.perf_counter() - begin
        self._thread.within = outer
        if not outer:
            with self._one_at_a_time:
                self.seconds += seconds


class _Thread(threading.local):
    within = False  # a call that is counted


@contextlib.contextmanager
def instead(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes until the end of the block."""
    with contextlib.ExitStack() as stack:
        for owner, name, other in changes:
            stack.enter_context(patch.object(owner, name, other))
        yield


def of_all_ranks(rows: NDArray[np.float64], transport: Transport) -> NDArray[np.float64]:
    """Return the arrays of all ranks, a rank each. Collective."""
    size = transport.group.size
    recv = np.empty((size, *rows.shape))
    counts = [rows.size] * size
    transport.perform(Round("allgatherv", counts, rows.dtype, send=rows.reshape(-1), recv=recv.reshape(-1)))
    return recv


def largest_share(
    inside: NDArray[np.float64], seconds: NDArray[np.float64]
) -> tuple[float, tuple[float, float] | None]:
    """Return the share of seconds, shape (ranks, turns), inside of calls on the rank with the largest; its interval."""
    shares = inside.sum(axis=1) / seconds.sum(axis=1)
    rank = int(shares.argmax())
    return float(shares[rank]), block_interval(lambda part, all_: part.sum() / all_.sum(), inside[rank], seconds[rank])
