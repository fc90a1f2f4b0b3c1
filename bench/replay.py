"""Replay of the plans of another run, to time them on this network without choosing them again."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mpicomp.collectives import Scheme, bind
from mpicomp.compressors import Compressor, get_compressor
from mpicomp.cost import CostModel
from mpicomp.errors import ConfigurationError
from mpicomp.policies import BucketOutcome, Plan, Policy, Shape, UserSettings
from mpicomp.policies.policy import feedback_of
from mpicomp.rounds import Rounds
from mpicomp.transport.base import Transport


@dataclass(eq=False)
class Replay(Policy):
    """Runs the plans that ``mpicomp train --metrics`` has recorded: compressor and collective of every bucket.

    Step s of S runs recorded step ``floor(s * recorded / S)``, after ``first`` steps of the first one, so that a long
    run is played in fewer steps and each part of it has its share. A step that was undone is run again. Nothing is
    surveyed or predicted: what it took to choose is not in the seconds.
    """

    id: ClassVar[str] = "replay"
    paper: ClassVar[str] = "none; for measurements"

    path: str
    steps: int | None = None
    first: int = 0

    def check(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ConfigurationError(f"replay: steps must be at least 1, got {self.steps}")
        self._recorded = _read(self.path)
        self.steps = self.steps or len(self._recorded)
        self._step = 0
        self._shapes: list[Shape] = []
        self._bound: dict[tuple[int, str, str], Scheme[Any]] = {}

    @property
    def bucket_bytes(self) -> int:
        # Every bucket but the last had reached the limit of that run, none before its last array: so has the least.
        *closed, last = self._recorded[0]
        return min(4 * int(bucket["numel"]) for bucket in closed or [last])

    def configure(self, settings: UserSettings) -> None:
        if settings.compressor is not None or settings.collective != "auto":
            raise ConfigurationError("replay: what was recorded is run; name no compressor and no collective with it")
        found = [get_compressor(json.loads(config)) for config in self._configs()]
        self.compressor: Compressor = next((compressor for compressor in found if compressor.id != "dense"), found[0])
        self.feedback = any(feedback_of(compressor, settings.feedback) for compressor in found)

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        here = [(shape.names, shape.sizes) for shape in shapes]
        for line, buckets in enumerate(self._recorded, 1):
            there = [
                (
                    tuple(layer["name"] for layer in bucket["layers"]),
                    tuple(layer["numel"] for layer in bucket["layers"]),
                )
                for bucket in buckets
            ]
            if there != here:
                raise ConfigurationError(
                    f"replay: '{self.path}' line {line} has buckets of {_sizes(there)} elements, here they are of "
                    f"{_sizes(here)} or of other parameters; train the same model, with the same bucket_bytes"
                )
        self._shapes = list(shapes)
        self._bound.clear()
        return
        yield

    def plan(self, bucket: int) -> Plan:
        assert self.steps is not None
        step = max(0, self._step - self.first)
        place = min(step * len(self._recorded) // self.steps, len(self._recorded) - 1)
        recorded = self._recorded[place][bucket]
        key = bucket, json.dumps(recorded["compressor"]), recorded["collective"]
        if key not in self._bound:
            shape = self._shapes[bucket]
            compressor = get_compressor(recorded["compressor"]).bind(shape.names, shape.sizes, shape.shapes)
            self._bound[key] = bind(compressor, recorded["collective"])
        return Plan(self._bound[key], f"replay: step {place}")

    def on_step_end(self, step: int, outcomes: Sequence[BucketOutcome]) -> None:
        self._step += 1

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        self._step = int(state.get("step", 0))

    def get_config(self) -> dict[str, Any]:
        plans = [[(bucket["compressor"], bucket["collective"]) for bucket in buckets] for buckets in self._recorded]
        digest = hashlib.blake2b(json.dumps(plans).encode(), digest_size=8).hexdigest()
        return super().get_config() | {"plans": digest}

    def _configs(self) -> list[str]:
        return list(dict.fromkeys(json.dumps(bucket["compressor"]) for buckets in self._recorded for bucket in buckets))


def _read(path: str) -> list[list[dict[str, Any]]]:
    try:
        with open(path, encoding="utf-8") as file:
            steps = [json.loads(line)["buckets"] for line in file if line.strip()]
        for buckets in steps:
            for bucket in buckets:
                bind(get_compressor(bucket["compressor"]), bucket["collective"])
                [(str(layer["name"]), int(layer["numel"])) for layer in bucket["layers"]]
                int(bucket["numel"])
    except OSError as error:
        raise ConfigurationError(f"replay: '{path}' cannot be read: {error.strerror}") from error
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"replay: '{path}' must hold lines that mpicomp train --metrics wrote, got {type(error).__name__}: {error}"
        ) from error
    if not steps or not all(steps):
        raise ConfigurationError(f"replay: '{path}' must hold steps with buckets; it has {len(steps)} lines")
    return steps


def _sizes(buckets: Sequence[tuple[Sequence[str], Sequence[int]]]) -> str:
    return ", ".join(f"{sum(sizes):,}" for _, sizes in buckets)
