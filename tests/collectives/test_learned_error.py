"""What a record says of a learned code's error."""

import numpy as np
import pytest

import mpicomp
from mpicomp.transport import LocalWorld

RANKS, SIZE = 3, 400
PHASES = {"dense_steps": 1, "training_steps": 6}


def gradients_of(rng):
    """Values that ranks share in part, and neighbours, too."""
    shared = np.repeat(rng.standard_normal(SIZE // 8), 8)
    return [{"w": (shared + 0.5 * rng.standard_normal(SIZE)).astype(np.float32)} for _ in range(RANKS)]


@pytest.mark.parametrize("instance", ["ring", "server"])
def test_it_is_that_of_what_was_decoded(instance):
    """With all elements selected, and a code for all of them, it is what the residual has of what was there."""
    world = LocalWorld(RANKS)
    compressor = mpicomp.get_compressor({"id": "lgc", "ratio": 1.0, "instance": instance, "code": "linear"} | PHASES)
    reducers = [mpicomp.Reducer(compressor, "learned", comm=end) for end in world.transports]
    rng = np.random.default_rng(0)
    learning, coded = [], []
    for step in range(12):
        gradients = gradients_of(rng)
        before = [np.zeros(SIZE) if step == 0 else own.residual("w").astype(np.float64) for own in reducers]
        world.run([own.rounds(each) for own, each in zip(reducers, gradients, strict=True)])
        found = [own.last_step.buckets[0].code_error for own in reducers]
        if step < 7:
            assert found[1:] == [None, None]  # rank 0 alone learns
            learning.append(found[0])
            continue
        for own, held, gradient, error in zip(reducers, before, gradients, found, strict=True):
            accumulated = held + gradient["w"]
            expected = np.square(own.residual("w").astype(np.float64)).sum() / np.square(accumulated).sum()
            assert error == pytest.approx(expected, rel=1e-4)
            coded.append(error)
    assert learning[:2] == [None, 1.0]  # a dense step, and one before which nothing was learnt
    assert 0 < max(learning[2:]) < 1
    assert 0 < max(coded) < 1


@pytest.mark.parametrize("instance", ["ring", "server"])
def test_of_what_is_not_finite_nothing_is_said(instance):
    world = LocalWorld(RANKS)
    compressor = mpicomp.get_compressor({"id": "lgc", "ratio": 1.0, "instance": instance, "code": "linear"} | PHASES)
    reducers = [mpicomp.Reducer(compressor, "learned", comm=end, nonfinite="skip") for end in world.transports]
    rng = np.random.default_rng(1)
    for step in range(9):
        gradients = gradients_of(rng)
        if step in (3, 8):
            gradients[1]["w"][5] = np.nan
        world.run([own.rounds(each) for own, each in zip(reducers, gradients, strict=True)])
        found = [own.last_step.buckets[0].code_error for own in reducers]
        assert all(error is None or np.isfinite(error) for error in found)
        if step == 8:
            assert found[1] is None
