"""Plans that ``auto`` runs among simulated ranks: the policy itself, which receives reports of simulated steps."""

import time
from typing import Any

import numpy as np
from mpicomp.bench.simulate.measured import Measured
from mpicomp.bench.simulate.steps import Exchanges, Seconds, ends
from mpicomp.bench.simulate.topology import Topology

from mpicomp.collectives import Scheme
from mpicomp.cost import CostModel
from mpicomp.errors import ConfigurationError
from mpicomp.policies import BucketOutcome, Plan, Shape, StepReport, UserSettings, get_policy
from mpicomp.rounds import Request, Round, drive
from mpicomp.transport.local import LocalTransport

_STEPS = 40  # until plans are those of the steady state
_STEADY = 15  # of these, the last ones: the one of median seconds stands for all


def choose(
    measured: Measured, topology: Topology, overlap: bool, exchanges: Exchanges
) -> tuple[list[Plan], list[Seconds]]:
    """Return the plans that ``auto`` comes to, a bucket each, and what they take."""
    if measured.auto is None:
        raise ConfigurationError(
            "simulate: auto needs what it learns of elements, and the recorded run had another policy; record one with "
            "`mpicomp train --measured F` and neither --compressor nor --policy"
        )
    cost = CostModel.from_json(measured.cost.to_json() | {"network": topology.network.to_json()})
    policy = get_policy(measured.auto["config"])
    policy.configure(UserSettings(normalises=measured.auto["normalises"], cost=cost))
    policy.load_state_dict(measured.auto["state"], cost)
    shapes = [Shape(bucket.names, bucket.sizes, bucket.shapes, np.dtype(np.float32)) for bucket in measured.buckets]
    group = topology.group(0)
    transport = _Transport(group, {}, lambda task, group: 0.0)

    def seconds_of(scheme: Scheme[Any], shape: Shape) -> Seconds:
        seconds = exchanges.seconds(scheme, shape.numel, shape.dtype)
        assert seconds is not None, "there is no limit"
        return seconds

    drive(policy.start(shapes, transport), _echo)
    now, done = 0.0, []
    for step in range(_STEPS):
        if rounds := policy.refresh(transport):
            drive(rounds, _echo)
        plans = [policy.plan(bucket) for bucket in range(len(shapes))]
        exchanged = [seconds_of(plan.scheme, shape) for plan, shape in zip(plans, shapes, strict=True)]
        ready, end = ends(measured, [seconds.whole for seconds in exchanged], overlap)
        times = np.array(
            [
                (now + finish - seconds.whole, now + finish, seconds.compute, now + start)
                for start, finish, seconds in zip(ready, end, exchanged, strict=True)
            ]
        )[None]
        delivered = [BucketOutcome(1.0, 1.0, float(shape.numel)) for shape in shapes]
        policy.on_step_end(step, delivered)
        policy.on_telemetry(StepReport(step, None, plans, delivered, times, {}))
        now += end[-1] + measured.update_s
        done.append((end[-1], step, plans, exchanged))
    steady = sorted(done[-_STEADY:], key=lambda step: step[:2])
    _, _, plans, exchanged = steady[len(steady) // 2]
    return plans, exchanged


class _Transport(LocalTransport):
    """One of the ranks, which stands for all of them. What it computes takes the seconds that it takes here."""

    one_clock = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.timer, self.times_kernels = time.thread_time, True


def _echo(request: Request) -> object:
    """Answer a round as if all ranks had sent what this one sends."""
    assert isinstance(request, Round)
    recv = request.recv
    if recv is None:
        return np.empty(0, request.dtype)
    send = request.send
    if send is not None and send.size:
        recv[:] = np.resize(send, recv.size)
    return recv
