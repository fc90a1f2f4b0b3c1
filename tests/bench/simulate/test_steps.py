"""Steps: buckets one after the other, with and without overlap; what is measured, and what auto makes of it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpicomp.bench.simulate.compute_time import ComputeTime, received_bytes
from mpicomp.bench.simulate.measured import Bucket, Gradient, Measured, read
from mpicomp.bench.simulate.rows import Plan, Simulation
from mpicomp.bench.simulate.steps import ends, step_seconds
from mpicomp.bench.simulate.topology import Links, Topology
from networks import Link
from trainings import Training

import mpicomp
from mpicomp.cost import CostModel, Network
from mpicomp.errors import ConfigurationError
from mpicomp.rounds import Group, Round

SECONDS = st.floats(0, 10)


def measured(ready, sizes=None, forward=0.1, backward=1.0, update=0.05, auto=None, cost=None):
    sizes = sizes or [100_000] * len(ready)
    buckets = [
        Bucket((Gradient(f"w{place}", (size // 100, 100), when),))
        for place, (size, when) in enumerate(zip(sizes, ready, strict=True))
    ]
    return Measured("some", 4, 4, cost or CostModel(Network(4)), forward, backward, update, buckets, auto)


@pytest.mark.quick
def test_bucket_waits_for_backward_and_for_others():
    steps = measured([0.2, 0.3, 0.9])
    ready, end = ends(steps, [0.5, 0.1, 0.2], overlap=True)
    assert ready == pytest.approx([0.3, 0.4, 1.1])  # the last one is ready when backward is over
    assert end == pytest.approx([0.8, 0.9, 1.3])
    assert step_seconds(steps, [0.5, 0.1, 0.2], overlap=False) == pytest.approx(0.1 + 1.0 + 0.8 + 0.05)


@pytest.mark.quick
@given(st.lists(st.tuples(st.floats(0, 1), SECONDS), min_size=1, max_size=6))
def test_overlap_is_never_slower_than_none(parts):
    steps = measured(sorted(ready for ready, _ in parts))
    exchanges = [seconds for _, seconds in parts]
    overlapped, after = (step_seconds(steps, exchanges, overlap) for overlap in (True, False))
    assert overlapped <= after * (1 + 1e-12)
    assert overlapped >= steps.compute_s
    assert after == pytest.approx(steps.compute_s + sum(exchanges))


@pytest.mark.quick
def test_measured_is_read_again(tmp_path):
    before = measured([0.2, 0.9], [600, 4000])
    path = tmp_path / "m.json"
    path.write_text(json.dumps(before.to_json()))
    after = read(str(path))
    assert after.to_json() == before.to_json()
    assert [bucket.names for bucket in after.cut(1).buckets] == [("w0",), ("w1",)]
    assert [bucket.names for bucket in after.cut(1 << 20).buckets] == [("w0", "w1")]
    assert [bucket.names for bucket in after.cut(after.bucket_bytes).buckets] == [("w0",), ("w1",)]


@pytest.mark.quick
@pytest.mark.parametrize("content", ["", "{}", "[]", '{"schema": 7}', '{"schema": 1, "task": "x", "ranks": "many"}'])
def test_read_refuses_other_files(tmp_path, content):
    path = tmp_path / "m.json"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=r"is none of `mpicomp train --measured FILE`"):
        read(str(path))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read(str(tmp_path / "none.json"))


@pytest.mark.quick
def test_received_bytes_are_those_of_others():
    byte = np.dtype(np.uint8)
    first, last = Group(0, 3), Group(2, 3)
    assert received_bytes(Round("allgatherv", [5, 7, 9], byte), last) == 12
    assert received_bytes(Round("alltoallv", [5, 7, 9], byte), last) == 18
    assert received_bytes(Round("gatherv", [5, 7, 9], byte), first) == 16
    assert received_bytes(Round("gatherv", [5, 7, 9], byte), last) == 0
    assert received_bytes(Round("bcast", [5], byte), first) == 0
    assert received_bytes(Round("bcast", [5], byte), last) == 5
    assert received_bytes(Round("sendrecv", (3, 4), np.dtype(np.float32), peers=(1, 1)), first) == 16
    assert received_bytes(Round("allreduce", (3,), byte), first) == 0


def simulation(steps, ranks=8, rate=1e9, latency=1e-5, per_host=1):
    links = Links(1 / rate, latency)
    return Simulation(steps, Topology(ranks, per_host, steps.cost.network, 4, links), ComputeTime(steps.cost))


def test_row_is_the_sum_of_its_parts():
    steps = measured([0.2, 0.9], [1_000_000, 2_000_000])
    reported = simulation(steps, rate=1e7)
    dense = reported.row(Plan(mpicomp.Dense()), overlap=False)
    assert dense["speedup"] == 1
    assert dense["step_s"] == pytest.approx(steps.compute_s + dense["exchange_s"])
    topk = reported.row(Plan(mpicomp.TopK(ratio=0.01)), overlap=False)
    assert topk["speedup"] == pytest.approx(dense["step_s"] / topk["step_s"])
    assert topk["efficiency"] == pytest.approx(steps.compute_s / topk["step_s"])
    assert topk["speedup"] > 1.5  # the link is slow
    assert 0 < topk["own_work_s"] < topk["exchange_s"]


def test_messages_of_more_ranks_take_longer_to_decode():
    work = ComputeTime(CostModel(Network(4)))
    network = Network(4)
    scheme = mpicomp.collectives.bind(mpicomp.TopK(ratio=0.05), "allgather")
    reported = [
        work.seconds(scheme, 1 << 20, np.dtype(np.float32), Topology(ranks, 1, network, 4)) for ranks in (1, 8, 512)
    ]
    assert reported == sorted(reported)
    assert reported[2] > 4 * reported[0]


@pytest.fixture(scope="module")
def trained():
    """Return what a training under a slow network has taught ``auto``."""
    shapes = {"embedding": (300, 400), "weight": (200, 300)}
    training = Training(4, Link(1e-4, 2e7), shapes=shapes, hosts=4, bucket_bytes=1 << 30)
    for _ in range(30):
        training.step()
    reducer = training.ranks.reducers[0]
    [bucket] = reducer.last_step.buckets
    steps = Bucket(tuple(Gradient(name, shapes[name], 0.02) for name in bucket.layers.names))
    auto = {
        "config": reducer.policy.get_config(),
        "state": json.loads(json.dumps(reducer.policy.state_dict())),
        "normalises": True,
    }
    cost = CostModel.from_json(json.loads(json.dumps(reducer.cost.to_json())))
    # Own work took no time on that network's clock; here it takes what it takes.
    cost.kernels.clear()
    cost.speed_corrections.clear()
    cost.kernel_corrections.clear()
    return replace(
        measured([0.02]), cost=cost, buckets=[steps], auto=auto, backward_s=0.02, forward_s=0.01, update_s=0.0
    )


def test_auto_compresses_on_slow_links_only(trained):
    slow = simulation(trained, 4, rate=1e6).row(Plan(None), overlap=False)
    fast = simulation(trained, 4, rate=1e11, latency=1e-7).row(Plan(None), overlap=False)
    assert slow["speedup"] > 2
    assert "Dense" not in slow["ran"][0]
    assert "Dense" in fast["ran"][0]


@pytest.mark.slow
def test_auto_among_thousands_has_a_row(trained):
    row = simulation(trained, 2048, rate=1e9, per_host=8).row(Plan(None), overlap=True)
    assert row["hosts"] == 256
    assert row["speedup"] > 0.9


@pytest.mark.quick
def test_auto_needs_a_run_with_auto():
    with pytest.raises(ConfigurationError, match="record one with"):
        simulation(measured([0.5])).row(Plan(None), overlap=True)
