"""The cost model: predicted seconds of plans, learned from measured ones."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from mpicomp.collectives import Scheme
from mpicomp.cost import plans
from mpicomp.cost.kernel_costs import KernelCost
from mpicomp.cost.network_model import Network, sample_views
from mpicomp.cost.plans import Candidates, Correction
from mpicomp.errors import ConfigurationError
from mpicomp.job import whole_file
from mpicomp.mpi.rounds import HOST, Group, Round

SCHEMA = 3

_DEVICE_SUFFIX = " on cuda"  # of names of a device's kernels; rounds are the same there
_LENGTHS_PER_OCTAVE = 4  # each of which stands for all within a tenth of it
_LARGE_SUM_BYTES = 1 << 20  # longer sums take several messages
_LATE_STEP = 1 << 30  # a step in the long run: first steps may have other rounds

_Corrections = dict[str, dict[int, Correction]]


class CostModel:
    """Measured speed of links, operations and kernels, for ranks of one layout.

    Parameters
    ----------
    network : Network
        Links and operations.

    Attributes
    ----------
    kernels : dict
        Kernel seconds of each scheme without other ranks, by `scheme_key`.
    speed_corrections, kernel_corrections, round_corrections : dict
        Corrections learned from steps of each compressor's speed, of each scheme's kernels by `scheme_key` and of each
        plan's rounds by `plan_key`; each a dict by length.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.kernels: dict[str, KernelCost] = {}
        self.speed_corrections: _Corrections = {}
        self.kernel_corrections: _Corrections = {}
        self.round_corrections: _Corrections = {}

    def candidates(
        self,
        schemes: Sequence[Scheme[Any]],
        numel: int,
        dtype: np.dtype[Any],
        group: Group,
        ladder: bool = False,
        on_device: bool = False,
    ) -> Candidates:
        """Return the plans of one bucket, whose schemes' kernels have been measured.

        With ``ladder`` corrections of a compressor at one ratio count for its other ratios; ``on_device`` is the same
        on all ranks.
        """
        keys = [scheme_key(scheme, ladder, on_device) for scheme in schemes]
        compressors = [_config(scheme, ladder) + _DEVICE_SUFFIX * on_device for scheme in schemes]
        plan_keys = [plan_key(scheme, ladder) for scheme in schemes]
        views = sample_views(group)
        rounds_sd = plans.ROUNDS_SD if group.hosts > 1 else plans.HOST_ROUNDS_SD
        rounds = [[scheme.rounds(numel, dtype, view, _LATE_STEP) for view in views] for scheme in schemes]
        return Candidates(
            self.network,
            np.array([self.network.coefficients(of_plan, views) for of_plan in rounds]),
            [
                self.kernels[key].seconds(numel, scheme.compressor.expected(numel))
                for scheme, key in zip(schemes, keys, strict=True)
            ],
            [_correction(self.speed_corrections, key, numel, plans.SPEED_SD) for key in compressors],
            [_correction(self.kernel_corrections, key, numel, plans.KERNELS_SD) for key in keys],
            [
                _correction(self.round_corrections, key, numel, rounds_sd, _rounds_prior(of_plan[0], views[0]))
                for key, of_plan in zip(plan_keys, rounds, strict=True)
            ],
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able object for `from_json`."""
        return {
            "schema": SCHEMA,
            "network": self.network.to_json(),
            "kernels": {key: vars(seconds).copy() for key, seconds in self.kernels.items()},
            "speed_corrections": _to_json(self.speed_corrections),
            "kernel_corrections": _to_json(self.kernel_corrections),
            "round_corrections": _to_json(self.round_corrections),
        }

    @classmethod
    def from_json(cls, content: Any) -> "CostModel":
        """Build one from the result of `to_json`; other content is a `ConfigurationError`."""
        try:
            if content["schema"] != SCHEMA:
                raise ValueError(f"schema must be {SCHEMA}, got {content['schema']!r}")
            model = cls(Network.from_json(content["network"]))
            for key, kernel in content["kernels"].items():
                names = ("fixed", "per_element", "per_kept")
                model.kernels[key] = KernelCost(*(float(kernel[name]) for name in names))
            model.speed_corrections = _from_json(content["speed_corrections"])
            model.kernel_corrections = _from_json(content["kernel_corrections"])
            model.round_corrections = _from_json(content["round_corrections"])
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"cost: this is not a cost model that this mpicomp wrote ({error}); write one with "
                "`mpicomp bench collectives --calibrate FILE`"
            ) from None
        return model

    def save(self, path: str) -> None:
        """Write the model to a file, as JSON, on one rank."""
        with whole_file(path) as file:
            json.dump(self.to_json(), file, indent=1)
            file.write("\n")

    @classmethod
    def load(cls, path: "str | os.PathLike[str]") -> "CostModel":
        """Read a model from a file; one that is missing or holds something else is a `ConfigurationError`."""
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"cost: '{path}' cannot be read: {error}") from None
        return cls.from_json(content)


def scheme_key(scheme: Scheme[Any], ladder: bool = False, on_device: bool = False) -> str:
    """Return the name of a scheme's kernels: inner collectives do not count, nor the ratio on a ladder of ratios."""
    return f"{scheme.id.partition(':')[0]} {_config(scheme, ladder)}{_DEVICE_SUFFIX * on_device}"


def plan_key(scheme: Scheme[Any], ladder: bool = False) -> str:
    """Return the name of a plan; on a ladder of ratios, of all its ratios."""
    return f"{scheme.id} {_config(scheme, ladder)}"


def _config(scheme: Scheme[Any], ladder: bool) -> str:
    config = scheme.compressor.get_config()
    if ladder and "ratio" in config:
        config |= {"ratio": "any"}
    return json.dumps(config, sort_keys=True)


def _rounds_prior(rounds: Sequence[Round], group: Group) -> float:
    """Return the logarithm of a plan's seconds in rounds over the network's prediction that is assumed at first."""
    if group.hosts == 1:
        return 0.0
    sums = [task for task in rounds if task.operation == "allreduce" and task.group != HOST]
    is_large = any(sum(task.counts) * task.dtype.itemsize > _LARGE_SUM_BYTES for task in sums)
    return plans.LIBRARY_SUM_ERROR if is_large else 0.0


def _correction(known: _Corrections, key: str, numel: int, sd: float, prior: float = 0.0) -> Correction:
    lengths, length = known.setdefault(key, {}), _round_length(numel)
    if length not in lengths:  # it begins with the mean error at other lengths
        errors = [correction.error for correction in lengths.values() if correction.runs]
        lengths[length] = Correction(sum(errors) / len(errors) if errors else prior, sd**2)
    return lengths[length]


def _round_length(numel: int) -> int:
    """Return the length that stands for all within a tenth of it: a program may exchange arrays of many lengths.

    >>> [_round_length(numel) for numel in (0, 1, 3, 1000, 1024, 1100)]
    [0, 1, 3, 1024, 1024, 1024]
    """
    return round(2 ** (round(_LENGTHS_PER_OCTAVE * math.log2(numel)) / _LENGTHS_PER_OCTAVE)) if numel else 0


def _to_json(known: _Corrections) -> dict[str, Any]:
    return {
        key: {str(numel): asdict(correction) for numel, correction in lengths.items() if correction.runs}
        for key, lengths in known.items()
    }


def _from_json(content: dict[str, Any]) -> _Corrections:
    return {
        key: {
            _round_length(int(numel)): Correction(float(saved["error"]), float(saved["variance"]), int(saved["runs"]))
            for numel, saved in lengths.items()
        }
        for key, lengths in content.items()
    }
