"""Compressors whose first steps are others than the later ones: what is predicted is what goes on."""

import numpy as np
import pytest
from networks import Link
from worlds import Ranks

import mpicomp
from mpicomp.cost import CostModel, Network

LATENCY, BITS = 1e-5, 1e7
SHAPE = (
    400,
    1000,
)  # so large that a library broadcasts in parts, which is what is taken for granted before it is measured


@pytest.mark.parametrize(
    ("compressor", "collective"),
    [
        (mpicomp.PowerSGD(rank=2, start_step=3), "low-rank:ring"),
        (mpicomp.LGC(ratio=0.1, code="linear", dense_steps=1, training_steps=2), "learned:ring"),
        (mpicomp.LGC(ratio=0.1, code="linear", dense_steps=1, training_steps=2, instance="server"), "learned:ring"),
    ],
)
def test_seconds_of_later_steps_are_predicted_from_the_first_on(compressor, collective):
    network = Network(3)
    network.set_link("world", LATENCY, 8 / BITS, 0.1)
    ranks = Ranks(3, compressor, collective, network=Link(LATENCY, BITS), cost=CostModel(network))
    ends = ranks.world.transports
    random = np.random.default_rng(0)
    predicted, took = [], []
    for _ in range(7):
        before = max(end.seconds for end in ends)
        ranks.reduce([{"w": random.standard_normal(SHAPE).astype(np.float32)} for _ in ends])
        took.append(max(end.seconds for end in ends) - before)
        predicted.append(ranks.reducers[0].last_step.buckets[0].predicted_s)
    assert predicted[0] == pytest.approx(took[-1], rel=0.1)
    assert took[0] > 2 * took[-1]


def test_own_work_that_is_measured_is_that_of_later_steps():
    def settled(compressor):
        return compressor.bind([], [], warm_up=False).get_config()

    assert settled(mpicomp.PowerSGD(rank=3, start_step=9)) == mpicomp.PowerSGD(rank=3).get_config()
    assert settled(mpicomp.TopK()) == mpicomp.TopK().get_config()
    assert settled(mpicomp.LGC()) == mpicomp.LGC(dense_steps=0, training_steps=1).get_config()


def test_what_is_sent_is_what_costs_count():
    assert mpicomp.TopK(ratio=0.1).expected(1000) == 100
    assert mpicomp.RandomK(ratio=0.2).expected(1000) == 200
    assert mpicomp.QSGD().expected(1000) == 1000
    placed = mpicomp.LGC(ratio=0.01).bind(["out", "mid", "in"], [100, 19_850, 50])
    assert placed.expected(20_000) == 1 + 199 + 50  # the last layer's, those that are coded, the first layer
