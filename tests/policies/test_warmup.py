"""Dense steps, or a falling ratio, before the policy that was named."""

import json

import numpy as np
import pytest
from worlds import Ranks

import mpicomp
from mpicomp.errors import ConfigurationError
from mpicomp.mpi import LocalWorld
from mpicomp.policies import Schedule, list_policies
from mpicomp.policies.schedule import with_warmup

TOPK = {"id": "topk", "ratio": 0.1}


def gradients(size, step, numel=200, names=("w",)):
    return [
        {name: np.random.default_rng((step, rank, place)).laplace(size=numel) for place, name in enumerate(names)}
        for rank in range(size)
    ]


def is_dense(ranks):
    return [bucket.compressor == mpicomp.Dense().get_config() for bucket in ranks.reducers[0].last_step.buckets]


def run(ranks, steps, first=0, names=("w",)):
    """Do steps; give for each whether it was dense, with the means of all of them."""
    dense, means = [], []
    for step in range(first, first + steps):
        everyones = ranks.reduce(gradients(len(ranks.reducers), step, names=names))
        assert all((values["w"] == everyones[0]["w"]).all() for values in everyones)
        means.append(everyones[0]["w"].copy())
        dense.append(all(is_dense(ranks)))
    return dense, means


def slow_topk(size, steps, warmup, k):
    """Give the means of top-k with error feedback after dense steps, from sorted magnitudes."""
    residuals, means = np.zeros((size, 200)), []
    for step in range(steps):
        residuals += [gradient["w"] for gradient in gradients(size, step)]
        sent = residuals.copy()
        if step >= warmup:
            for array in sent:
                array[np.argsort(-abs(array))[k:]] = 0
        residuals -= sent
        means.append(sent.mean(axis=0))
    return means, residuals


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 3])
def test_the_first_steps_are_dense(size, warmup):
    ranks = Ranks(size, TOPK, warmup=warmup)
    dense, means = run(ranks, 6)
    assert dense == [step < warmup for step in range(6)]
    expected, residuals = slow_topk(size, 6, warmup, 20)
    np.testing.assert_allclose(means, expected, atol=1e-12)
    np.testing.assert_allclose([reducer.residual("w") for reducer in ranks.reducers], residuals, atol=1e-12)


@pytest.mark.parametrize(
    ("named", "steps"),
    [
        (("topk",), 20),
        (("powersgd",), 20),
        ((mpicomp.DGC(momentum=0.9),), 20),
        ((), 0),
        (("topk", "allgather"), 0),
        (("topk", "auto", "static"), 0),
        (("topk", "auto", None, True), 0),
        (("dense",), 0),
        (("signsgd",), 0),  # a vote is no mean
        (("lgc",), 0),  # it begins in a way of its own
    ],
    ids=str,
)
def test_the_default(named, steps):
    reducer = mpicomp.Reducer(*named, comm=LocalWorld(1).transports[0])
    assert reducer.state_dict()["settings"]["warmup"] == steps


@pytest.mark.parametrize(
    ("compressor", "warmup"),
    [("topk", 3), ("dgc", 3), ("onebit", 3), (mpicomp.PowerSGD(rank=1), 3), ("topk", "ramp:4"), ("sidco", "ramp:4")],
)
def test_nothing_is_lost_in_it_nor_over_its_end(compressor, warmup):
    ranks = Ranks(3, compressor, warmup=warmup)
    sums = given = 0
    for step in range(8):
        matrices = [gradient["w"].reshape(10, 20) for gradient in gradients(3, step)]
        mean = ranks.reduce([{"w": matrix} for matrix in matrices])[0]["w"]
        sums, given = sums + 3 * mean, given + sum(matrices)
        np.testing.assert_allclose(given, sums + ranks.residual_sum("w"), atol=1e-9)
        assert ranks.residual_sum("w").any() == (warmup != 3 or step >= 3)


def test_the_velocity_of_momentum_correction_lives_on():
    """In dense steps momentum correction is plain momentum, and nothing of it is set to zero."""
    momentum, size = 0.5, 2
    ranks = Ranks(size, mpicomp.DGC(ratio=0.1, momentum=momentum), warmup=3)
    _, means = run(ranks, 4)
    velocities, expected = np.zeros((size, 200)), []
    for step in range(4):
        velocities = momentum * velocities + [gradient["w"] for gradient in gradients(size, step)]
        expected.append(velocities.mean(axis=0))
    np.testing.assert_allclose(means[:3], expected[:3], atol=1e-12)
    # The residual was zero: what the first compressed step has sent and kept is the velocity.
    np.testing.assert_allclose(size * means[3] + ranks.residual_sum("w"), size * expected[3], atol=1e-12)


@pytest.mark.parametrize("policy", list_policies())
def test_every_policy_begins_after_it(policy):
    ranks = Ranks(2, TOPK, policy=policy, warmup=3, bucket_bytes=800)
    reasons = []
    for step in range(30):
        ranks.reduce(gradients(2, step, names=("w", "v")), 0.1)
        dense, [first, *_] = is_dense(ranks), ranks.reducers[0].last_step.buckets
        assert len(dense) == 2
        assert all(dense) or step >= 3
        reasons.append(first.reason)
    assert [step for step, reason in enumerate(reasons) if reason.startswith("warm-up")] == [0, 1, 2]
    assert ranks.reducers[0].policy.id == policy
    assert ranks.reducers[0].state_dict()["settings"]["policy"]["id"] == policy


def test_the_ramp_of_dgc():
    """Sparsities 75, 93.75, 98.4375 and 99.6 % for an epoch each, then 99.9 %."""
    epoch = 2
    ranks = Ranks(2, mpicomp.TopK(ratio=0.001), warmup=f"ramp:{4 * epoch}")
    requested = []
    for _ in range(6 * epoch):
        ranks.reduce([{"w": np.arange(1000, dtype=np.float32)}] * 2)
        requested.append(ranks.reducers[0].last_step.buckets[0].ratio)
    published = np.repeat([0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001], epoch)
    np.testing.assert_allclose(requested, published, rtol=0.02)  # theirs are powers of 1/4, rounded at last


@pytest.mark.parametrize("collective", ["allgather", "star-topk", "ring", "hierarchical"])
def test_named_collective_carries_dense_steps_if_it_can(collective):
    compressor = "randomk" if collective == "ring" else "topk"
    ranks = Ranks(4, compressor, collective, warmup=1, hosts=2)
    plans = []
    for step in range(2):
        ranks.reduce(gradients(4, step))
        plans.append(ranks.reducers[0].last_step.buckets[0].collective.partition(":")[0])
    assert plans == [collective if collective in ("ring", "hierarchical") else "allreduce", collective]


@pytest.mark.parametrize("warmup", [4, "ramp:8"])
@pytest.mark.parametrize("policy", [None, {"id": "schedule", "begin": 0.5, "end": 0.1, "steps": 3}], ids=str)
@pytest.mark.parametrize("saved", [2, 8, 10])
def test_it_resumes_where_it_was(warmup, policy, saved):
    settings = {"policy": policy, "warmup": warmup}
    whole = Ranks(2, TOPK, **settings)
    run(whole, saved)
    states = [reducer.state_dict() for reducer in whole.reducers]
    resumed = Ranks(2, TOPK, **settings)
    for reducer, state in zip(resumed.reducers, states, strict=True):
        reducer.load_state_dict(state | {"policy": json.loads(json.dumps(state["policy"]))})
    dense, means = run(whole, 6, saved)
    again, the_same = run(resumed, 6, saved)
    assert again == dense
    np.testing.assert_array_equal(means, the_same)


def test_one_policy_object_serves_one_reducer():
    policy = Schedule()
    reducer = mpicomp.Reducer("topk", policy=with_warmup(policy, 3), comm=LocalWorld(1).transports[0])
    assert reducer.policy is policy
    with pytest.raises(ConfigurationError, match="serves another reducer"):
        mpicomp.Reducer("topk", policy=policy, comm=LocalWorld(1).transports[0])


@pytest.mark.mpi(min_size=2)
def test_over_mpi(comm):
    reducer = mpicomp.Reducer(TOPK, "allgather", comm=comm, policy={"warmup": 2})
    expected, residuals = slow_topk(comm.size, 4, 2, 20)
    for step in range(4):
        mean = reducer.reduce(gradients(comm.size, step)[comm.rank])["w"]
        np.testing.assert_allclose(mean, expected[step], atol=1e-12)
    np.testing.assert_allclose(reducer.residual("w"), residuals[comm.rank], atol=1e-12)
    reducer.close()
    # What is measured teaches the policy that has planned it, and plans stay the same on all ranks.
    reducer = mpicomp.Reducer(TOPK, policy={"id": "gravac", "warmup": 5}, comm=comm)
    for step in range(12):
        reducer.reduce(gradients(comm.size, step)[comm.rank], lr=0.1)
        [bucket] = reducer.last_step.buckets
        assert len(set(comm.allgather((str(bucket.compressor), bucket.collective, bucket.reason)))) == 1
        assert bucket.reason.startswith("warm-up") == (step < 5)
    reducer.close()


@pytest.mark.parametrize("warmup", [-1, 1.5, True, "ramp:0", "dense", [3]])
def test_what_is_no_warm_up_is_refused(warmup):
    with pytest.raises(ConfigurationError, match=r"warmup: must be a number of dense steps .* 'ramp:N' .* got "):
        mpicomp.Reducer("topk", comm=LocalWorld(1).transports[0], policy={"warmup": warmup})


@pytest.mark.parametrize(
    ("compressor", "warmup", "text"),
    [
        ("onebit", "ramp:8", "a ramp changes the ratio, which onebit does not have; use warmup=8"),
        ("signsgd", 8, "cannot take the place of those of signsgd"),
        ("lgc", 8, "cannot take the place of those of lgc, which begins by itself"),
    ],
    ids=str,
)
def test_what_it_does_not_fit_is_refused(compressor, warmup, text):
    with pytest.raises(ConfigurationError, match=text):
        mpicomp.Reducer(compressor, comm=LocalWorld(1).transports[0], policy={"warmup": warmup})
