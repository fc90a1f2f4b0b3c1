"""Dynamic programmes over a discretised error: the best setting of each part within a limit of the whole."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Choice = NDArray[np.int64]
Places = NDArray[np.int32]


def least_total(
    errors: Sequence[NDArray[np.float64]],
    sizes: Sequence[NDArray[np.float64]],
    limit: float,
    default: Choice | None = None,
    bins: int = 10_000,
    strict: bool = False,
) -> Choice:
    """Choose a setting for every part so that the sum of sizes is least and that of errors at most ``limit``.

    L-GreCo's dynamic programme (arXiv 2210.17357). Errors are rounded up to bins of ``limit / bins``, and one bin a
    part is added to the capacity: rounding alone then rules out no choice within the limit, and the error is at most
    ``limit * (1 + parts / bins)``. What is chosen is never larger than ``default`` where that is within the limit. With
    ``strict`` no bin is added and nothing is compared: the error is at most ``limit``, and ``default`` is taken only
    where rounding leaves nothing within it.

    Parameters
    ----------
    errors, sizes : sequences of arrays, shape (settings,)
        Of each part, not negative.
    limit : float
        Of the sum of errors.
    default : array of int64, shape (parts,), optional
        The choice that one would make otherwise; taken where it is smaller than what is found, and where nothing is
        within the limit.
    bins : int
        Into which the limit is cut.
    strict : bool
        Whether errors that are rounded up have to be within the limit, as in the paper.

    Returns
    -------
    array of int64, shape (parts,)
        Where nothing is within the limit and there is no default, of each part what has the least error.

    Examples
    --------
    >>> import numpy as np
    >>> errors = [np.array([0.0, 3.0]), np.array([0.0, 2.0])]
    >>> least_total(errors, [np.array([9.0, 1.0]), np.array([5.0, 1.0])], 3.0).tolist()
    [1, 0]
    """
    best = np.full(bins + 1 + (0 if strict else len(errors)), np.inf)
    best[0] = 0.0
    choices: list[Places] = []
    for own_errors, own_sizes in zip(errors, sizes, strict=True):
        best, chosen = _extend(best, _units(own_errors, limit, bins), own_sizes)
        choices.append(chosen)
    if not np.isfinite(best).any():
        return _least_errors(errors) if default is None else default
    found = _walk_back(choices, errors, limit, bins, int(best.argmin()))
    if strict or default is None:
        return found
    if total(errors, default) <= limit and total(sizes, default) <= total(sizes, found):
        return default
    return found


def least_makespan(
    errors: Sequence[NDArray[np.float64]],
    seconds: Sequence[NDArray[np.float64]],
    ready: Sequence[float],
    limit: float,
    bins: int = 1000,
) -> tuple[NDArray[np.float64], "Solutions"]:
    """Choose a setting for every bucket so that the last one ends soonest, for every limit of the sum of errors.

    Bucket b begins when it is ready and the one before it has ended: ``F_b = max(F_{b-1}, ready_b) + seconds``. F grows
    with F of the bucket before, so that the dynamic programme of `least_total` is exact with it, to rounding of errors.

    Parameters
    ----------
    errors, seconds : sequences of arrays, shape (settings,)
        Of each bucket.
    ready : sequence of float
        When each is, ascending.
    limit : float
        The largest sum of errors.
    bins : int
        Into which it is cut.

    Returns
    -------
    ends : array, shape (bins + buckets + 1,)
        When the last bucket ends at best where the errors add up to at most ``place * limit / bins``; infinite where no
        choice does.
    solutions : Solutions
        Gives the choice behind each.

    Examples
    --------
    >>> import numpy as np
    >>> errors, seconds = [np.array([0.0, 1.0])] * 2, [np.array([5.0, 1.0])] * 2
    >>> ends, solutions = least_makespan(errors, seconds, [0.0, 4.0], 1.0, bins=10)
    >>> float(ends[10]), solutions.at(10).tolist()
    (6.0, [0, 1])
    """
    best = np.full(bins + len(errors) + 1, -np.inf)  # before the first bucket there is no end to wait for
    choices: list[Places] = []
    for own_errors, own_seconds, moment in zip(errors, seconds, ready, strict=True):
        best, chosen = _extend(np.maximum(best, moment), _units(own_errors, limit, bins), own_seconds)
        choices.append(chosen)
    return np.minimum.accumulate(best), Solutions(best, choices, errors, limit, bins)


class Solutions:
    """Choices behind the ends that `least_makespan` found."""

    def __init__(
        self,
        best: NDArray[np.float64],
        choices: list[Places],
        errors: Sequence[NDArray[np.float64]],
        limit: float,
        bins: int,
    ) -> None:
        self._best = best
        self._choices = choices
        self._errors = errors
        self._limit = limit
        self._bins = bins

    def at(self, place: int) -> Choice:
        """Return the setting of every bucket, shape (buckets,); where no choice is within, those of least error."""
        start = int(self._best[: place + 1].argmin())
        if not np.isfinite(self._best[start]):
            return _least_errors(self._errors)
        return _walk_back(self._choices, self._errors, self._limit, self._bins, start)


def total(table: Sequence[NDArray[np.float64]], choice: Choice) -> float:
    """Add up the costs of a choice from a table."""
    return float(sum(own[place] for own, place in zip(table, choice, strict=True)))


def _least_errors(errors: Sequence[NDArray[np.float64]]) -> Choice:
    return np.array([own.argmin() for own in errors])


def _units(errors: NDArray[np.float64], limit: float, bins: int) -> NDArray[np.int64]:
    """Return errors in bins, rounded up; more than any capacity where they are beyond the limit or not a number.

    A billionth of a bin is passed over, so that what is a whole number of bins stays that after a division.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        units = np.ceil(np.where(errors == 0, 0.0, errors / limit * bins) - 1e-9)
    return np.where(units <= bins, units, 1 << 40).astype(np.int64)


def _extend(
    best: NDArray[np.float64], units: NDArray[np.int64], values: NDArray[np.float64]
) -> tuple[NDArray[np.float64], Places]:
    """Add a part: return the best value for every error so far, and the choice for it."""
    out = np.full(best.size, np.inf)
    chosen = np.zeros(best.size, np.int32)
    for setting, (own, value) in enumerate(zip(units.tolist(), values.tolist(), strict=True)):
        if own >= best.size:
            continue
        now = best[: best.size - own] + value
        better = now < out[own:]
        np.copyto(out[own:], now, where=better)
        np.copyto(chosen[own:], setting, where=better)
    return out, chosen


def _walk_back(
    choices: list[Places], errors: Sequence[NDArray[np.float64]], limit: float, bins: int, place: int
) -> Choice:
    found = np.zeros(len(choices), np.int64)
    for part in range(len(choices) - 1, -1, -1):
        found[part] = choices[part][place]
        place -= int(_units(errors[part], limit, bins)[found[part]])
    return found
