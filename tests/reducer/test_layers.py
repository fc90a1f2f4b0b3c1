"""What a record says of each parameter, against sums over its elements one by one."""

import itertools

import numpy as np
import pytest

import mpicomp
from mpicomp.collectives import bind
from mpicomp.compressors.wire_format import Selection
from mpicomp.policies import Plan, Policy, UserSettings
from mpicomp.policies.surveys import SpectrumSurvey
from mpicomp.reducer import bucket
from mpicomp.reducer.bucket import LayerBounds
from mpicomp.transport import LocalWorld

NAMES, SIZES = ("a", "b", "c", "d"), (300, 1, 40, 120)
PARTS = LayerBounds(NAMES, SIZES)
BOUNDS = np.concatenate(([0], np.cumsum(SIZES)))
ENDS = list(itertools.pairwise(BOUNDS.tolist()))


def array(seed=0):
    return np.random.default_rng(seed).standard_t(3, BOUNDS[-1]).astype(np.float32)


def layers_of(accumulated, sent, energies, gain):
    places, gains = PARTS.places_in(sent), PARTS.gains(accumulated, sent, energies, gain)
    return bucket.layers_of(PARTS, places, gains)


def parts(flat):
    return [flat[start:stop].astype(np.float64) for start, stop in ENDS]


def energies(flat):
    return np.array([sum(float(x) ** 2 for x in part) for part in parts(flat)])


@pytest.mark.parametrize("kept", [1, 7, 60, 461])
def test_layers_of_a_selection_sum_its_elements(kept):
    whole = array()
    indices = np.sort(np.argsort(-np.abs(whole))[:kept]).astype(np.uint32)
    layers = layers_of(whole, Selection(indices, whole[indices]), energies(whole), 0.5)
    for place, (start, stop) in enumerate(ENDS):
        inside = [index for index in indices if start <= index < stop]
        assert layers.kept[place] == len(inside)
        assert layers.ratios[place] == len(inside) / (stop - start)
        sent = sum(float(whole[index]) ** 2 for index in inside)
        assert layers.gains[place] == pytest.approx(sent / energies(whole)[place], abs=1e-5)


def test_layers_of_a_partly_sent_array_have_its_gains():
    whole = array()
    sent = np.where(np.arange(whole.size) % 3 == 0, whole, whole / 2).astype(np.float32)
    layers = layers_of(whole, sent, energies(whole), 0.8)
    assert (layers.kept == SIZES).all()
    lost = [sum(float(x) ** 2 for x in part) for part in parts(whole - sent)]
    np.testing.assert_allclose(layers.gains, 1 - np.array(lost) / energies(whole), atol=1e-5)


def test_bucket_without_a_survey_has_no_gain():
    whole = array()
    layers = layers_of(whole, whole, None, 1.0)
    assert layers.gains is None
    assert [entry["gain"] for entry in layers.to_json()] == [None] * 4


def test_layers_sent_whole_have_the_gain_of_the_bucket():
    whole = array()
    assert (layers_of(whole, whole, energies(whole), 1.0).gains == 1).all()


def test_layer_without_energy_has_lost_nothing():
    whole = array()
    whole[300:341] = 0
    layers = layers_of(whole, Selection(np.array([5], np.uint32), whole[5:6]), energies(whole), 0.1)
    assert layers.gains[1] == layers.gains[2] == 1
    assert layers.gains[3] == 0


class Looks(Policy):
    """Top-k whose gradients are looked at in every second step."""

    id = "looks"

    def configure(self, settings: UserSettings) -> None:
        self.compressor, self.steps = mpicomp.TopK(ratio=0.1), 0

    def survey(self, bucket):
        return SpectrumSurvey() if self.steps % 2 == 0 else None

    def plan(self, bucket):
        return Plan(bind(self.compressor, "allgather"), "always")

    def on_step_end(self, step, outcomes):
        self.steps += 1


def test_records_have_gains_in_steps_with_a_survey():
    world = LocalWorld(2)
    reducers = [mpicomp.Reducer(policy=Looks(), comm=end) for end in world.transports]
    for step in range(4):
        flat = [array(10 * step + rank) for rank in range(2)]
        gradients = [{n: p.astype(np.float32) for n, p in zip(NAMES, parts(item), strict=True)} for item in flat]
        before = [np.concatenate([reducers[rank].residual(n) for n in NAMES]) if step else 0 for rank in range(2)]
        world.run([r.rounds(g) for r, g in zip(reducers, gradients, strict=True)])
        for rank, reducer in enumerate(reducers):
            layers = reducer.last_step.buckets[0].layers
            assert layers.names == NAMES
            assert layers.kept.sum() == 46
            accumulated = flat[rank] + before[rank]
            lost = energies(np.concatenate([reducer.residual(n) for n in NAMES]))
            if step % 2:
                assert layers.gains is None
            else:
                np.testing.assert_allclose(layers.gains, 1 - lost / energies(accumulated), atol=1e-2)


def test_policy_of_another_reducer_is_refused():
    policy = Looks()
    mpicomp.Reducer(policy=policy, comm=LocalWorld(1).transports[0])
    with pytest.raises(
        mpicomp.errors.ConfigurationError, match=r"reducer: this policy \(looks\) serves another reducer"
    ):
        mpicomp.Reducer(policy=policy, comm=LocalWorld(1).transports[0])


def test_policy_of_a_refused_reducer_is_as_it_was():
    policy = mpicomp.policies.get_policy("static")
    with pytest.raises(mpicomp.errors.ConfigurationError, match="threads must be at least 1"):
        mpicomp.Reducer("topk", policy=policy, threads=0, comm=LocalWorld(1).transports[0])
    assert (policy.warmup, policy.serves) == (None, False)
    reducer = mpicomp.Reducer("topk", policy=policy, comm=LocalWorld(1).transports[0])
    assert (policy.warmup, policy.serves, reducer.settings["warmup"]) == (0, True, 0)
