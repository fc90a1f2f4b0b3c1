import json

import numpy as np
import oracle
import pytest
from lockstep import gradients, run
from schemes import REPRESENTATIVES, Above

import mpicomp
from mpicomp.collectives import bind, fitting, variants
from mpicomp.errors import NonFiniteError
from mpicomp.transport import LocalWorld

LAYOUTS = [[0, 0, 1, 1], [0, 0, 0, 1, 1], [0, 1, 1], [0, 1, 0, 2, 1, 0, 0, 2]]


class OnHosts:
    """Reducers of ranks on hosts that step together."""

    def __init__(self, layout, compressor, collective, **settings):
        self.world = LocalWorld(len(layout), hosts=layout)
        self.reducers = [mpicomp.Reducer(compressor, collective, comm=end, **settings) for end in self.world.transports]

    def reduce(self, arrays):
        means = self.world.run([r.rounds({"w": a}) for r, a in zip(self.reducers, arrays, strict=True)])
        return [mean["w"] for mean in means]

    def residuals(self):
        return [reducer.residual("w") for reducer in self.reducers]


@pytest.mark.parametrize("layout", LAYOUTS[1:3], ids=str)
@pytest.mark.parametrize("compressor", [own for own in REPRESENTATIVES if "hierarchical" in fitting(own)], ids=str)
def test_nothing_is_lost(compressor, layout):
    """In every step, whatever the inner collective says to have sent of a host's sum, and in every phase of a code."""
    ranks = OnHosts(layout, compressor, "hierarchical", policy={"warmup": 0})
    rng = np.random.default_rng(3)
    before = np.zeros((len(layout), 3000))
    for _ in range(6):
        arrays = rng.normal(size=before.shape).astype(np.float32)
        means = ranks.reduce(list(arrays))
        after = np.array(ranks.residuals(), np.float64)
        put_in = (arrays + before - after).sum(axis=0)
        largest = np.abs(np.concatenate([arrays, before, after])).max()
        np.testing.assert_allclose(len(layout) * means[0].astype(np.float64), put_in, rtol=0, atol=4e-6 * largest)
        before = after


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("numel", [1, 201])
@pytest.mark.parametrize("inner", ["allgather", "parameter-server"])
def test_topk_with_feedback_is_what_the_oracle_says(layout, numel, inner):
    rng = np.random.default_rng(0)
    together = OnHosts(layout, mpicomp.TopK(ratio=0.05), f"hierarchical:{inner}")
    expected = dict.fromkeys(layout, 0.0)
    for _ in range(5):
        arrays = [rng.laplace(size=numel) for _ in layout]
        mean, expected = oracle.hierarchical_topk_step(arrays, expected, layout, 0.05)
        means = together.reduce(arrays)
        for own in means:
            np.testing.assert_allclose(own, mean, rtol=1e-12, atol=1e-14)
        for host, residual in expected.items():
            held = sum(own for own, where in zip(together.residuals(), layout, strict=True) if where == host)
            np.testing.assert_allclose(held, residual, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_kept_back_stays_with_the_owners(layout):
    together = OnHosts(layout, mpicomp.TopK(ratio=0.05), "hierarchical")
    for step in range(3):
        together.reduce(gradients(len(layout), 200, np.float32, seed=step))
        residuals = together.residuals()
        for host in set(layout):
            held = [own != 0 for own, where in zip(residuals, layout, strict=True) if where == host]
            assert np.sum(held, axis=0).max() == 1


@pytest.mark.parametrize("layout", [*LAYOUTS, [0, 0, 0], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("inner", ["allreduce", "scatter-reduce", "ring", "recursive-doubling", "parameter-server"])
def test_dense_arrays_stay_as_they_are_and_all_is_sent(layout, inner):
    arrays = gradients(len(layout), 101, np.float32)
    outcome = run(mpicomp.Dense(), f"hierarchical:{inner}", arrays, hosts=layout)
    for result, own in zip(outcome.results, outcome.accumulated, strict=True):
        np.testing.assert_allclose(result.mean, np.mean(np.float64(arrays), axis=0), rtol=1e-5, atol=1e-6)
        assert result.sent is own or result.sent.base is own.base
        assert (result.gain, result.kept) == (1.0, 101.0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("inner", ["scatter-reduce", "parameter-server"])
def test_sixteen_bits_leave_errors_with_the_owners_only(layout, inner):
    together = OnHosts(layout, mpicomp.Dense(wire="bf16"), f"hierarchical:{inner}")
    hosts = len(set(layout))
    rng = np.random.default_rng(0)
    for _ in range(4):
        put_in = np.sum(together.residuals(), axis=0) if together.reducers[0].last_step else 0.0
        arrays = [rng.normal(size=300).astype(np.float32) for _ in layout]
        means = together.reduce(arrays)
        residuals = together.residuals()
        owners = min(layout.count(host) for host in layout)
        with_errors = [residual.any() for residual in residuals]
        places = [layout[:rank].count(host) for rank, host in enumerate(layout)]
        assert with_errors == [place < owners for place in places]
        # What an owner keeps is a host's error: half a unit of its sum, and for one host that of the mean.
        assert np.abs(residuals).max() < (hosts + 1) * 2**-8 * np.abs(np.sum(arrays, axis=0)).max()
        left = np.sum(np.float64(residuals), axis=0)
        np.testing.assert_allclose(
            len(layout) * np.float64(means[0]) + left, put_in + np.sum(np.float64(arrays), axis=0), atol=1e-5
        )


def test_one_host_is_dense_whatever_the_compressor():
    arrays = gradients(3, 50, np.float32)
    expected = run(mpicomp.Dense(), "scatter-reduce", arrays).results[0].mean
    for compressor in (mpicomp.TopK(ratio=0.1), Above(limit=1e30), mpicomp.Dense(wire="bf16")):
        outcome = run(compressor, "hierarchical", arrays, hosts=1)
        for result, own in zip(outcome.results, outcome.accumulated, strict=True):
            assert result.mean.tobytes() == expected.tobytes()
            assert result.sent.base is own.base
            assert result.kept == 50


@pytest.mark.parametrize("compressor", [mpicomp.TopK(ratio=0.1), mpicomp.Dense(wire="fp16"), Above(limit=1.0)], ids=str)
def test_one_rank_a_host_is_the_inner_collective_alone(compressor):
    arrays = gradients(4, 500, np.float32)
    for name in variants(compressor):
        if not name.startswith("hierarchical:"):
            continue
        plain = run(compressor, name.removeprefix("hierarchical:"), arrays, step=1)
        outcome = run(compressor, name, arrays, step=1, hosts=4)
        assert outcome.results[0].mean.tobytes() == plain.results[0].mean.tobytes()
        np.testing.assert_allclose(outcome.results[0].gain, plain.results[0].gain, rtol=1e-12)
        for own, other in zip(outcome.transports, plain.transports, strict=True):
            assert [(entry.operation, entry.sent_bytes, entry.wire_bytes) for entry in own.log] == [
                (entry.operation, entry.sent_bytes, entry.wire_bytes) for entry in other.log
            ]


def test_only_selections_of_slices_go_between_hosts():
    layout = [0, 0, 0, 1, 1]
    scheme = bind(mpicomp.TopK(ratio=0.01, indices="plain"), "hierarchical:allgather")
    for end in LocalWorld(5, hosts=layout).transports:
        place, owner = end.group.rank % 3, end.group.rank not in (2,)
        rounds = scheme.rounds(10_001, np.dtype(np.float32), end.group)
        across = [task for task in rounds if task.group == "across"]
        assert len(across) == owner
        for task in across:
            assert task.counts == [24 + 8 * 50] * 2, place
        host = [task for task in rounds if task.group == "host"]
        assert [task.operation for task in host] == ["alltoallv", "allgatherv", "allgatherv"]
        rest = [0] if end.group.rank < 3 else []
        assert host[0].counts == [5000, 5001 + 4, *rest]
        assert host[2].counts == [5000, 5001, *rest]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("compressor", [mpicomp.TopK(ratio=0.05), mpicomp.Dense(wire="bf16")], ids=str)
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_step_that_is_undone_leaves_residuals_as_they_were(layout, compressor, policy):
    together = OnHosts(layout, compressor, "hierarchical", nonfinite=policy)
    arrays = gradients(len(layout), 100, np.float32)
    together.reduce(arrays)
    before = together.residuals()
    for culprit in range(len(layout)):
        poisoned = [array.copy() for array in arrays]
        poisoned[culprit][7] = np.nan
        if policy == "raise":
            with pytest.raises(NonFiniteError):
                together.reduce(poisoned)
        else:
            assert not np.any(together.reduce(poisoned))
        for old, new in zip(before, together.residuals(), strict=True):
            assert old.tobytes() == new.tobytes()


@pytest.mark.parametrize("name", [n for n in variants(mpicomp.TopK()) if n.startswith("hierarchical:")])
def test_state_dict_resumes_bit_for_bit(name):
    layout = [0, 0, 0, 1, 1]
    pool = [gradients(5, 300, np.float32, seed=step) for step in range(6)]
    first, second = (OnHosts(layout, mpicomp.TopK(ratio=0.05), name) for _ in range(2))
    for arrays in pool[:3]:
        first.reduce(arrays)
    for old, new in zip(first.reducers, second.reducers, strict=True):
        state = old.state_dict()
        assert json.loads(json.dumps(state["memories"])) == state["memories"]
        new.load_state_dict(state)
    for arrays in pool[3:]:
        for old, new in zip(first.reduce(arrays), second.reduce(arrays), strict=True):
            assert old.tobytes() == new.tobytes()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_upon_hosts_star_topk_is_what_the_oracle_says(layout):
    rng = np.random.default_rng(1)
    together = OnHosts(layout, mpicomp.TopK(ratio=0.05), "star-topk:hierarchical:ring")
    residuals = [np.zeros(200) for _ in layout]
    for step in range(6):
        arrays = [rng.laplace(size=200) for _ in layout]
        mean, residuals = oracle.star_topk_step(arrays, residuals, 0.05, step)
        np.testing.assert_allclose(together.reduce(arrays)[0], mean, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(together.residuals(), residuals, rtol=1e-12, atol=1e-14)
