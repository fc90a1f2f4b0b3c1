"""The convergence penalty: the share of its steps by which compressed training falls behind a dense run.

An optimizer such as Adam divides by the root of a gradient's mean square. The accumulated gradient of an element that
is sent seldom arrives in bursts, whose mean square is larger, so its steps are smaller for good; and residuals are not
applied yet. Both depend on the element: large and noisy ones are sent at once, small ones late. The
penalty follows from scales, shares of signal and activity that ranks survey now and then, up to two fitted numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.compressors.kinds import Quantiser
from mpicomp.gpu import current_device
from mpicomp.workspace import Workspace

Array = NDArray[np.float64]

# By how much a walk of Gaussian steps overshoots a threshold, in standard deviations of a step:
# -zeta(1/2) / sqrt(2 pi); Siegmund 1979, doi:10.2307/1426855.
_OVERSHOOT = 0.5826
_LOSS_FACTOR = 1.5  # a loss counts more than that of the elements alone, which others depend on: docs/policies.md
_THRESHOLDS = 48  # that are tried; penalties between them are interpolated
_THRESHOLD_RANGE = 0.1, 1e4  # times the smallest and the largest scale: none, and one that hardly anything exceeds

_MAX_SAMPLE = 1 << 14  # elements of a bucket that are followed: their classes are known to some percent
_MAX_PACKED = 1 << 13  # elements that are packed, which differ less
_RUN = 128  # of neighbours among these, which share a grid as in an exchange
_TOP_LOG2 = 15  # of the largest mean square of an element over that of all
_CLASSES = 40  # of elements by scale, two for every power of two, from there down
_MAX_ENERGY = 1e38  # in float32
_MIN_WEIGHT = 0.1  # of a survey in running means; the first ones count equally
_MIN_SURVEYS = 10  # until scales are known: the first ones take one gradient's magnitude for its scale
_SIGNAL_JUMP_FACTOR = 2.0  # of the signal of one survey over the mean, up or down, from which on it has jumped
_SIGNAL_JUMP_SD = 4.0  # standard deviations of a survey's noise that a jump exceeds
ROWS = 5
"""Rows of a survey, by class: elements, their importance, energies, products of successive gradients, and the energies
of the elements that are packed."""

_GAUSSIAN_ACTIVITY = math.pi / 2  # E[g**2] / E[|g|]**2 of Gaussian gradients: they are active in all steps
_MIN_SIGNAL = 1e-4  # some thousand elements in some dozen surveys resolve no less


class ElementSurvey:
    """Follows some elements of a bucket: running means of squares, and of products of two successive gradients.

    These are of different batches, so their common part on one rank is signal, even if ranks have data of
    different kinds. Two surveys in a row are needed for a product. Elements are classed by their scale, the root of
    their mean square, relative to that of all: gradients become smaller as training proceeds. Messages and
    residuals of quantizers are measured by packing runs of neighbours, each quantizer with a separate residual.

    The importance of an element is relative to its parameter: one whose gradients are small, as those of queries and
    keys are, is needed as much as others. A parameter counts with the elements that are active in a step, of which an
    embedding has few.
    """

    def __init__(self, sizes: Sequence[int], quantisers: Sequence[Quantiser] = ()) -> None:
        numel = sum(sizes)
        random = np.random.default_rng(numel)
        many = numel > _MAX_SAMPLE  # then a list of all would take more memory than the gradient
        self._indices = np.unique(random.integers(0, numel, _MAX_SAMPLE)) if many else np.arange(numel)
        parameters = np.searchsorted(np.cumsum(sizes), self._indices, "right")  # of each element that is followed
        _, self._starts, self._counts = np.unique(parameters, return_index=True, return_counts=True)
        num_packed = numel if quantisers else 0
        if num_packed > _MAX_PACKED:
            runs = np.unique(random.integers(0, numel // _RUN, _MAX_PACKED // _RUN))
            self._packed = (runs[:, None] * _RUN + np.arange(_RUN)).reshape(-1)
        else:
            self._packed = np.arange(num_packed)
        self._quantisers = tuple(quantisers)
        self._workspace = Workspace()
        self._residuals = [np.zeros(self._packed.size, np.float32) for _ in quantisers]
        self._last = np.zeros(self._indices.size, np.float32)
        self._squares = np.zeros(self._indices.size, np.float32)
        self._packed_squares = np.zeros(self._packed.size, np.float32)
        self._magnitudes = np.zeros(self._indices.size, np.float32)
        self._products = np.zeros(self._indices.size, np.float32)
        self._surveys = self._pairs = 0
        self._last_step = -2

    @property
    def positions(self) -> NDArray[np.int64]:
        """The elements that are read, ascending."""
        return np.union1d(self._indices, self._packed)

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        # One object surveys one bucket
        gradient, packed = (_gather(accumulated, residual, indices) for indices in (self._indices, self._packed))
        # The followed elements or 0, the signal of this pair, then each class's sums over the mean square
        out = np.zeros(2 + (ROWS + 2 * len(self._quantisers)) * _CLASSES, np.float32)
        largest = max(float(np.abs(array).max(initial=0.0)) for array in (gradient, packed))
        if not largest**2 * (gradient.size + packed.size) < _MAX_ENERGY or not gradient.size:
            return out
        self._surveys += 1
        weight = max(_MIN_WEIGHT, 1 / self._surveys)
        self._squares += weight * (gradient * gradient - self._squares)
        self._packed_squares += weight * (packed * packed - self._packed_squares)
        self._magnitudes += weight * (np.abs(gradient) - self._magnitudes)
        is_pair, self._last_step = step == self._last_step + 1, step
        if is_pair:
            products = gradient * self._last
            self._products += max(_MIN_WEIGHT, 1 / (self._pairs + 1)) * (products - self._products)
            self._pairs += 1
            pair = math.sqrt(float(np.square(gradient).mean()) * float(np.square(self._last).mean()))
            out[1] = float(products.mean()) / pair if pair > 0 else 0.0
        self._last = gradient
        energies = [packed * packed]
        for quantiser, waiting in zip(self._quantisers, self._residuals, strict=True):
            sent = self._workspace.array("sent", packed.size, packed.dtype)
            message = self._workspace.array("message", quantiser.packed_bytes(packed.size), np.uint8)
            waiting += packed
            quantiser.pack(waiting, message, sent, step)
            waiting -= sent
            energies += [sent * sent, waiting * waiting]
        mean = float(self._squares.mean())
        if is_pair:
            out[0] = gradient.size
        if is_pair and mean > 0:
            followed = [None, self._importance(), self._squares, self._products]
            counts, importance, *sums = _by_class(self._squares, mean, followed)
            sums += _by_class(self._packed_squares, mean, energies)
            out[2:] = np.concatenate([counts, importance, *(values / mean for values in sums)])
        return out

    def _importance(self) -> Array:
        scales, none = np.sqrt(self._squares), np.zeros_like(self._squares)
        ratios = np.divide(self._magnitudes, scales, out=none, where=scales > 0)
        activity = np.minimum(1.0, _GAUSSIAN_ACTIVITY * ratios * ratios)
        gains = activity * scales * np.sqrt(scales)  # the exponent 1.5 is fitted, as is the factor of the loss
        active, total = (np.add.reduceat(values, self._starts) for values in (activity, gains))
        factors = np.divide(active, total, out=np.zeros_like(total), where=total > 0)
        importance: Array = gains * np.repeat(factors, self._counts)
        return importance


def _gather(
    accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, indices: NDArray[np.int64]
) -> NDArray[np.float32]:
    device = current_device()
    indices = device.to_device(indices)
    with np.errstate(invalid="ignore"):
        followed = accumulated[indices] if residual is None else accumulated[indices] - residual[indices]
    return device.to_host(followed).astype(np.float32)


def _by_class(
    squares: NDArray[np.float32], mean: float, arrays: Sequence[NDArray[np.floating] | None]
) -> list[NDArray[Any]]:
    # The exponent of a float32 is its logarithm, rounded down.
    exponents = ((squares / mean).view(np.int32) >> 23) - 127
    classes = np.clip(exponents + (_CLASSES - _TOP_LOG2), 0, _CLASSES - 1)
    classes[squares == 0] = _CLASSES
    return [np.bincount(classes, values, _CLASSES + 1)[:_CLASSES] for values in arrays]


@dataclass(frozen=True)
class ElementClasses:
    """Elements of a bucket, by scale; shape (classes,) each."""

    shares: Array  # of all elements; those that are zero have no class
    scales: Array  # root mean squares of gradients, relative to that of all
    signals: Array  # shares of signal in the energy
    weights: Array  # in the progress of a dense step


@dataclass
class ElementStatistics:
    """Scales and signal of a bucket's elements, learned from all ranks' surveys; the same on all ranks."""

    numel: int  # of the bucket
    quantisers: int = 0  # number of quantizers that surveys measure
    normalises: bool = True  # whether the optimizer divides by the root of a mean square, as Adam does
    surveys: int = 0  # so far

    def __post_init__(self) -> None:
        self._followed = 1.0
        self._sums = np.zeros((ROWS + 2 * self.quantisers, _CLASSES))

    @property
    def known(self) -> bool:
        """Whether there were enough surveys; none is needed without elements."""
        return self.surveys >= _MIN_SURVEYS or self.numel == 0

    @property
    def is_zero(self) -> bool:
        """Whether all gradients were zero."""
        return not self._sums[2].any()

    def observe(self, surveys: NDArray[np.float32]) -> None:
        """Learn from the surveys of all ranks, shape (ranks, width)."""
        rows = surveys[surveys[:, 0] > 0].astype(np.float64)
        if not rows.size:
            return
        self.surveys += 1
        self._followed = float(rows[:, 0].sum())
        weight = max(_MIN_WEIGHT, 1 / self.surveys)
        self._sums += weight * (rows[:, 2:].sum(axis=0).reshape(self._sums.shape) - self._sums)

    def jump(self, surveys: NDArray[np.float32]) -> int:
        """Return 1 or -1 if the signal of one survey is far above or below the mean, by more than noise; else 0."""
        rows = surveys[surveys[:, 0] > 0].astype(np.float64)
        if not self.known or self.is_zero or not rows.size:
            return 0
        counts, _, energies, products, *_ = self._sums[:, self._sums[2] > 0]
        total = energies.sum()
        mean, now = products.sum() / total, (rows[:, 0] * rows[:, 1]).sum() / rows[:, 0].sum()
        sd = math.sqrt(abs((energies * energies / counts).sum())) / total  # products of noise vary by energies
        is_other = not mean / _SIGNAL_JUMP_FACTOR < now < _SIGNAL_JUMP_FACTOR * mean
        return int(np.sign(now - mean)) if is_other and abs(now - mean) > _SIGNAL_JUMP_SD * sd else 0

    @property
    def signal(self) -> float:
        """Share of signal in the energy of a rank's gradient."""
        if self.is_zero:
            return _MIN_SIGNAL
        classes = self.classes()
        energies = classes.shares * classes.scales**2
        return float((energies * classes.signals).sum() / energies.sum())

    @property
    def importance(self) -> float:
        """Number of elements of the bucket that are active in a step."""
        return float(self._sums[1].sum()) / self._followed * self.numel

    def classes(self) -> ElementClasses:
        """Return the classes that have elements."""
        counts, importance, energies, products, *_ = self._sums[:, self._sums[2] > 0]
        # Where steps overshoot, so that successive gradients point against each other, these must not be late either.
        signals = np.clip(np.abs(products) / energies, _MIN_SIGNAL, 1)
        weights = importance / self._followed * signals
        return ElementClasses(counts / self._followed, np.sqrt(energies / counts), signals, weights)

    def selection_penalties(
        self, ratios: Array, ranks: int, age: float, by_magnitude: bool = True
    ) -> tuple[Array, Array]:
        """Return the penalties of selections at some ratios, by each rank separately and by all jointly."""
        if self.is_zero:
            return np.zeros(ratios.size), np.zeros(ratios.size)
        if by_magnitude:
            return selection_penalties(self.classes(), ratios, ranks, age, self.normalises)
        drawn = random_penalties(self.classes(), ratios, ranks, age, self.normalises)
        return drawn, drawn

    def quantiser_penalty(self, quantiser: int, ranks: int, age: float) -> float:
        if self.is_zero:
            return 0.0
        is_used, first = self._sums[2] > 0, ROWS + 2 * quantiser
        gradient, (sent, waiting) = self._sums[ROWS - 1, is_used], self._sums[first : first + 2, is_used]
        is_packed = gradient > 0  # of other classes nothing is known, which are taken to be sent
        sent = np.divide(sent, gradient, out=np.ones_like(sent), where=is_packed)
        waiting = np.divide(waiting, gradient, out=np.zeros_like(waiting), where=is_packed)
        return quantiser_penalty(self.classes(), sent, waiting, ranks, age, self.normalises)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that has to survive a restart, JSON-able."""
        return {"surveys": self.surveys, "followed": self._followed, "sums": self._sums.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of the same number of quantizers; ignore another one."""
        sums = np.array(state["sums"], float)
        if sums.shape == self._sums.shape:
            self.surveys, self._followed = int(state["surveys"]), float(state["followed"])
            self._sums = sums


def mean_waits(scales: Array, signals: Array, thresholds: Array) -> Array:
    """Return the mean steps, at least 1, after which an element's accumulated gradient reaches a threshold.

    A gradient is taken to be Gaussian: a mean, which is signal, and noise around it. Their sum over steps leaves the
    interval (-h, h) on average after ``(h / mean) tanh(h mean / variance)`` steps, with h the threshold and the
    overshoot (Wald's identity). ``scales`` are root mean squares of gradients, ``signals`` shares of their energy.
    """
    means, noise = scales * np.sqrt(signals), scales * scales * (1 - signals)
    reach = thresholds + _OVERSHOOT * np.sqrt(noise)
    with np.errstate(divide="ignore", over="ignore"):
        steps: Array = np.maximum(1.0, reach / means * np.tanh(reach * means / noise))
    return steps


def selection_penalties(
    classes: ElementClasses, ratios: Array, ranks: int, age: float, normalises: bool = True
) -> tuple[Array, Array]:
    """Return the penalties of sending elements once they exceed a threshold, at some ratios.

    Gradients that wait are a share of the ``age`` steps of training so far. Unless the optimizer ``normalises`` bursts
    cost nothing. The results, in [0, 1], are for ranks that select separately, and for ranks that all send the same
    elements.
    """
    (low, high), scales, signals = _THRESHOLD_RANGE, classes.scales, classes.signals
    thresholds = np.geomspace(low * scales.min(), high * scales.max(), _THRESHOLDS)[:, None]
    steps = mean_waits(scales, signals, thresholds)
    log_kept = np.log((classes.shares / steps).sum(axis=1))[::-1]
    reach = thresholds / scales + _OVERSHOOT * np.sqrt(1 - signals)
    energies = reach * reach / steps
    delays = np.maximum(0.0, (energies - 1) / (2 * signals))  # a delayed sum includes its residual
    bursts = (energies + (ranks - 1) * signals) / ranks, _joint_bursts(steps, signals, ranks)
    separate, joint = (_penalty(classes, delays, burst if normalises else None, ranks, age) for burst in bursts)
    return np.interp(np.log(ratios), log_kept, separate[::-1]), np.interp(np.log(ratios), log_kept, joint[::-1])


def random_penalties(classes: ElementClasses, ratios: Array, ranks: int, age: float, normalises: bool = True) -> Array:
    """Return the penalties of ranks that send the same random elements; see `selection_penalties`."""
    # Times between draws vary: their mean square is that of equal ones that are nearly twice as long.
    steps = np.broadcast_to(2 / ratios[:, None] - 1, (ratios.size, classes.scales.size))
    bursts = _joint_bursts(steps, classes.signals, ranks) if normalises else None
    return _penalty(classes, (steps - 1) / 2, bursts, ranks, age)


def quantiser_penalty(
    classes: ElementClasses, sent: Array, waiting: Array, ranks: int, age: float, normalises: bool = True
) -> float:
    """Return the penalty of sending all elements in few bits; see `selection_penalties`.

    An element too small for its grid is sent as 0 for a while and then as too large a number; one larger than its grid
    waits. ``sent`` and ``waiting`` are the energies of each class in a step and in residuals, over that of a gradient.
    The energy that has waited for t steps is ``t`` times the noise and ``t**2`` times the signal, which gives t.
    """
    signals, noise = classes.signals, 1 - classes.signals
    delay = (np.sqrt(noise * noise + 4 * signals * waiting) - noise) / (2 * signals)
    bursts = (sent + (ranks - 1) * signals) / ranks if normalises else None
    [penalty] = _penalty(classes, delay[None], bursts, ranks, age)
    return float(penalty)


def delay_penalty(delay: float, signal: float, ranks: int, age: float, normalises: bool = True) -> float:
    """Return the penalty of ``delay`` steps that the energy of all elements waits in residuals."""
    [burst] = _joint_bursts(np.array([1 + delay]), np.array([signal]), ranks)
    efficiency = 1 / np.sqrt(burst / (signal + (1 - signal) / ranks)) if normalises else 1.0
    lost = 1 - efficiency * (1 - min(1.0, delay / max(age, 1.0)))
    return float(min(_LOSS_FACTOR * lost, 1.0))


def _joint_bursts(steps: Array, signals: Array, ranks: int) -> Array:
    """Return the mean square, per step, of ranks' mean of sums over ``steps``, relative to a gradient's."""
    bursts: Array = steps * signals + (1 - signals) / ranks
    return bursts


def _penalty(classes: ElementClasses, delays: Array, bursts: Array | None, ranks: int, age: float) -> Array:
    """Return penalties, shape (thresholds,), from mean delays of signal and bursts, shape (thresholds, classes)."""
    dense, weights = classes.signals + (1 - classes.signals) / ranks, classes.weights
    efficiency = 1.0 if bursts is None else 1 / np.sqrt(np.maximum(bursts / dense, 1.0))
    applied = 1 - np.minimum(1.0, delays / max(age, 1.0))
    lost = 1 - (weights * efficiency * applied).sum(axis=1) / weights.sum()
    penalty: Array = np.minimum(_LOSS_FACTOR * lost, 1.0)
    return penalty
