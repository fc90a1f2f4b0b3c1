"""Slices of hosts: what travels between them, and where residuals stay. test_oracles has means and residuals."""

import numpy as np
import pytest
from lockstep import gradients, run
from schemes import Above
from worlds import Ranks

import mpicomp
from mpicomp.collectives import bind
from mpicomp.mpi import LocalWorld

LAYOUTS = [[0, 0, 1, 1], [0, 0, 0, 1, 1], [0, 1, 1], [0, 1, 0, 2, 1, 0, 0, 2]]


def reduce(world, arrays):
    return [mean["w"] for mean in world.reduce([{"w": array} for array in arrays])]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("inner", ["scatter-reduce", "parameter-server"])
def test_rounding_errors_stay_with_owners_only(layout, inner):
    world = Ranks(len(layout), mpicomp.Dense(wire="bf16"), f"hierarchical:{inner}", hosts=layout)
    rng = np.random.default_rng(0)
    for step in range(4):
        put_in = world.residual_sum("w") if step else 0.0
        arrays = [rng.normal(size=300).astype(np.float32) for _ in layout]
        means = reduce(world, arrays)
        residuals = world.residuals("w")
        owners = min(layout.count(host) for host in layout)
        positions = [layout[:rank].count(host) for rank, host in enumerate(layout)]
        assert [residual.any() for residual in residuals] == [position < owners for position in positions]
        # What an owner keeps is a host's error: half a unit of its sum, and for one host that of the mean.
        most = (len(set(layout)) + 1) * 2**-8 * np.abs(np.sum(arrays, axis=0)).max()
        assert np.abs(residuals).max() < most
        delivered = len(layout) * np.float64(means[0]) + world.residual_sum("w")
        np.testing.assert_allclose(delivered, put_in + np.sum(np.float64(arrays), axis=0), atol=1e-5)


def test_one_host_is_dense_whatever_the_compressor():
    arrays = gradients(3, 50, np.float32)
    expected = run(mpicomp.Dense(), "scatter-reduce", arrays).results[0].mean
    for compressor in (mpicomp.TopK(ratio=0.1), Above(limit=1e30), mpicomp.Dense(wire="bf16")):
        outcome = run(compressor, "hierarchical", arrays, hosts=1)
        for result, array in zip(outcome.results, outcome.after, strict=True):
            assert result.mean.tobytes() == expected.tobytes()
            assert result.sent.base is array.base
            assert result.kept == 50


def test_selections_of_slices_alone_go_between_hosts():
    layout = [0, 0, 0, 1, 1]
    scheme = bind(mpicomp.TopK(ratio=0.01, indices="plain"), "hierarchical:allgather")
    for end in LocalWorld(5, hosts=layout).transports:
        rounds = scheme.rounds(10_001, np.dtype(np.float32), end.group)
        across = [task.counts for task in rounds if task.group == "across"]
        assert across == [[24 + 8 * 50] * 2] * (end.group.rank != 2)
        host = [task for task in rounds if task.group == "host"]
        assert [task.operation for task in host] == ["alltoallv", "allgatherv", "allgatherv"]
        rest = [0] if end.group.rank < 3 else []
        assert host[0].counts == [5000, 5001 + 4, *rest]
        assert host[2].counts == [5000, 5001, *rest]
