"""What a cost model remembers."""

from itertools import pairwise

import numpy as np
import pytest

import mpicomp
from mpicomp.collectives import bind
from mpicomp.cost import CostModel, Network, recalibrate_links
from mpicomp.cost.kernel_costs import KernelCost
from mpicomp.cost.model import scheme_key
from mpicomp.cost.plans import Correction
from mpicomp.rounds import layout_groups
from mpicomp.transport import LocalWorld

pytestmark = pytest.mark.quick


def test_arrays_of_ever_other_lengths_do_not_fill_it():
    model, scheme = CostModel(Network(2)), bind(mpicomp.TopK(), "allgather")
    model.kernels[scheme_key(scheme)] = KernelCost(1e-6, 1e-9, 1e-9)
    group, _ = layout_groups([0, 1], 0)
    for numel in range(100, 3200):  # five octaves
        model.candidates([scheme], numel, np.dtype(np.float32), group)
    for table in (model.speed_corrections, model.kernel_corrections, model.round_corrections):
        [lengths] = table.values()
        assert 20 <= len(lengths) <= 22
        known = sorted(lengths)
        assert all(1.15 < more / fewer < 1.23 for fewer, more in pairwise(known))
        assert known[0] < 1.1 * 100
        assert known[-1] > 3199 / 1.1


def test_what_is_learnt_holds_for_arrays_of_like_length():
    model, scheme = CostModel(Network(2)), bind(mpicomp.TopK(), "allgather")
    model.network.set_link("world", 1e-4, 1e-9, 0.1)
    model.kernels[scheme_key(scheme)] = KernelCost(1e-6, 1e-9, 1e-9)
    group, _ = layout_groups([0, 1], 0)

    def candidates(numel):
        return model.candidates([scheme], numel, np.dtype(np.float32), group)

    def predicted(numel):
        return candidates(numel).prediction(0).kernels_s

    beside = candidates(96_000)
    before = {numel: predicted(numel) for numel in (0, 1, 95_000, 96_000, 100_000)}
    candidates(100_000).observe(0, 100 * before[100_000], 1.0)
    after = {numel: predicted(numel) for numel in before}
    assert after[95_000] / before[95_000] == pytest.approx(after[100_000] / before[100_000])
    assert after[95_000] > 5 * before[95_000]
    assert after[0] == before[0]  # whose correction was there before
    assert after[1] == before[1]
    beside.refresh_corrections()
    assert beside.prediction(0).kernels_s == after[96_000]


def test_after_a_change_of_the_network_what_is_learnt_of_a_length_is_trusted_less_once():
    model, scheme = CostModel(Network(2)), bind(mpicomp.TopK(), "allgather")
    model.kernels[scheme_key(scheme)] = KernelCost(1e-6, 1e-9, 1e-9)
    group, _ = layout_groups([0, 1], 0)
    sizes = (95_000, 100_000, 100_000, 7)
    buckets = [model.candidates([scheme], numel, np.dtype(np.float32), group) for numel in sizes]
    [lengths] = model.round_corrections.values()
    before = {numel: own.variance for numel, own in lengths.items()}
    already = set()
    for bucket in buckets:
        bucket.inflate_variance(already)
    assert {numel: own.variance - before[numel] for numel, own in lengths.items()} == pytest.approx(
        dict.fromkeys(before, 0.01)
    )


def test_for_elsewhere_what_a_training_has_learnt_of_its_network_is_left_behind():
    known = CostModel(Network(1))
    known.network.set_link("world", 1.0, 1.0, 0.1)
    known.kernels["some"] = KernelCost(1e-6, 1e-9, 1e-9)
    known.speed_corrections["some"] = {1000: Correction(0.5, 0.1, 3)}
    known.round_corrections["some"] = {1000: Correction(0.5, 0.1, 3)}
    before = known.to_json()
    [alone] = LocalWorld(1).transports
    model = recalibrate_links(known, alone)
    assert model.kernels == known.kernels
    assert model.slowdown() == known.slowdown()
    assert model.network.seconds_per_byte < 1
    assert not model.round_corrections
    assert known.to_json() == before
