"""What ``auto`` runs among ranks that are not here: the policy itself, which hears of simulated steps."""

import time
from typing import Any

import numpy as np
from mpicomp.bench.simulate.measured import Measured
from mpicomp.bench.simulate.steps import Exchanges, Seconds, ends
from mpicomp.bench.simulate.topology import Topology

from mpicomp.collectives import Scheme
from mpicomp.cost import CostModel
from mpicomp.errors import ConfigurationError
from mpicomp.policies import Delivered, Named, Plan, Shape, StepReport, get_policy
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
    policy.adopt(Named(normalises=measured.auto["normalises"], cost=cost))
    policy.load_state_dict(measured.auto["state"], cost)
    shapes = [Shape(bucket.names, bucket.sizes, bucket.shapes, np.dtype(np.float32)) for bucket in measured.buckets]
    group = topology.group(0)
    transport = _Transport(group, {}, lambda task, group: 0.0)

    def take(scheme: Scheme[Any], shape: Shape) -> Seconds:
        told = exchanges.seconds(scheme, shape.numel, shape.dtype)
        assert told is not None, "there is no limit"
        return told

    drive(policy.start(shapes, transport), _alike)
    now, done = 0.0, []
    for step in range(_STEPS):
        drive(policy.refresh(transport), _alike)
        plans = [policy.plan(bucket) for bucket in range(len(shapes))]
        told = [take(plan.scheme, shape) for plan, shape in zip(plans, shapes, strict=True)]
        ready, end = ends(measured, [seconds.whole for seconds in told], overlap)
        times = np.array(
            [
                (now + finish - seconds.whole, now + finish, seconds.compute, now + start)
                for start, finish, seconds in zip(ready, end, told, strict=True)
            ]
        )[None]
        delivered = [Delivered(1.0, 1.0, float(shape.numel)) for shape in shapes]
        policy.deliver(step, delivered)
        policy.learn(StepReport(step, None, plans, delivered, times, {}))
        now += end[-1] + measured.update_s
        done.append((end[-1], step, plans, told))
    steady = sorted(done[-_STEADY:], key=lambda step: step[:2])
    _, _, plans, told = steady[len(steady) // 2]
    return plans, told


class _Transport(LocalTransport):
    """One of the ranks, which stands for all of them. What it computes takes the seconds that it takes here."""

    one_clock = True

    def clock(self) -> float:
        """Return the seconds that this thread has computed."""
        return time.thread_time()


def _alike(asked: Request) -> object:
    """Answer a round as if all ranks had sent what this one sends."""
    assert isinstance(asked, Round)
    recv = asked.recv
    if recv is None:
        return np.empty(0, asked.dtype)
    send = asked.send
    if send is not None and send.size:
        recv[:] = np.resize(send, recv.size)
    return recv
