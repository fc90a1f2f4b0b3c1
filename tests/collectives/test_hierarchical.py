"""Slices of hosts: what travels between them, and where residuals stay. test_oracles has means and residuals."""

import json

import numpy as np
import pytest
from lockstep import gradients, run
from schemes import REPRESENTATIVES, Above
from worlds import Ranks

import mpicomp
from mpicomp.collectives import bind, fitting, variants
from mpicomp.mpi import LocalWorld

LAYOUTS = [[0, 0, 1, 1], [0, 0, 0, 1, 1], [0, 1, 1], [0, 1, 0, 2, 1, 0, 0, 2]]
SLICED = [compressor for compressor in REPRESENTATIVES if "hierarchical" in fitting(compressor)]


def reduce(world, arrays):
    return [mean["w"] for mean in world.reduce([{"w": array} for array in arrays])]


@pytest.mark.parametrize("layout", LAYOUTS[1:3], ids=str)
@pytest.mark.parametrize("compressor", SLICED, ids=str)
def test_hierarchical_loses_nothing(compressor, layout):
    """In every step, whatever the inner collective has sent of a host's sum, and in every phase of a code."""
    world = Ranks(len(layout), compressor, "hierarchical", hosts=layout)
    rng = np.random.default_rng(3)
    before = np.zeros((len(layout), 3000))
    for _ in range(6):
        arrays = rng.normal(size=before.shape).astype(np.float32)
        means = reduce(world, arrays)
        after = np.array(world.residuals("w"), np.float64)
        put_in = (arrays + before - after).sum(axis=0)
        largest = np.abs(np.concatenate([arrays, before, after])).max()
        np.testing.assert_allclose(len(layout) * means[0].astype(np.float64), put_in, rtol=0, atol=4e-6 * largest)
        before = after


@pytest.mark.parametrize("layout", [*LAYOUTS, [0, 0, 0], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("inner", ["allreduce", "scatter-reduce", "ring", "recursive-doubling", "parameter-server"])
def test_dense_arrays_are_unchanged_and_sent_whole(layout, inner):
    arrays = gradients(len(layout), 101, np.float32)
    outcome = run(mpicomp.Dense(), f"hierarchical:{inner}", arrays, hosts=layout)
    for result, array in zip(outcome.results, outcome.after, strict=True):
        np.testing.assert_allclose(result.mean, np.mean(np.float64(arrays), axis=0), rtol=1e-5, atol=1e-6)
        assert result.sent is array or result.sent.base is array.base
        assert (result.gain, result.kept) == (1.0, 101.0)


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


@pytest.mark.parametrize("compressor", [mpicomp.TopK(ratio=0.1), mpicomp.Dense(wire="fp16"), Above(limit=1.0)], ids=str)
def test_one_rank_a_host_is_the_inner_collective(compressor):
    arrays = gradients(4, 500, np.float32)
    for name in variants(compressor):
        if not name.startswith("hierarchical:"):
            continue
        plain = run(compressor, name.removeprefix("hierarchical:"), arrays, step=1)
        outcome = run(compressor, name, arrays, step=1, hosts=4)
        assert outcome.results[0].mean.tobytes() == plain.results[0].mean.tobytes()
        np.testing.assert_allclose(outcome.results[0].gain, plain.results[0].gain, rtol=1e-12)
        logs = [
            [[entry.operation, entry.sent_bytes, entry.wire_bytes] for entry in end.log] for end in plain.transports
        ]
        for end, log in zip(outcome.transports, logs, strict=True):
            assert [[entry.operation, entry.sent_bytes, entry.wire_bytes] for entry in end.log] == log


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


@pytest.mark.parametrize("name", [name for name in variants(mpicomp.TopK()) if name.startswith("hierarchical:")])
def test_hierarchical_state_resumes_bit_for_bit(name):
    pool = [gradients(5, 300, np.float32, seed=step) for step in range(6)]
    first, second = (Ranks(5, mpicomp.TopK(ratio=0.05), name, hosts=[0, 0, 0, 1, 1]) for _ in range(2))
    for arrays in pool[:3]:
        reduce(first, arrays)
    for old, new in zip(first.reducers, second.reducers, strict=True):
        state = old.state_dict()
        assert json.loads(json.dumps(state["memories"])) == state["memories"]
        new.load_state_dict(state)
    for arrays in pool[3:]:
        for old, new in zip(reduce(first, arrays), reduce(second, arrays), strict=True):
            assert old.tobytes() == new.tobytes()
