"""The error of a learned code in the memory of its bucket."""

import numpy as np
import pytest
from worlds import Ranks

import mpicomp

RANKS, SIZE = 3, 400
CODE = {"id": "lgc", "ratio": 1.0, "encoder": (2,), "decoder": (2,), "passes": 1, "dense_steps": 1, "training_steps": 6}


def gradients_of(rng):
    """Values that ranks share in part, and neighbours, too."""
    shared = np.repeat(rng.standard_normal(SIZE // 8), 8)
    return [{"w": (shared + 0.5 * rng.standard_normal(SIZE)).astype(np.float32)} for _ in range(RANKS)]


def errors(world):
    return [reducer.state_dict()["memories"]["w"]["lgc"]["error"] for reducer in world.reducers]


@pytest.mark.parametrize("instance", ["ring", "server"])
def test_code_error_is_that_of_the_decoded_array(instance):
    """With all elements selected, and a code for all of them, it is the residual's share of the accumulated array."""
    world = Ranks(RANKS, mpicomp.get_compressor(CODE | {"instance": instance}), "learned")
    rng = np.random.default_rng(0)
    learning, coded = [], []
    for step in range(12):
        gradients = gradients_of(rng)
        before = np.zeros((RANKS, SIZE)) if step == 0 else np.float64(world.residuals("w"))
        world.reduce(gradients)
        found = errors(world)
        if step < 7:
            assert found[1:] == [None, None]  # rank 0 alone learns
            learning.append(found[0])
            continue
        for residual, held, gradient, error in zip(world.residuals("w"), before, gradients, found, strict=True):
            expected = np.square(residual.astype(np.float64)).sum() / np.square(held + gradient["w"]).sum()
            assert error == pytest.approx(expected, rel=1e-4)
            coded.append(error)
    assert learning[0] is None  # a dense step
    assert min(learning[1:]) > 0
    assert 0 < max(coded) < 1
