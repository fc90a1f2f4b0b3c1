"""Kept elements and gain of each parameter of a bucket."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.compressors.wire_format import Selection
from mpicomp.device import HOST, current_device, to_python
from mpicomp.workspace import Workspace

_WHOLE = 0.999  # gain from which on the gains of single parameters are not computed: each is nearly 1


@dataclass(frozen=True, eq=False)
class Layers:
    """Parameters of a bucket, and the elements and the energy that this rank has sent of each.

    Attributes
    ----------
    names : tuple of str
        Names of the parameters.
    sizes : array of int64, shape (parameters,)
        Elements.
    counted : array of int64, shape (parameters,), or callable
        What `kept` returns, or what returns it: on a device nobody waits for it until somebody asks.
    gains : array of float64, shape (parameters,), or None
        Share of the accumulated gradient's energy that was sent, on this rank; None where the step did not look at it.
    """

    names: tuple[str, ...]
    sizes: NDArray[np.int64]
    counted: NDArray[np.int64] | Callable[[], NDArray[np.int64]]
    gains: NDArray[np.float64] | None

    @functools.cached_property
    def kept(self) -> NDArray[np.int64]:
        """Elements that were sent, shape (parameters,); of a matrix that travels as thin factors, their elements."""
        return self.counted() if callable(self.counted) else self.counted

    @property
    def ratios(self) -> NDArray[np.float64]:
        """Kept fraction of each."""
        shares: NDArray[np.float64] = self.kept / self.sizes
        return shares

    def to_json(self) -> list[dict[str, Any]]:
        """Return an object for each parameter."""
        gains = [None] * len(self.names) if self.gains is None else self.gains.tolist()
        columns = zip(self.names, self.sizes.tolist(), self.kept.tolist(), gains, strict=True)
        return [
            {"name": name, "numel": numel, "ratio": kept / numel, "gain": gain} for name, numel, kept, gain in columns
        ]


def layers_of(
    names: tuple[str, ...],
    sizes: Sequence[int],
    accumulated: NDArray[np.floating],
    sent: NDArray[np.floating] | Selection,
    energies: NDArray[np.float64] | None,
    gain: float,
    thinned: Sequence[tuple[int, int, int]] = (),
    workspace: Workspace | None = None,
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
    workspace : Workspace, optional
        The bucket's.
    """
    device, there, gains = current_device(), None, None
    workspace = Workspace(device) if workspace is None else workspace
    bounds, elements = workspace.made("bounds", lambda: (np.concatenate(([0], np.cumsum(sizes))), np.array(sizes)))
    if isinstance(sent, Selection):
        # Bounds take the indices' dtype: searching for others would first convert all indices.
        own = workspace.made("bounds of indices", lambda: device.to_device(bounds.astype(np.uint32)))
        there = np.searchsorted(sent.indices, own)

    def count() -> NDArray[np.int64]:
        kept = np.diff(bounds if there is None else device.to_host(there))
        for start, stop, counted in thinned:
            kept[np.searchsorted(bounds, start, side="right") - 1] -= stop - start - counted
        return kept

    if energies is not None and gain > _WHOLE:
        gains = np.full(len(names), gain)
    elif energies is not None:
        places = bounds if there is None else device.to_host(there)
        ends = zip(energies, bounds[:-1], bounds[1:], places[:-1], places[1:], strict=True)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            lost = np.array(to_python(*(_lost(accumulated, sent, *own) for own in ends)))
            gains = np.clip(1 - np.where(energies > 0, lost / energies, 0.0), 0.0, 1.0)
    return Layers(names, elements, count if there is not None and device is not HOST else count(), gains)


def _lost(
    accumulated: NDArray[np.floating],
    sent: NDArray[np.floating] | Selection,
    energy: float,
    start: int,
    stop: int,
    low: int,
    high: int,
) -> Any:
    """Return the energy not sent from ``start`` to ``stop``, where elements ``low`` to ``high`` of the selection lie.

    Of a selection that travels in 16 bits what rounding took is passed over: less than a hundred-thousandth.
    """
    if isinstance(sent, Selection):
        values = sent.values[low:high]
        return energy - np.dot(values, values)
    left = accumulated[start:stop] - sent[start:stop]
    return np.dot(left, left)
