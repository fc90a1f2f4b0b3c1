"""The filter: what it learns from seconds, against the network that they come from."""

import json

import numpy as np
import pytest

import mpicomp
from mpicomp.collectives import bind
from mpicomp.cost.formulas import slowest, terms
from mpicomp.cost.network_model import Network, sample_views
from mpicomp.mpi.rounds import layout_groups

pytestmark = pytest.mark.quick

LATENCY, PER_BYTE = 2e-4, 8e-9
NOISE = 0.05


def coefficients(network, compressor, collective, numel, ranks=4):
    views = sample_views(layout_groups(range(ranks), 0)[0])
    return network.coefficients(
        [bind(compressor, collective).rounds(numel, np.dtype(np.float32), v) for v in views], views
    )


def truth(compressor, collective, numel, latency=LATENCY, per_byte=PER_BYTE, ranks=4):
    groups = [layout_groups(range(ranks), rank)[0] for rank in range(ranks)]
    by_rank = [bind(compressor, collective).rounds(numel, np.dtype(np.float32), group) for group in groups]
    total = 0.0
    for tasks in zip(*by_rank, strict=True):
        pairs = zip(tasks, groups, strict=True)
        total += slowest(terms(task, group.part(task.group)) for task, group in pairs).seconds(latency, per_byte)
    return total


PLANS = [
    (mpicomp.Dense(), "allreduce", 1000),
    (mpicomp.Dense(), "allreduce", 1_000_000),
    (mpicomp.Dense(), "scatter-reduce", 300_000),
    (mpicomp.TopK(ratio=0.01), "allgather", 1_000_000),
    (mpicomp.TopK(ratio=0.01), "star-topk", 1_000_000),
]


def known():
    network = Network(hosts=4)
    network.set_link("world", LATENCY, PER_BYTE, 0.1)
    return network


RINGS = [(mpicomp.Dense(), "ring", 1001), (mpicomp.Dense(), "ring", 5_000_001)]  # whose shapes are some objects


@pytest.mark.parametrize("plan", PLANS + RINGS, ids=str)
def test_network_predicts_the_sum_of_rounds(plan):
    network = known()
    seconds = network.seconds(coefficients(network, *plan))
    assert seconds == pytest.approx(truth(*plan), rel=1e-9)


def feed(network, plans, steps, random, **true):
    for step in range(steps):
        plan = plans[step % len(plans)]
        network.time_update()
        measured = truth(*plan, **true) * random.lognormal(0, NOISE)
        network.observe(coefficients(network, *plan), measured, NOISE**2, NOISE**2, 0.0, 0.0)


def test_network_learns_links_from_seconds_alone():
    network = Network(hosts=4)
    feed(network, PLANS, 100, np.random.default_rng(0))
    for plan in PLANS:
        seconds = network.seconds(coefficients(network, *plan))
        assert seconds == pytest.approx(truth(*plan), rel=0.12)


def test_measurement_of_one_plan_moves_all():
    network = known()
    feed(network, PLANS, 200, np.random.default_rng(0))
    feed(network, PLANS[3:4], 60, np.random.default_rng(1), per_byte=1.3 * PER_BYTE)
    for plan in PLANS[1:3]:
        seconds = network.seconds(coefficients(network, *plan))
        assert seconds == pytest.approx(truth(*plan, per_byte=1.3 * PER_BYTE), rel=0.1)


def test_one_outlier_changes_nothing_and_two_do():
    network = known()
    plan = PLANS[1]
    value = coefficients(network, *plan)
    before = network.seconds(value)
    assert network.observe(value, 20 * before, NOISE**2, NOISE**2, 0.0, 0.0)[3] is False
    assert network.seconds(value) == before
    assert network.observe(value, before, NOISE**2, NOISE**2, 0.0, 0.0)[3] is False
    assert network.observe(value, 20 * before, NOISE**2, NOISE**2, 0.0, 0.0)[3] is False
    assert network.observe(value, 20 * before, NOISE**2, NOISE**2, 0.0, 0.0)[3] is True
    assert network.seconds(value) == pytest.approx(20 * before, rel=0.3)


def test_network_survives_a_file():
    network = known()
    feed(network, PLANS, 20, np.random.default_rng(1))
    again = Network.from_json(json.loads(json.dumps(network.to_json())))
    value = [coefficients(network, *plan) for plan in PLANS]
    assert [again.seconds(plan) for plan in value] == [network.seconds(plan) for plan in value]
    assert again.factor_variance.tobytes() == network.factor_variance.tobytes()


@pytest.mark.parametrize("spoil", [{"state": [1.0]}, {"variance": [[1.0]]}, {"hosts": "many"}])
def test_spoilt_file_is_refused(spoil):
    with pytest.raises((ValueError, TypeError)):
        Network.from_json(known().to_json() | spoil)
