"""Recorded plans are run again."""

import json
import tempfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import slow
from mpicomp.bench.replay import Replay
from worlds import Ranks

import mpicomp
from mpicomp.arrays import ArraySpec
from mpicomp.errors import ConfigurationError, DisagreementError
from mpicomp.reducer.bucket import make_buckets

SIZES = {"a": 700, "b": 300, "c": 2000, "d": 40}
CUT = 4 * 1000  # bytes: a and b share a bucket, c has its own, and so has d
PLANS = [
    (mpicomp.Dense(), "ring"),
    (mpicomp.TopK(ratio=0.1), "allgather"),
    (mpicomp.TopK(ratio=0.01, wire="bf16"), "star-topk:scatter-reduce"),
    (mpicomp.Dense(wire="bf16"), "scatter-reduce"),
    (mpicomp.TopK(ratio=0.02, layers={"b": 0.5}), "oktopk"),
]


def gradients(ranks, step):
    random = [np.random.default_rng((step, rank)) for rank in range(ranks)]
    return [
        {name: generator.laplace(size=size).astype(np.float32) for name, size in SIZES.items()} for generator in random
    ]


@pytest.fixture
def recorded(tmp_path):
    """Write what a run with another plan in every step and bucket would have, as --metrics does."""
    path = tmp_path / "metrics.jsonl"
    lines = []
    for step in range(len(PLANS)):
        buckets = []
        for place in range(3):
            compressor, collective = PLANS[(step + place) % len(PLANS)]
            world = Ranks(2, compressor, collective, bucket_bytes=CUT)
            world.reduce(gradients(2, step))
            buckets.append(world.reducers[0].last_step.to_json()["buckets"][place])
        lines.append(json.dumps({"step": step, "buckets": buckets}))
    path.write_text("\n".join(lines) + "\n")
    return path


def make(ranks, path, steps=None):
    """Make reducers, each with a policy of its own."""
    policies = [Replay(str(path), steps) for _ in range(ranks)]
    world = Ranks(1)
    world.world = type(world.world)(ranks, True)
    cut = policies[0].bucket_bytes
    world.reducers = [
        mpicomp.Reducer(policy=policy, comm=end, bucket_bytes=cut)
        for policy, end in zip(policies, world.world.transports, strict=True)
    ]
    return world


@pytest.mark.parametrize("ranks", [slow(1), slow(2), 3, slow(4)])
@pytest.mark.parametrize("steps", [None, 3, 5, 12])
def test_parts_of_the_recorded_run_have_their_share(recorded, ranks, steps):
    world = make(ranks, recorded, steps)
    total = steps or len(PLANS)
    for step in range(total + 2):
        given = gradients(ranks, step)
        before = {name: world.residual_sum(name) if step else 0.0 for name in SIZES}
        means = world.reduce(given)
        place = min(step * len(PLANS) // total, len(PLANS) - 1)
        expected = [PLANS[(place + bucket) % len(PLANS)] for bucket in range(3)]
        for reducer in world.reducers:
            ran = [(bucket.compressor, bucket.collective, bucket.reason) for bucket in reducer.last_step.buckets]
            assert ran == [(compressor.get_config(), name, f"replay: step {place}") for compressor, name in expected]
        for name in SIZES:
            assert all(np.array_equal(mean[name], means[0][name]) for mean in means)
            entered = sum(gradient[name].astype(float) for gradient in given) + before[name]
            left = ranks * means[0][name].astype(float) + world.residual_sum(name)
            np.testing.assert_allclose(left, entered, atol=1e-4)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=20), limit=st.integers(1, 100))
def test_any_arrays_are_cut_as_they_were(sizes, limit):
    members = [ArraySpec(str(number), "float32", (size,)) for number, size in enumerate(sizes)]

    def cut(limit_bytes):
        buckets = make_buckets(members, True, limit_bytes, mpicomp.Dense().entry, 1)
        return [[{"name": member.name, "numel": member.numel} for member in bucket.members] for bucket in buckets]

    there = cut(4 * limit)
    recorded = [{"layers": layers, "numel": sum(layer["numel"] for layer in layers)} for layers in there]
    line = json.dumps(
        {"buckets": [bucket | {"compressor": {"id": "dense"}, "collective": "ring"} for bucket in recorded]}
    )
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(line + "\n")
        file.flush()
        assert cut(Replay(file.name).bucket_bytes) == there


def test_other_buckets_are_refused(recorded):
    world = make(2, recorded)
    with pytest.raises(
        ConfigurationError, match="line 1 has buckets of 1,000, 2,000, 40 elements, here they are of 9 "
    ):
        world.reduce([{"a": np.ones(9, np.float32)}] * 2)
    renamed = [{name.upper(): array for name, array in gradient.items()} for gradient in gradients(2, 0)]
    with pytest.raises(ConfigurationError, match="or of other parameters; train the same model"):
        make(2, recorded).reduce(renamed)


def test_ranks_that_have_read_different_plans_do_not_start(recorded, tmp_path):
    world = make(2, recorded)
    other = tmp_path / "other.jsonl"
    first, *_, last = recorded.read_text().splitlines()
    other.write_text("\n".join([first] * 4 + [last]))
    end = world.world.transports[1]
    world.reducers[1] = mpicomp.Reducer(policy=Replay(str(other)), comm=end, bucket_bytes=CUT)
    with pytest.raises(DisagreementError, match="policy"):
        world.reduce(gradients(2, 0))


def test_restart_continues_the_plans(recorded):
    world, again = make(2, recorded), make(2, recorded)
    for step in range(2):
        world.reduce(gradients(2, step))
    for reducer, stopped in zip(again.reducers, world.reducers, strict=True):
        reducer.load_state_dict(stopped.state_dict())
    means = [each.reduce(gradients(2, 2))[0] for each in (world, again)]
    assert all(np.array_equal(means[0][name], means[1][name]) for name in SIZES)
    assert again.reducers[0].last_step.buckets[0].reason == "replay: step 2"


@pytest.mark.parametrize("content", ["", "{}", '{"step": 0}', '{"buckets": []}', "[1]", '{"buckets": [{}]}', "text"])
def test_file_without_plans_is_refused(tmp_path, content):
    path = tmp_path / "m.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=r"^replay: '.*m\.jsonl' must hold "):
        Replay(str(path))


def test_mismatched_settings_are_refused(recorded, tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Replay(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match="steps must be at least 1, got 0"):
        Replay(str(recorded), 0)
    with pytest.raises(ConfigurationError, match="name no compressor and no collective"):
        mpicomp.Reducer("topk", policy=Replay(str(recorded)), comm=Ranks(1).world.transports[0])
