"""Kept elements and gain of each parameter of a bucket."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.compressors.kinds import Selection

_WHOLE = 0.999  # gain from which on the gains of single parameters are not computed: each is nearly 1


@dataclass(frozen=True, eq=False)
class Layers:
    """Parameters of a bucket, and the elements and the energy that this rank has sent of each.

    Attributes
    ----------
    names : tuple of str
        Names of the parameters.
    sizes, kept : arrays of int64, shape (parameters,)
        Elements, and those of them that were sent; of a matrix that travels as thin factors, their elements.
    gains : array of float64, shape (parameters,), or None
        Share of the accumulated gradient's energy that was sent, on this rank; None where the step did not look at it.
    """

    names: tuple[str, ...]
    sizes: NDArray[np.int64]
    kept: NDArray[np.int64]
    gains: NDArray[np.float64] | None

    @property
    def ratios(self) -> NDArray[np.float64]:
        """Kept fraction of each."""
        shares: NDArray[np.float64] = self.kept / self.sizes
        return shares

    def to_json(self) -> list[dict[str, Any]]:
        """Return an object for each parameter."""
        gains = [None] * len(self.names) if self.gains is None else self.gains.tolist()
        columns = zip(self.names, self.sizes.tolist(), self.ratios.tolist(), gains, strict=True)
        return [{"name": name, "numel": numel, "ratio": ratio, "gain": gain} for name, numel, ratio, gain in columns]


def layers_of(
    names: tuple[str, ...],
    sizes: Sequence[int],
    accumulated: NDArray[np.floating],
    sent: NDArray[np.floating] | Selection,
    energies: NDArray[np.float64] | None,
    gain: float,
    thinned: Sequence[tuple[int, int, int]] = (),
) -> Layers:
    """Return the kept elements and the gain of each parameter.

    Parameters
    ----------
    names, sizes
        Of the parameters, in their order.
    accumulated, sent
        Of the bucket; see `mpicomp.collectives.Result`.
    energies : array of float64, shape (parameters,), or None
        Squared L2 norms of the parameters' accumulated gradients, where they are known.
    gain : float
        Of the bucket; where almost nothing was lost it stands for that of every parameter.
    thinned : sequence of (int, int, int)
        See `mpicomp.collectives.Result`; each part lies in one parameter.
    """
    bounds = np.concatenate(([0], np.cumsum(sizes)))
    # Bounds take the indices' dtype: searching for others would first convert all indices.
    places = np.searchsorted(sent.indices, bounds.astype(np.uint32)) if isinstance(sent, Selection) else bounds
    gains = None
    if energies is not None and gain > _WHOLE:
        gains = np.full(len(names), gain)
    elif energies is not None:
        ends = zip(energies, bounds[:-1], bounds[1:], places[:-1], places[1:], strict=True)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            lost = np.array([_lost(accumulated, sent, *own) for own in ends])
            gains = np.clip(1 - np.where(energies > 0, lost / energies, 0.0), 0.0, 1.0)
    kept = np.diff(places)
    for start, stop, count in thinned:
        kept[np.searchsorted(bounds, start, side="right") - 1] -= stop - start - count
    return Layers(names, np.array(sizes), kept, gains)


def _lost(
    accumulated: NDArray[np.floating],
    sent: NDArray[np.floating] | Selection,
    energy: float,
    start: int,
    stop: int,
    low: int,
    high: int,
) -> float:
    """Return the energy not sent from ``start`` to ``stop``, where elements ``low`` to ``high`` of the selection lie.

    Of a selection that travels in 16 bits what rounding took is passed over: less than a hundred-thousandth.
    """
    if isinstance(sent, Selection):
        values = sent.values[low:high]
        return energy - float(np.dot(values, values))
    left = accumulated[start:stop] - sent[start:stop]
    return float(np.dot(left, left))
