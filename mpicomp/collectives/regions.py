"""Parts of an array, one a rank: their bounds, the headers that owners read, and means of arriving segments."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.scheme import Result, check_undamaged, gain_of
from mpicomp.compressors.accumulated import TRAILER, Accumulated
from mpicomp.compressors.wire import DAMAGED, read_dense_header, read_dense_headers
from mpicomp.errors import MessageError
from mpicomp.gpu import pick, received_on_host, to_python
from mpicomp.rounds import parts_of


def even_bounds(numel: int, size: int) -> list[int]:
    """Return the starts of regions of equal length, and the end of the last one.

    >>> even_bounds(10, 4)
    [0, 3, 6, 8, 10]
    """
    return [0, *accumulate(parts_of(numel, size))]


def quantiles(indices: NDArray[np.uint32], size: int) -> list[int]:
    """Return where a rank would cut between ``size`` regions: -1 everywhere if it has selected nothing.

    >>> quantiles(np.array([1, 2, 3, 50], np.uint32), 2), quantiles(np.array([], np.uint32), 3)
    ([3], [-1, -1])
    """
    count = indices.size
    if not count:
        return [-1] * (size - 1)
    found: list[int] = pick(indices, [place * count // size for place in range(1, size)]).tolist()
    return found


def mean_bounds(cuts: NDArray[np.int64], before: Sequence[int]) -> list[int]:
    """Return the boundaries that follow from all ranks' quantiles: their means, rounded down.

    >>> mean_bounds(np.array([[3], [-1], [6]]), [0, 5, 10])
    [0, 4, 10]
    """
    rows = [[int(cut) for cut in row] for row in cuts if -1 not in row]
    if not rows:
        return list(before)
    return [before[0], *(sum(column) // len(rows) for column in zip(*rows, strict=True)), before[-1]]


def overlaps(counts: Sequence[int], targets: Sequence[int], rank: int) -> list[int]:
    """Return the number of a rank's elements that go to each when a list that ranks hold in pieces is cut again.

    >>> [overlaps([6, 0, 3], [3, 3, 3], rank) for rank in range(3)]
    [[3, 3, 0], [0, 0, 0], [0, 0, 3]]
    """
    start = sum(counts[:rank])
    stop = start + counts[rank]
    bounds = pairwise([0, *accumulate(targets)])
    return [max(0, min(stop, end) - max(start, begin)) for begin, end in bounds]


def read_sent(
    collective: str, messages: NDArray[np.uint8], count: int
) -> tuple[int, float, float, MessageError | None]:
    """Read the messages that an owner received; return flags for the answer, energy, lost energy, and the error."""
    try:
        return *read_dense_headers(messages, count), None
    except MessageError as error:
        return DAMAGED, 0.0, 0.0, MessageError(f"{collective}: {error}")


def read_answers(
    collective: str,
    messages: NDArray[np.uint8],
    sizes: Sequence[int],
    counts: Sequence[int],
    problem: MessageError | None,
) -> tuple[int, float, float, MessageError | None]:
    """Read the answers of all owners; where some owner could not read what it was sent, raise on all ranks."""
    flags, energy, lost, start = 0, 0.0, 0.0, 0
    unread: MessageError | None = None
    for rank, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        try:
            # All say the same energy
            seen, energy, lost_part = read_dense_header(messages[start : start + size], count)
            flags, lost = flags | seen, lost + lost_part
        except MessageError as error:
            unread = unread or MessageError(f"{collective}: from rank {rank}: {error}")
        start += size
    check_undamaged(collective, flags, problem)
    return flags, energy, lost, unread


class SegmentedMean:
    """Adds and divides segments as they arrive, and notes whether they are finite; trailers are summed alone."""

    def __init__(self, accumulated: Accumulated, ranks: int) -> None:
        self._accumulated = accumulated
        self._ranks = ranks
        self._finite: Any = True

    def adds(
        self,
        received: NDArray[np.floating],
        array: NDArray[np.floating],
        offset: int,
        other: Callable[[int, int], NDArray[np.floating]],
        complete: bool,
    ) -> Callable[[int, int], None]:
        """Return a function that writes segments received, plus others, to ``array``, and divides complete sums."""

        def arrived(start: int, stop: int) -> None:
            out = array[offset + start : offset + stop]
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(received[start:stop], other(offset + start, offset + stop), out=out)
            if complete:
                self.divide(array, offset + start, offset + stop)

        return arrived

    def sees(self, array: NDArray[np.floating], offset: int) -> Callable[[int, int], None]:
        """Return a function that checks whether segments of ``array``, which are means already, are finite."""

        def arrived(start: int, stop: int) -> None:
            values = self._values(array, offset + start, offset + stop)
            # Squares of finite numbers overflow too, and are then not worth a fast answer.
            on_host = isinstance(values, np.ndarray)
            quick = on_host and bool(np.isfinite(kernels.energy(values)))
            self._finite = self._finite & (quick or np.isfinite(values).all())

        return arrived

    def divide(self, array: NDArray[np.floating], start: int, stop: int) -> None:
        """Make sums means in place, the tail left as it is."""
        values = self._values(array, start, stop)
        self._finite = self._finite & kernels.scale(values, 1 / self._ranks)

    def result(self, array: NDArray[np.floating]) -> Result:
        """Return the result, once all segments of ``array`` were divided or seen."""
        numel = self._accumulated.numel
        nonfinite, stale, energy, lost = received_on_host(array[numel : numel + TRAILER]).tolist()
        [finite] = to_python(self._finite)
        return Result(
            mean=array[:numel],
            sent=self._accumulated.array(),
            energy=energy,
            gain=gain_of(lost, energy),
            kept=float(numel),
            nonfinite=nonfinite > 0 or not finite,
            stale=stale > 0,
            leaves="mean" if array is self._accumulated.memory else "sum",
        )

    def _values(self, array: NDArray[np.floating], start: int, stop: int) -> NDArray[np.floating]:
        return array[start : min(stop, self._accumulated.numel)]
