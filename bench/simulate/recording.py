"""Recording of a training for `mpicomp simulate`: when backward completes each gradient, and costs."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpicomp.bench.measure.timings import gather
from mpicomp.bench.simulate.dense_timing import time_dense
from mpicomp.bench.simulate.measured import Bucket, Gradient, Measured
from numpy.typing import NDArray

from mpicomp.cost import recalibrate_links
from mpicomp.transport import Transport


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
