"""Seconds that are added to every plan at random."""

import numpy as np
import pytest
from networks import Link

import mpicomp
from mpicomp.cost.plans import Contention
from mpicomp.mpi import LocalWorld

ADDED_S = 12e-3


@pytest.mark.parametrize("seed", range(5))
def test_mean_of_contention_follows_from_differences(seed):
    random = np.random.default_rng(seed)
    contention = Contention()
    reported = []
    for step in range(400):
        contention.observe(step // 10 % 2, 2e-3 + random.exponential(ADDED_S))
        reported.append(contention.seconds)
    assert np.mean(reported[100:]) == pytest.approx(
        ADDED_S, rel=0.35
    )  # of 32 pairs at a time, and the lower of two plans


def test_seconds_that_differ_by_little_have_nothing_added():
    random = np.random.default_rng(0)
    contention = Contention()
    for step in range(100):
        contention.observe(step // 10 % 3, 0.6 * np.exp(0.1 * random.standard_normal()))
        assert contention.seconds < 0.1 * 0.6


def test_noise_of_one_plan_is_not_added_to_all():
    random = np.random.default_rng(0)
    contention = Contention()
    for step in range(100):
        plan = step // 10 % 2
        contention.observe(plan, 5e-3 + plan * random.exponential(ADDED_S))
    assert contention.seconds < 0.1 * ADDED_S


class Busy(Link):
    """A network on which some seconds come before the first round of a step."""

    added_s = 0.0

    def __call__(self, task, group):
        added, self.added_s = self.added_s, 0.0
        return super().__call__(task, group) + added


def trained(bits, seed):
    """Train with `auto` where exchanges are in something's way; give plans, predictions and probes of later steps."""
    random, link = np.random.default_rng(seed), Busy(1e-4, bits)
    world = LocalWorld(4, hosts=4, network=link)
    reducers = [mpicomp.Reducer(comm=end, policy={"warmup": 0}) for end in world.transports]
    gradient = random.standard_normal(40_000).astype(np.float32)
    plans, predicted, probed = [], [], 0
    for step in range(100):
        for end in world.transports:
            end.seconds += 20e-3
        noise = 3 * random.standard_normal((4, gradient.size)).astype(np.float32)
        link.added_s = random.exponential(ADDED_S)
        world.run([each.rounds({"w": gradient + item}) for each, item in zip(reducers, noise, strict=True)])
        if step >= 30:
            probed += reducers[0].last_step.once_wire_bytes > 0
            [bucket] = reducers[0].last_step.buckets
            plans.append((bucket.compressor["id"], bucket.collective))
            predicted.append(bucket.predicted_s)
    return plans, predicted, probed


@pytest.mark.parametrize("seed", [0, 1])
def test_auto_with_contention_keeps_its_plan(seed):
    """On a fast network dense exchange takes 2 ms, of some 36 ms that a step takes."""
    plans, predicted, probed = trained(1e9, seed)
    assert {compressor for compressor, _ in plans} == {"dense"}
    assert max(map(plans.count, plans)) >= 0.7 * len(plans)
    assert probed <= 1
    assert np.median(predicted) == pytest.approx(2e-3 + ADDED_S, rel=0.6)
