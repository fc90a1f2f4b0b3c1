"""The cost model: predicted seconds of plans, learnt from measured ones."""

import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from mpicomp.collectives import Scheme
from mpicomp.cost.kernels import Alone
from mpicomp.cost.network import Network, seen_by_some
from mpicomp.cost.plans import Candidates, Learnt
from mpicomp.errors import ConfigurationError
from mpicomp.rounds import Group
from mpicomp.system.files import whole_file

SCHEMA = 2

_SUFFIX = " on cuda"  # behind the names of own work that is a device's; rounds are the same there
_TO_AN_OCTAVE = 4  # lengths, each of which stands for all within a tenth of it
_LATER = 1 << 30  # number of a step in the long run: first steps may have other rounds


class CostModel:
    """Measured speed of links, operations and schemes, for ranks of one layout.

    Parameters
    ----------
    network : Network
        Links and operations.

    Attributes
    ----------
    kernels : dict
        Seconds of each scheme's own work alone: `mpicomp.cost.kernels.Alone`; see `scheme_key`.
    speeds_learnt, kernels_learnt, rounds_learnt : dict
        What steps told of how fast each compressor is here, of each scheme's own work and of each plan's rounds, by
        length; see `scheme_key`, `plan_key`.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.kernels: dict[str, Alone] = {}
        self.speeds_learnt: dict[str, dict[int, Learnt]] = {}
        self.kernels_learnt: dict[str, dict[int, Learnt]] = {}
        self.rounds_learnt: dict[str, dict[int, Learnt]] = {}

    def candidates(
        self,
        schemes: Sequence[Scheme[Any]],
        numel: int,
        dtype: np.dtype[Any],
        group: Group,
        ladder: bool = False,
        on_device: bool = False,
    ) -> Candidates:
        """Return the plans of one bucket, whose schemes' own work has been measured.

        Parameters
        ----------
        schemes : sequence of Scheme
            Among which one is chosen.
        numel : int
            Elements of the bucket.
        dtype : numpy.dtype
            Of its elements.
        group : Group
            All ranks.
        ladder : bool
            Whether what is learnt of a compressor at one ratio shall count for its other ratios.
        on_device : bool
            Whether the bucket is on a device, the same on all ranks.
        """
        speeds, kernels = self.speeds_learnt, self.kernels_learnt
        keys = [scheme_key(scheme, ladder, on_device) for scheme in schemes]
        compressors = [_config(scheme, ladder) + _SUFFIX * on_device for scheme in schemes]
        views = seen_by_some(group)
        shapes = [[scheme.rounds(numel, dtype, view, _LATER) for view in views] for scheme in schemes]
        alone = []
        for scheme, key in zip(schemes, keys, strict=True):
            alone.append(self.kernels[key].seconds(numel, scheme.compressor.expected(numel)))
        return Candidates(
            self.network,
            np.array([self.network.coefficients(of_plan, views) for of_plan in shapes]),
            alone,
            [_learnt_of(speeds, key, numel, Learnt.speed) for key in compressors],
            [_learnt_of(kernels, key, numel, Learnt.kernels) for key in keys],
            [_learnt_of(self.rounds_learnt, plan_key(scheme, ladder), numel, Learnt.rounds) for scheme in schemes],
        )

    def own_work(self, scheme: Scheme[Any], numel: int, on_device: bool = False) -> float:
        """Return the seconds of a scheme's own work on a ladder of ratios, from other compressors' where it never ran.

        What was not measured takes none.
        """
        own = self.kernels.get(scheme_key(scheme, True, on_device))
        if own is None:
            return 0.0
        return self.slowdown(on_device) * own.seconds(numel, scheme.compressor.expected(numel))

    def slowdown(self, on_device: bool = False) -> float:
        """Return how many times longer own work takes than alone, by all compressors that were run; 1 where none was.

        Other ranks take memory and cores.
        """
        alike = [lengths for key, lengths in self.speeds_learnt.items() if key.endswith(_SUFFIX) == on_device]
        errors = [own.error for lengths in alike for own in lengths.values() if own.runs]
        return math.exp(statistics.median(errors)) if errors else 1.0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able object that `from_json` takes."""
        return {
            "schema": SCHEMA,
            "network": self.network.to_json(),
            "kernels": {key: vars(seconds).copy() for key, seconds in self.kernels.items()},
            "speeds_learnt": _learnt_to_json(self.speeds_learnt),
            "kernels_learnt": _learnt_to_json(self.kernels_learnt),
            "rounds_learnt": _learnt_to_json(self.rounds_learnt),
        }

    @classmethod
    def from_json(cls, content: Any) -> "CostModel":
        """Build one from the result of `to_json`.

        Raises
        ------
        ConfigurationError
            Where it is nothing of the kind.
        """
        try:
            if content["schema"] != SCHEMA:
                raise ValueError(f"schema must be {SCHEMA}, got {content['schema']!r}")
            model = cls(Network.from_json(content["network"]))
            for key, own in content["kernels"].items():
                names = ("fixed", "per_element", "per_kept")
                model.kernels[key] = Alone(*(float(own[name]) for name in names))
            model.speeds_learnt = _learnt_from_json(content["speeds_learnt"])
            model.kernels_learnt = _learnt_from_json(content["kernels_learnt"])
            model.rounds_learnt = _learnt_from_json(content["rounds_learnt"])
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"cost: this is not a cost model that this mpicomp wrote ({error}); write one with "
                "`mpicomp bench collectives --calibrate FILE`"
            ) from None
        return model

    def save(self, path: str) -> None:
        """Write it to a file, as JSON, by one rank."""
        with whole_file(path) as file:
            json.dump(self.to_json(), file, indent=1)
            file.write("\n")

    @classmethod
    def load(cls, path: "str | os.PathLike[str]") -> "CostModel":
        """Read one from a file.

        Raises
        ------
        ConfigurationError
            Where there is no such file, or it holds something else.
        """
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"cost: '{path}' cannot be read: {error}") from None
        return cls.from_json(content)


def scheme_key(scheme: Scheme[Any], ladder: bool = False, on_device: bool = False) -> str:
    """Name a scheme's own work: what it is built upon hardly matters to it, nor on a ladder of ratios the ratio."""
    return f"{scheme.id.partition(':')[0]} {_config(scheme, ladder)}{_SUFFIX * on_device}"


def plan_key(scheme: Scheme[Any], ladder: bool = False) -> str:
    """Name a plan; on a ladder of ratios, all of its ratios."""
    return f"{scheme.id} {_config(scheme, ladder)}"


def _config(scheme: Scheme[Any], ladder: bool) -> str:
    config = scheme.compressor.get_config()
    if ladder and "ratio" in config:
        config |= {"ratio": "any"}
    return json.dumps(config, sort_keys=True)


_Known = dict[str, dict[int, Learnt]]


def _learnt_of(known: _Known, key: str, numel: int, guess: Callable[[Sequence[Learnt]], Learnt]) -> Learnt:
    """Return the correction learnt at lengths like this one; at first one derived from other lengths."""
    lengths, length = known.setdefault(key, {}), _like(numel)
    if length not in lengths:
        lengths[length] = guess(list(lengths.values()))
    return lengths[length]


def _like(numel: int) -> int:
    """Return the length that stands for all within a tenth of it.

    What is learnt of one holds for the others, and a program that exchanges arrays of ever other lengths has few.

    Examples
    --------
    >>> [_like(numel) for numel in (0, 1, 3, 1000, 1024, 1100)]
    [0, 1, 3, 1024, 1024, 1024]
    """
    return round(2 ** (round(_TO_AN_OCTAVE * math.log2(numel)) / _TO_AN_OCTAVE)) if numel else 0


def _learnt_to_json(known: _Known) -> dict[str, Any]:
    return {
        key: {str(numel): asdict(own) for numel, own in lengths.items() if own.runs} for key, lengths in known.items()
    }


def _learnt_from_json(content: dict[str, Any]) -> _Known:
    return {
        key: {
            _like(int(numel)): Learnt(float(own["error"]), float(own["variance"]), int(own["runs"]))
            for numel, own in lengths.items()
        }
        for key, lengths in content.items()
    }
