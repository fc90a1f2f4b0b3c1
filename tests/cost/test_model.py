"""What a cost model remembers."""

import numpy as np
import pytest

import mpicomp
from mpicomp.collectives import bind
from mpicomp.cost import CostModel, Network, calibrate_for_elsewhere
from mpicomp.cost.kernels import Alone
from mpicomp.cost.model import scheme_key
from mpicomp.cost.plans import Learnt
from mpicomp.rounds import layout_groups
from mpicomp.transport import LocalWorld

pytestmark = pytest.mark.quick


def test_arrays_of_ever_other_lengths_do_not_fill_it():
    model, scheme = CostModel(Network(2)), bind(mpicomp.TopK(), "allgather")
    model.kernels[scheme_key(scheme)] = Alone(1e-6, 1e-9, 1e-9)
    group, _ = layout_groups([0, 1], 0)
    sizes = []
    for numel in range(1, 3000):
        model.candidates([scheme], 7, np.dtype(np.float32), group)
        model.candidates([scheme], 100 + numel, np.dtype(np.float32), group)
        tables = (model.speeds_learnt, model.kernels_learnt, model.rounds_learnt)
        sizes.append(sum(len(lengths) for table in tables for lengths in table.values()))
    assert sizes[-1] == sizes[1000]
    for table in tables:
        [lengths] = table.values()
        assert {7, 3099} < set(lengths)
        assert 101 not in lengths


def test_for_elsewhere_what_a_training_has_learnt_of_its_network_is_left_behind():
    known = CostModel(Network(1))
    known.network.set_link("world", 1.0, 1.0, 0.1)
    known.kernels["some"] = Alone(1e-6, 1e-9, 1e-9)
    known.speeds_learnt["some"] = {1000: Learnt(0.5, 0.1, 3)}
    known.rounds_learnt["some"] = {1000: Learnt(0.5, 0.1, 3)}
    before = known.to_json()
    [alone] = LocalWorld(1).transports
    model = calibrate_for_elsewhere(known, alone)
    assert model.kernels == known.kernels
    assert model.slowdown() == known.slowdown()
    assert model.network.seconds_per_byte < 1
    assert not model.rounds_learnt
    assert known.to_json() == before
