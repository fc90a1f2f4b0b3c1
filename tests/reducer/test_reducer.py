import copy
import tracemalloc

import numpy as np
import pytest
from marks import once, slow
from worlds import Ranks

import mpicomp
from mpicomp.collectives import fitting
from mpicomp.errors import (
    ArrayTypeError,
    ClosedError,
    ConfigurationError,
    DisagreementError,
    NonFiniteError,
    UnknownNameError,
)
from mpicomp.mpi import Transport
from mpicomp.mpi.rounds import Group

COMPRESSORS = [mpicomp.Dense(), mpicomp.Dense(wire="bf16"), mpicomp.Dense(wire="fp16"), mpicomp.TopK(ratio=0.2)]
PAIRS = [(compressor, name) for compressor in COMPRESSORS for name in fitting(compressor)]
ONES = np.ones(10, np.float32)


def test_reducer_without_names_is_auto_and_dense_on_one_rank():
    ranks = Ranks(1)
    [reducer] = ranks.reducers
    assert reducer.policy.id == "auto"
    gradient = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    for _ in range(30):
        assert (ranks.reduce([{"w": gradient}])[0]["w"] == gradient).all()
    assert reducer.last_step.buckets[0].compressor == mpicomp.Dense().get_config()


@pytest.mark.parametrize("all_ranks", [False, True], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        (
            {"w": np.ones(10, np.int64)},
            ArrayTypeError,
            "'w' must be one of float16, bfloat16, float32, float64, got int64",
        ),
        ({"w": np.ones(10, bool)}, ArrayTypeError, "got bool"),
        ({"w": np.ones(10, complex)}, ArrayTypeError, "got complex128"),
        ({"w": [1.0, 2.0]}, ArrayTypeError, "'w' must be a NumPy, CuPy or torch array, got list"),
        ({3: ONES}, ArrayTypeError, "names must be strings, got 3"),
        ([ONES], ArrayTypeError, "a mapping from names to arrays is needed, got list"),
    ],
    ids=["integer", "bool", "complex", "list", "name", "no mapping"],
)
def test_wrong_arrays_raise_on_all_ranks(bad, error, text, steps_before, all_ranks):
    ranks = Ranks(3, mpicomp.TopK(ratio=0.2))
    for _ in range(steps_before):
        ranks.reduce([{"w": ONES}] * 3)
    before = ranks.residuals("w") if steps_before else None
    sent = [list(end.log) for end in ranks.world.transports]
    with pytest.raises(error, match=text) as caught:
        ranks.reduce([bad if all_ranks or rank == 1 else {"w": ONES} for rank in range(3)])
    assert "3 of 3 ranks raised" in caught.value.__notes__
    assert isinstance(caught.value, TypeError)
    assert ("(on rank 1)" in str(caught.value)) != all_ranks
    if steps_before:
        for old, new in zip(before, ranks.residuals("w"), strict=True):
            np.testing.assert_array_equal(old, new)
    assert sent is not None
    ranks.reduce([{"w": ONES}] * 3)  # and on it goes


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            {"w": np.ones(11, np.float32)},
            r"'w' must have the same shape on all ranks, got \[10\] on rank 0 and \[11\] on rank 2",
        ),
        ({"w": np.ones((10, 1), np.float32)}, r"got \[10\] on rank 0 and \[10, 1\] on rank 2"),
        ({"w": np.ones(10)}, "'w' must have the same dtype on all ranks, got float32 on rank 0 and float64 on rank 2"),
        ({"v": ONES}, "the same names; 'w' is on rank 0 but not on rank 2"),
        ({"w": ONES, "v": ONES}, "the same names; 'v' is on rank 2 but not on rank 0"),
        ({}, "the same names; 'w' is on rank 0 but not on rank 2"),
    ],
    ids=["length", "shape", "dtype", "name", "more", "none"],
)
@pytest.mark.parametrize(("compressor", "collective"), once(PAIRS, lambda case: case[0].id), ids=str)
def test_ranks_with_other_arrays_raise_the_same_error(compressor, collective, other, text, steps_before):
    ranks = Ranks(3, compressor, collective, feedback=False)
    for _ in range(steps_before):
        ranks.reduce([{"w": ONES}] * 3)
    with pytest.raises(DisagreementError, match=text) as caught:
        ranks.reduce([{"w": ONES}, {"w": ONES}, other])
    assert "3 of 3 ranks raised" in caught.value.__notes__
    means = ranks.reduce([{"w": ONES}] * 3)
    assert np.isfinite(means[0]["w"]).all()


@pytest.mark.parametrize("first", [{}, {"e": np.empty((0, 3), np.float32)}], ids=["no arrays", "no elements"])
def test_step_with_elements_follows_an_empty_one(first):
    ranks = Ranks(2, mpicomp.TopK(ratio=0.1))
    assert list(ranks.reduce([first] * 2)[0]) == list(first)
    with pytest.raises(DisagreementError, match="'w' is on rank 1 but not on rank 0"):
        ranks.reduce([first, {**first, "w": ONES}])
    with pytest.raises(ArrayTypeError, match="got int64"):
        ranks.reduce([first, {"w": np.ones(3, np.int64)}])
    assert ranks.reduce([{"w": ONES}] * 2)[0]["w"].tolist() == [1] + [0] * 9
    assert ranks.reduce([{}] * 2) == [{}, {}]
    assert ranks.reduce([{"w": 0 * ONES}] * 2)[0]["w"].tolist() == [0, 1] + [0] * 8


def test_no_data_moves_before_ranks_agree():
    ranks = Ranks(3)
    with pytest.raises(DisagreementError):
        ranks.reduce([{"w": ONES}, {"w": ONES}, {"w": np.ones(11, np.float32)}])
    for end in ranks.world.transports:
        # digests, lengths, and the texts that differ
        assert [entry.operation for entry in end.log] == ["allgatherv"] * 3


def test_order_of_names_matters_in_the_first_step_only():
    ranks = Ranks(2)
    with pytest.raises(DisagreementError, match="the same order on all ranks, got 'a' on rank 0 and 'b' on rank 1"):
        ranks.reduce([{"a": ONES, "b": ONES}, {"b": ONES, "a": ONES}])
    ranks.reduce([{"a": ONES, "b": 2 * ONES}] * 2)
    means = ranks.reduce([{"a": ONES, "b": 2 * ONES}, {"b": 2 * ONES, "a": ONES}])
    assert list(means[1]) == ["b", "a"]
    assert means[1]["b"][0] == 2
    assert not ranks.reducers[0].last_step.agreed


def test_residuals_of_missing_names_wait_for_them():
    ranks = Ranks(2, mpicomp.TopK(ratio=0.1), bucket_bytes=1)
    ranks.reduce([{"a": np.arange(10, dtype=np.float32)}] * 2)
    residual = ranks.residuals("a")[0]
    assert residual.any()
    ranks.reduce([{"b": ONES}] * 2)
    assert ranks.reducers[0].last_step.agreed
    np.testing.assert_array_equal(ranks.residuals("a")[0], residual)
    means = ranks.reduce([{"b": ONES, "a": np.zeros(10, np.float32)}] * 2)
    assert means[0]["a"].tolist() == [0] * 8 + [8, 0]
    with pytest.raises(
        ConfigurationError, match=r"residual of 'a' has shape \(10,\) and cannot be kept for shape \(5, 2\)"
    ):
        ranks.reduce([{"b": ONES, "a": np.zeros((5, 2), np.float32)}] * 2)


@pytest.mark.parametrize(("compressor", "collective"), once(PAIRS), ids=str)
@pytest.mark.parametrize(("bad", "bucket_bytes"), [(np.nan, 1), (np.inf, 1 << 20)])
def test_nonfinite_raise_and_skip_change_no_state(compressor, collective, bad, bucket_bytes):
    rng = np.random.default_rng(0)
    for policy in ("raise", "skip"):
        ranks = Ranks(3, compressor, collective, nonfinite=policy, bucket_bytes=bucket_bytes, feedback=True)
        good = [{"a": rng.normal(size=20).astype(np.float32), "b": rng.normal(size=30)} for _ in range(3)]
        ranks.reduce(good)
        before = {name: ranks.residuals(name) for name in "ab"}
        memories = [copy.deepcopy(reducer.state_dict()["memories"]) for reducer in ranks.reducers]
        poisoned = [{name: array.copy() for name, array in one.items()} for one in good]
        poisoned[2]["b"][7] = bad
        if policy == "raise":
            with pytest.raises(NonFiniteError, match="NaN or infinity on some rank at step 1") as caught:
                ranks.reduce(poisoned)
            assert "3 of 3 ranks raised" in caught.value.__notes__
        else:
            means = ranks.reduce(poisoned)
            assert all(not mean.any() for one in means for mean in one.values())
            assert ranks.reducers[0].last_step.skipped
        for name in "ab":
            for old, new in zip(before[name], ranks.residuals(name), strict=True):
                assert old.tobytes() == new.tobytes()
        np.testing.assert_equal([reducer.state_dict()["memories"] for reducer in ranks.reducers], memories)
        assert np.isfinite(ranks.reduce(good)[0]["b"]).all()


@pytest.mark.parametrize(("compressor", "collective"), PAIRS, ids=str)
def test_nonfinite_pass_delivers_and_keeps_residuals_clean(compressor, collective):
    ranks = Ranks(2, compressor, collective, nonfinite="pass", feedback=True)
    poisoned = np.ones(20, np.float32)
    poisoned[[3, 5, 7, 9, 11]] = [np.nan, np.inf, -np.inf, np.nan, np.nan]
    means = ranks.reduce([{"w": poisoned}, {"w": np.ones(20, np.float32)}])
    assert not np.isfinite(means[0]["w"]).all()
    assert all(np.isfinite(residual).all() for residual in ranks.residuals("w"))
    assert np.isfinite(ranks.reduce([{"w": np.ones(20, np.float32)}] * 2)[0]["w"]).all()


def test_means_are_read_only_and_stay_until_the_next_call():
    ranks = Ranks(1, mpicomp.TopK(ratio=0.5))
    for dtype in (np.float16, np.float32, np.float64):
        [mean] = ranks.reduce([{"w": np.ones(4, dtype)}])
        with pytest.raises(ValueError, match="read-only"):
            mean["w"][0] = 1


class Alone(Transport):
    """One rank, whose rounds allocate nothing."""

    group = Group(0, 1)

    def start(self, task):
        raise NotImplementedError

    def wait(self, pending):
        raise NotImplementedError

    def perform(self, task):
        if task.operation != "sendrecv":  # there is nobody to talk to
            task.recv[:] = task.send
        return task.recv


@pytest.mark.parametrize(("compressor", "collective"), [*once(PAIRS), (mpicomp.TopK(ratio=0.01), "allgather")], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, slow(np.float64)])
@pytest.mark.parametrize("strides", [1, slow(2)])
def test_no_allocation_in_the_steady_state(compressor, collective, dtype, strides):
    rng = np.random.default_rng(0)
    numel = 100_000
    reducer = mpicomp.Reducer(compressor, collective, comm=Alone())
    pool = [{"w": rng.normal(size=numel).astype(dtype)[::strides]} for _ in range(4)]
    for gradients in pool * 2:
        reducer.reduce(gradients)
    tracemalloc.start()
    try:
        for gradients in pool:
            reducer.reduce(gradients)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 50_000


@pytest.mark.parametrize(
    ("compressor", "collective", "most"),
    [
        (mpicomp.Dense(), "allreduce", 1),
        (mpicomp.Dense(), "ring", 1),  # and a part received, a quarter here
        (mpicomp.TopK(ratio=0.01), "allgather", 2),
        (mpicomp.TopK(ratio=0.01, wire="q4"), "allgather", 2),
        (mpicomp.SIDCo(ratio=0.01), "allgather", 2),
        (mpicomp.TopK(ratio=0.01), "star-topk", 2),
        (mpicomp.TopK(ratio=0.01), "oktopk", 2),
        (mpicomp.OneBit(), "two-phase", 2 + 2 / 4),  # the sum of the owned part, and what is delivered of it
        (mpicomp.Uniform(bits=4), "packed-allgather", 2),
    ],
    ids=str,
)
def test_bucket_keeps_two_arrays_and_messages(compressor, collective, most):
    """In copies of the gradient: the sum, the residual, and the mean where it cannot wait for the residual's memory."""
    ranks, numel, steps = 4, 100_000, 8
    settings = {"feedback_decay": 0.9} if compressor.feedback else {}
    rng = np.random.default_rng(0)
    gradients = [{"w": rng.normal(size=numel).astype(np.float32)} for _ in range(ranks)]
    tracemalloc.start()
    try:
        warmup = 2 if compressor.can_fall_back_to_dense else 0
        world = Ranks(ranks, compressor, collective, warmup=warmup, **settings)
        for _ in range(steps):
            world.reduce(gradients)
        held = sum(
            trace.size
            for trace in tracemalloc.take_snapshot().traces
            if trace.size >= 4096 and any(frame.filename.endswith("gpu/device.py") for frame in trace.traceback)
        )
    finally:
        tracemalloc.stop()
    messages = 0.3 if compressor.id in ("dense", "topk") else 0.8  # and candidates of a selection
    assert most <= held / (ranks * numel * 4) < most + messages


@pytest.mark.parametrize("compressor", [mpicomp.Dense(), mpicomp.TopK(ratio=0.2), mpicomp.OneBit()], ids=str)
def test_means_may_be_the_next_gradients(compressor):
    """Their memory is where the next sum is made, and other names have other places in it."""
    rng = np.random.default_rng(0)
    first, second = (Ranks(2, compressor) for _ in range(2))
    means = [{name: rng.normal(size=300).astype(np.float32) for name in "ab"} for _ in range(2)]
    copies = means
    for _ in range(4):
        means = first.reduce([{"a": mean["b"], "b": mean["a"]} for mean in means])
        copies = second.reduce([{"a": mean["b"].copy(), "b": mean["a"].copy()} for mean in copies])
        for mean, copied in zip(means, copies, strict=True):
            assert all(mean[name].tobytes() == copied[name].tobytes() for name in "ab")


def test_state_dict_resumes_bit_for_bit():
    rng = np.random.default_rng(0)
    pool = [
        [{"a": rng.normal(size=(5, 8)), "b": rng.normal(size=9).astype(np.float32)} for _ in range(3)] for _ in range(8)
    ]
    first = Ranks(3, mpicomp.TopK(ratio=0.1), "star-topk")
    for gradients in pool[:4]:
        first.reduce(gradients)
    states = [reducer.state_dict() for reducer in first.reducers]
    second = Ranks(3, mpicomp.TopK(ratio=0.1), "star-topk")
    third = Ranks(3, mpicomp.TopK(ratio=0.1), "star-topk")
    third.reduce(pool[7])  # loading replaces what is there
    for other in (second, third):
        for reducer, state in zip(other.reducers, states, strict=True):
            reducer.load_state_dict(state)
    for gradients in pool[4:]:
        expected = {name: mean.copy() for name, mean in first.reduce(gradients)[0].items()}
        for other in (second, third):
            means = other.reduce(gradients)[0]
            assert all(means[name].tobytes() == expected[name].tobytes() for name in expected)


def test_load_state_dict_refuses_other_objects():
    ranks = Ranks(1, mpicomp.TopK(ratio=0.5))
    ranks.reduce([{"w": np.array([1, 2], np.float32)}])
    for state in ({}, {"schema": 99, "residuals": {}}, None, {"schema": 1}):
        with pytest.raises(ConfigurationError, match="nothing was loaded"):
            ranks.reducers[0].load_state_dict(state)
    state = ranks.reducers[0].state_dict()
    state["residuals"]["w"] = np.zeros(3, np.float32)
    with pytest.raises(ConfigurationError, match=r"'w' has shape \(3,\)"):
        ranks.reducers[0].load_state_dict(state)
    assert ranks.residuals("w")[0].tolist() == [1, 0]


def test_residual_of_an_unknown_name_raises():
    ranks = Ranks(1)
    ranks.reduce([{"weight": ONES}])
    with pytest.raises(UnknownNameError, match="residual: unknown name 'wieght'; did you mean 'weight'"):
        ranks.reducers[0].residual("wieght")


def test_closed_reducer_raises():
    [reducer] = Ranks(1).reducers
    reducer.close()
    reducer.close()
    with pytest.raises(ClosedError, match="make a new one"):
        next(reducer.rounds({"w": ONES}))


def test_record_explains_the_step():
    ranks = Ranks(4, mpicomp.TopK(ratio=0.1), bucket_bytes=400)
    ranks.reduce([{"a": np.arange(100, dtype=np.float32), "b": ONES}] * 4, lr=0.5)
    record = ranks.reducers[0].last_step
    assert (record.step, record.lr, record.agreed, record.skipped) == (0, 0.5, True, False)
    assert [bucket.numel for bucket in record.buckets] == [100, 10]
    first = record.buckets[0]
    assert first.compressor == mpicomp.TopK(ratio=0.1).get_config()
    assert (first.collective, first.ratio, first.ratio_reached) == ("allgather", 0.1, 0.1)
    assert first.reason
    assert first.sent_bytes == 24 + 10 * 8
    assert first.wire_bytes == 3 * first.sent_bytes
    assert first.dense_wire_bytes == 2 * 3 / 4 * 400
    np.testing.assert_allclose(first.gain, np.sum(np.arange(90, 100) ** 2) / np.sum(np.arange(100) ** 2))
    assert record.sent_bytes == sum(bucket.sent_bytes for bucket in record.buckets) + record.overhead_bytes
    ranks.reduce([{"a": np.zeros(100, np.float32), "b": ONES}] * 4)
    again = ranks.reducers[0].last_step
    assert not again.agreed
    assert again.overhead_bytes == 0
    assert set(again.phases_s) == {"compress", "exchange", "decode", "other"}
