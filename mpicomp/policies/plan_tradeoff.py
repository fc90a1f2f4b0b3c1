"""Time against convergence: dynamic programs over a discretized error, and the plans that train fastest."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Choice = NDArray[np.int64]
Array = NDArray[np.float64]

_PENALTY_BINS = 400  # from 0 to the largest penalty
_MIN_PROGRESS = 1e-3  # fraction of a step that counts as left at least, so that seconds are finite
_BUCKET_PENALTY_RATIO = 2.0  # of one bucket's penalty over the largest of all: layers need each other
# Exponent of the progress of a step. With 1 the seconds to a quality would be least; but most trainings have a fixed
# number of steps, and end behind dense by the loss.
_PROGRESS_EXPONENT = 2.0
_PENALTY_SLACK = 1.1  # factor by which plans that run may exceed the largest penalty
MIN_GAIN = 0.1  # fraction by which plans have to be better than safer ones: penalties are not exact
_MIN_HARMLESS_GAIN = 0.03  # the same for plans of which next to no penalty is predicted
_HARMLESS_PENALTY = 0.01  # share of steps that counts as next to none


@dataclass(frozen=True)
class PlanTradeoff:
    """Seconds and convergence penalty, a share of steps, of every row of every bucket, and the state of training."""

    penalties: Sequence[Array]  # by bucket and row, the share of steps that is lost; each bucket has a row of none
    seconds: Sequence[Array]  # by bucket and row
    weights: Sequence[float]  # shares of the buckets in the progress of a step
    ready: Sequence[float]  # seconds at which each bucket is ready, relative to the last one
    compute_s: float  # seconds of a step outside of exchanges
    limit: float  # the largest share of steps that may be lost

    def penalty(self, rows: Sequence[int]) -> float:
        """Return the share of steps that is lost with a row for every bucket."""
        parts = zip(self.penalties, rows, self.weights, strict=True)
        return float(sum(penalty[row] * weight for penalty, row, weight in parts))

    def seconds_of_step(self, rows: Sequence[int]) -> float:
        """Return the seconds of a step with a row for every bucket."""
        end = -math.inf
        for seconds, row, ready in zip(self.seconds, rows, self.ready, strict=True):
            end = max(end, ready) + seconds[row]
        return float(self.compute_s + end)

    def cost(self, rows: Sequence[int]) -> float:
        """Return the cost that the best rows minimize: seconds of a step over the square of its progress."""
        return float(self.seconds_of_step(rows) / max(1 - self.penalty(rows), _MIN_PROGRESS) ** _PROGRESS_EXPONENT)

    def allows(self, rows: Sequence[int]) -> bool:
        """Return whether the penalty of rows is within the limit, with some slack."""
        worst = max(penalty[row] for penalty, row in zip(self.penalties, rows, strict=True))
        within = self.penalty(rows) <= _PENALTY_SLACK * self.limit
        return within and worst <= _PENALTY_SLACK * _BUCKET_PENALTY_RATIO * self.limit

    def best(self) -> list[int]:
        """Return the rows of least `cost` within the limit."""
        pairs = zip(self.penalties, self.seconds, strict=True)
        rows = [_undominated(penalty, seconds, _BUCKET_PENALTY_RATIO * self.limit) for penalty, seconds in pairs]
        parts = zip(self.penalties, rows, self.weights, strict=True)
        penalties = [penalty[kept] * weight for penalty, kept, weight in parts]
        seconds = [of_bucket[kept] for of_bucket, kept in zip(self.seconds, rows, strict=True)]
        ends, choice_at = least_makespan(penalties, seconds, self.ready, self.limit, _PENALTY_BINS)
        totals = np.minimum(np.arange(ends.size) / _PENALTY_BINS, 1.0) * self.limit
        costs = (self.compute_s + ends) / np.maximum(1 - totals, _MIN_PROGRESS) ** _PROGRESS_EXPONENT
        choice = choice_at(int(costs.argmin()))
        return [int(kept[setting]) for kept, setting in zip(rows, choice, strict=True)]

    def best_over(self, dense: list[int], selecting: Sequence[NDArray[np.bool_]]) -> list[int]:
        """Return the best rows that gain enough over safer ones, or else the safer ones.

        Rows that select elements (``selecting``, by bucket and row) have to gain over rows that send all elements in
        few bits, and these over ``dense``.
        """
        pairs = zip(self.penalties, selecting, strict=True)
        whole = replace(self, penalties=[np.where(selects, np.inf, penalty) for penalty, selects in pairs])
        safe = dense
        for limit in (self.limit, min(self.limit, _HARMLESS_PENALTY)):
            rows = replace(whole, limit=limit).best()
            if self.pays(rows, dense):
                safe = rows
                break
        best = self.best()
        return best if self.cost(best) <= (1 - MIN_GAIN) * self.cost(safe) else safe

    def pays(self, rows: Sequence[int], dense: Sequence[int]) -> bool:
        """Return whether rows gain enough over dense ones to be run."""
        gain = MIN_GAIN if self.penalty(rows) > _HARMLESS_PENALTY else _MIN_HARMLESS_GAIN
        return self.cost(rows) <= (1 - gain) * self.cost(dense)


def _undominated(penalty: Array, seconds: Array, limit: float) -> NDArray[np.int64]:
    order = np.lexsort((penalty, seconds))
    order = order[penalty[order] <= max(limit, float(penalty.min()))]
    lowest = np.minimum.accumulate(penalty[order])
    return order[np.concatenate(([True], penalty[order][1:] < lowest[:-1]))]


def least_total(
    errors: Sequence[Array],
    sizes: Sequence[Array],
    limit: float,
    default: Choice | None = None,
    bins: int = 10_000,
    strict: bool = False,
) -> Choice:
    """Choose a setting for every part so that the sum of sizes is least and that of errors at most ``limit``.

    L-GreCo's dynamic program (arXiv 2210.17357). Errors are rounded up to bins of ``limit / bins``, and one bin a part
    is added to the capacity: rounding alone then excludes no choice within the limit, and the error is at most ``limit
    * (1 + parts / bins)``. The choice is never larger than ``default`` if that is within the limit. With ``strict``, as
    published, no bin is added and nothing is compared: the error is at most ``limit``, and ``default`` is taken only if
    rounding leaves nothing within it. If nothing is within the limit and there is no default, each part gets its
    setting of least error.
    """
    best = np.full(bins + 1 + (0 if strict else len(errors)), np.inf)
    best[0] = 0.0
    tables: list[NDArray[np.int32]] = []
    for error, size in zip(errors, sizes, strict=True):
        best, chosen = _extend(best, _units(error, limit, bins), size)
        tables.append(chosen)
    if not np.isfinite(best).any():
        return _least_errors(errors) if default is None else default
    found = _walk_back(tables, errors, limit, bins, int(best.argmin()))
    if strict or default is None:
        return found
    if total(errors, default) <= limit and total(sizes, default) <= total(sizes, found):
        return default
    return found


def least_makespan(
    errors: Sequence[Array], seconds: Sequence[Array], ready: Sequence[float], limit: float, bins: int = 1000
) -> tuple[Array, Callable[[int], Choice]]:
    """Choose a setting for every bucket so that the last one ends soonest, for every limit of the sum of errors.

    Bucket b begins when it is ready and the one before it has ended: ``F_b = max(F_{b-1}, ready_b) + seconds``. F grows
    with F of the bucket before, so the dynamic program of `least_total` is exact with it, to rounding of errors. Return
    the least end of the last bucket with errors of at most ``index * limit / bins``, infinite without a choice, shape
    (bins + buckets + 1,), and a function that returns the choice for an index: the setting of every bucket.
    """
    best = np.full(bins + len(errors) + 1, -np.inf)  # the first bucket has no end to wait for
    tables: list[NDArray[np.int32]] = []
    for error, bucket_s, ready_s in zip(errors, seconds, ready, strict=True):
        best, chosen = _extend(np.maximum(best, ready_s), _units(error, limit, bins), bucket_s)
        tables.append(chosen)

    def choice_at(index: int) -> Choice:
        start = int(best[: index + 1].argmin())
        if not np.isfinite(best[start]):
            return _least_errors(errors)
        return _walk_back(tables, errors, limit, bins, start)

    return np.minimum.accumulate(best), choice_at


def total(table: Sequence[Array], choice: Choice) -> float:
    """Return the sum of a table's values over a choice."""
    return float(sum(values[setting] for values, setting in zip(table, choice, strict=True)))


def _least_errors(errors: Sequence[Array]) -> Choice:
    return np.array([error.argmin() for error in errors])


def _units(errors: Array, limit: float, bins: int) -> NDArray[np.int64]:
    """Return errors in bins, rounded up but for a billionth; above any capacity if they exceed the limit or are NaN."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        units = np.ceil(np.where(errors == 0, 0.0, errors / limit * bins) - 1e-9)
    return np.where(units <= bins, units, 1 << 40).astype(np.int64)


def _extend(best: Array, units: NDArray[np.int64], values: Array) -> tuple[Array, NDArray[np.int32]]:
    out = np.full(best.size, np.inf)
    chosen = np.zeros(best.size, np.int32)
    for setting, (error, value) in enumerate(zip(units.tolist(), values.tolist(), strict=True)):
        if error >= best.size:
            continue
        candidate = best[: best.size - error] + value
        is_better = candidate < out[error:]
        np.copyto(out[error:], candidate, where=is_better)
        np.copyto(chosen[error:], setting, where=is_better)
    return out, chosen


def _walk_back(tables: list[NDArray[np.int32]], errors: Sequence[Array], limit: float, bins: int, index: int) -> Choice:
    found = np.zeros(len(tables), np.int64)
    for part in range(len(tables) - 1, -1, -1):
        found[part] = tables[part][index]
        index -= int(_units(errors[part], limit, bins)[found[part]])
    return found
