"""Input of a simulation: a cost model and a recorded backward, which ``mpicomp train --measured`` writes."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
from mpicomp.bench.measure.timings import gather
from mpicomp.bench.simulate.dense_timing import Corrections, Timed, time_dense
from numpy.typing import NDArray

from mpicomp.arrays import ArraySpec
from mpicomp.cost import CostModel, recalibrate_links
from mpicomp.errors import ConfigurationError
from mpicomp.reducer.bucket import cut
from mpicomp.transport import Transport

SCHEMA = 1


@dataclass(frozen=True)
class Gradient:
    """A gradient of the recorded model."""

    name: str
    shape: tuple[int, ...]
    # When it was complete on the slowest rank, in seconds from the beginning of backward; the median over steps
    ready_s: float

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Gradients that are exchanged as one, in the order of exchange."""

    gradients: tuple[Gradient, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(gradient.name for gradient in self.gradients)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(gradient.numel for gradient in self.gradients)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(gradient.shape for gradient in self.gradients)

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    @property
    def ready_s(self) -> float:
        """When the last one is complete, in seconds from the beginning of backward."""
        return max(gradient.ready_s for gradient in self.gradients)


@dataclass(frozen=True)
class Measured:
    """Measurements of one run."""

    task: str  # what was trained
    ranks: int  # of the run
    hosts: int
    cost: CostModel  # links, operations and computation of schemes
    forward_s: float  # medians over steps of the slowest rank
    backward_s: float
    update_s: float
    buckets: Sequence[Bucket]  # in the order in which they were exchanged
    # ``config``, ``state`` and ``normalises`` of the policy ``auto``, where that was run
    auto: dict[str, Any] | None = None
    dense: Sequence[Timed] = ()  # dense exchanges that were timed by themselves

    def corrections(self, ranks: int) -> Corrections:
        """Return what dense exchanges took over what the cost model tells of them, for a number of ranks."""
        return Corrections(self.dense, self.cost.network, self.ranks, self.hosts, ranks)

    @property
    def compute_s(self) -> float:
        """Seconds of a step without any exchange."""
        return self.forward_s + self.backward_s + self.update_s

    @property
    def bucket_bytes(self) -> int:
        """Length at which a reducer cuts the gradients into these buckets."""
        *closed, last = self.buckets
        return min(4 * bucket.numel for bucket in closed or [last])

    def cut(self, bucket_bytes: int) -> Self:
        """Return the same with the gradients cut into other buckets, as a reducer does; there ``auto`` knows none."""
        gradients = {gradient.name: gradient for bucket in self.buckets for gradient in bucket.gradients}
        members = [ArraySpec(gradient.name, "float32", gradient.shape) for gradient in gradients.values()]
        buckets = [Bucket(tuple(gradients[member.name] for member in part)) for part in cut(members, bucket_bytes)]
        return replace(self, buckets=buckets, auto=None)

    def to_json(self) -> dict[str, Any]:
        buckets = [[asdict(gradient) for gradient in bucket.gradients] for bucket in self.buckets]
        dense = [timed.to_json() for timed in self.dense]
        return {"schema": SCHEMA, **vars(self), "buckets": buckets, "dense": dense, "cost": self.cost.to_json()}


def read(path: str) -> Measured:
    """Read a file that ``mpicomp train --measured`` wrote."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema must be {SCHEMA}, got {content['schema']!r}")
        measured = Measured(
            task=str(content["task"]),
            ranks=int(content["ranks"]),
            hosts=int(content["hosts"]),
            cost=CostModel.from_json(content["cost"]),
            forward_s=float(content["forward_s"]),
            backward_s=float(content["backward_s"]),
            update_s=float(content["update_s"]),
            buckets=[
                Bucket(
                    tuple(
                        Gradient(str(gradient["name"]), tuple(gradient["shape"]), float(gradient["ready_s"]))
                        for gradient in bucket
                    )
                )
                for bucket in content["buckets"]
            ],
            auto=content["auto"],
            dense=[Timed.from_json(timed) for timed in content.get("dense", ())],
        )
        if not measured.buckets or any(bucket.numel == 0 for bucket in measured.buckets):
            raise ValueError("a bucket has no elements")
    except OSError as error:
        raise ConfigurationError(f"simulate: '{path}' cannot be read: {error.strerror}") from None
    except (ConfigurationError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"simulate: '{path}' is none of `mpicomp train --measured FILE` ({type(error).__name__}: {error})"
        ) from None
    return measured


class Backward:
    """Records in each step when the gradient of each parameter is complete."""

    def __init__(self, parameters: Sequence[tuple[str, Any]]) -> None:
        self.names = [name for name, _ in parameters]
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
        self._rows: list[NDArray[np.float64]] = []
        self._now = np.full(len(parameters), np.nan)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._note(place))
            for place, (_, parameter) in enumerate(parameters)
        ]

    def _note(self, place: int) -> Any:
        def hook(_: Any) -> None:
            self._now[place] = time.perf_counter()

        return hook

    def add(self, began: float, forward: float, ended: float, update_s: float) -> None:
        ready = np.where(np.isnan(self._now), ended, self._now) - forward  # what backward does not reach is zero then
        self._rows.append(np.concatenate(([forward - began, ended - forward, update_s], ready)))
        self._now = np.full(len(self.names), np.nan)

    def rows(self) -> NDArray[np.float64]:
        """Return a row a step: seconds of forward, backward and update, and when each gradient was complete."""
        return np.array(self._rows)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def record_training(task: str, backward: Backward, skipped: int, reducer: Any, transport: Transport) -> Measured:
    """Return what simulations of this training start from, the same on all ranks. Collective."""
    numbers = np.median(gather(backward.rows(), transport).max(axis=0)[skipped:], axis=0).tolist()
    forward_s, backward_s, update_s, *ready = numbers
    when = dict(zip(backward.names, ready, strict=True))
    record = reducer.last_step
    buckets = [
        Bucket(tuple(Gradient(name, backward.shapes[name], when[name]) for name in bucket.layers.names))
        for bucket in record.buckets
    ]
    state = reducer.state_dict()
    auto = None
    if reducer.policy.id == "auto":
        auto = {
            "config": reducer.policy.get_config(),
            "state": reducer.policy.state_dict(),
            "normalises": state["settings"]["normalises"],
        }
    cost = recalibrate_links(reducer.cost, transport)
    dense = time_dense(max(bucket.numel for bucket in buckets), transport)
    group = transport.group
    return Measured(task, group.size, group.hosts, cost, forward_s, backward_s, update_s, buckets, auto, dense)
