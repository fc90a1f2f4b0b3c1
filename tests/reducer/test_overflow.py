"""Errors of gradients that are or become infinite, the same on all ranks, and gradients that are clipped."""

import re

import numpy as np
import pytest
from worlds import Ranks

import mpicomp
from mpicomp.errors import NonFiniteError
from mpicomp.mpi import LocalWorld
from mpicomp.reducer.agreement import Checks


def messages(ranks, gradients):
    """Return what each rank's error says; ranks take turns, so each is driven to its own."""
    with pytest.raises(NonFiniteError) as caught:
        ranks.reduce(gradients)
    return str(caught.value)


@pytest.mark.parametrize(("compressor", "collective"), [("dense", "allreduce"), ("powersgd", "auto")])
def test_overflow_of_a_sum_names_the_compressor(compressor, collective):
    ranks = Ranks(3, compressor, collective)
    large = {"w": np.full((64, 64), 3e38, np.float32)}
    said = messages(ranks, [large, large, large])
    assert re.search(rf"gradients are finite, and {compressor} overflowed at step 0.*'w'", said)


@pytest.mark.parametrize("size", [2, 4])
def test_sum_that_is_divided_first_does_not_overflow(size):
    large = {"w": np.full(64, 3e38, np.float32)}
    for mean in Ranks(size, "dense", "allreduce").reduce([large] * size):
        np.testing.assert_array_equal(mean["w"], large["w"])


def test_nonfinite_gradient_is_named():
    ranks = Ranks(2, "dense", "allreduce")
    said = messages(ranks, [{"w": np.full(9, np.inf, np.float32)}, {"w": np.ones(9, np.float32)}])
    assert "gradients must be finite" in said
    means = ranks.reduce([{"w": np.ones(9, np.float32)}] * 2)
    assert (means[0]["w"] == 1).all()


def test_nonfinite_bfloat16_is_named():
    torch = pytest.importorskip("torch")
    ranks = Ranks(2, "dense", "scatter-reduce")
    spoilt = {"w": torch.full((9,), torch.nan, dtype=torch.bfloat16)}
    assert "gradients must be finite" in messages(ranks, [spoilt, {"w": torch.ones(9, dtype=torch.bfloat16)}])
    large = {"w": torch.full((9,), 3e38, dtype=torch.bfloat16)}
    assert "gradients are finite, and dense overflowed" in messages(ranks, [large, large])


def test_clipped_gradients_stay_clipped_if_another_rank_is_stale():
    means = []
    for all_stale in (False, True):
        world = LocalWorld(2)
        compressor = mpicomp.DGC(ratio=0.5, clip=1.0)
        reducers = [mpicomp.Reducer(compressor, "allgather", comm=end) for end in world.transports]
        gradients = {"a": np.arange(8, dtype=np.float32), "b": np.full(4, 5, np.float32)}
        world.run([reducer.rounds(gradients) for reducer in reducers])
        checks = Checks()
        checks.stale = all_stale
        absent = [(), ("b",)]
        steps = [r.rounds(gradients, absent=names, checks=checks) for r, names in zip(reducers, absent, strict=True)]
        means.append(world.run(steps))
    for here, there in zip(*means, strict=True):
        assert {name: mean.tolist() for name, mean in here.items()} == {n: mean.tolist() for n, mean in there.items()}
