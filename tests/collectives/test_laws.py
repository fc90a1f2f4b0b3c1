"""The laws that every scheme obeys, among ranks inside one process."""

import numpy as np
import oracle
import pytest
from lockstep import dense, gradients, run
from marks import once, slow
from schemes import Above, everywhere, pairs

import mpicomp
from mpicomp.collectives import variants
from mpicomp.transport import LocalWorld

BY_VALUE = {"var-topk", "oktopk", "parameter-server"}
"""Collectives in which the values decide who sends, or how much."""

UNTOLD = {"signsgd", "fetchsgd"}
"""Compressors whose gain cannot be told: no magnitudes travel, or what is delivered is of earlier steps, too."""

RANKS = [1, 2, 3, 4, 5]
MANY = [8, slow(16), slow(33), slow(64)]
"""Each collective among so many with some compressors: what depends on the number of ranks is the collective's."""

SUMS = [(1, True), (2, True), (3, True), (3, False)]
"""Numbers of ranks, and whether an Allreduce gives all of them the same bits."""
MORE_SUMS = [(4, True), (5, True), (2, False), (5, False)]
SOME_SUMS = [(1, True), (3, True), (3, False)]
OTHER_SUMS = [(2, True), (4, True)]

CASE = ("compressor", "collective", "ranks", "identical_sums")
BAD = [(np.nan, 3), (-np.inf, 2)]
MORE_BAD = [(np.nan, 1), (np.nan, 2), (np.nan, 4), (np.inf, 3)]
AMONG_MANY = pairs(
    [
        mpicomp.Dense(),
        mpicomp.Dense(wire="bf16"),
        mpicomp.TopK(ratio=0.05),
        mpicomp.RandomK(ratio=0.05),
        mpicomp.OneBit(),
        mpicomp.MaxNorm(bits=[6, 10]),
        mpicomp.SignSGD(),
        mpicomp.PowerSGD(rank=1),
        mpicomp.CountSketch(ratio=0.02),
        mpicomp.FetchSGD(ratio=0.02),
        mpicomp.LGC(ratio=0.3, code="linear", dense_steps=0, training_steps=3),
        Above(1.5),
    ]
)
UNEVEN = [[0, 0, 0, 1, 1], [0, 1, 0, 2, 1, 0, 0, 2]]
LAYOUTS = [[0, 1, 2], [0, 0, 1, 1], [0, 0, 0, 1, 1], slow([0, 0, 0]), slow([0, 1, 0, 2, 1, 0, 0, 2])]


def hierarchies(compressors):
    """Every compressor with everything that slices of it may be carried by."""
    names = [(c, name) for c in compressors for name in variants(c)]
    return [(c, name) for c, name in names if "hierarchical" in name and name.count(":") < 3]


ON_HOSTS = hierarchies(
    [
        mpicomp.Dense(),
        mpicomp.Dense(wire="bf16"),
        mpicomp.TopK(ratio=0.5, wire="fp16"),
        mpicomp.SIDCo(ratio=0.05),
        mpicomp.RandomK(ratio=0.05),
        mpicomp.OneBit(block=64),
        mpicomp.MaxNorm(bits=[4, 8]),
        mpicomp.GlobalRandKMaxNorm(ratio=0.1),
        Above(limit=1e30),
    ]
)


WIDTHS = [np.float32, slow(np.float64)]  # the kits have each compressor and float64 in every run


def check_laws(compressor, collective, ranks, dtype, numel, **settings):
    arrays = gradients(ranks, numel, dtype, seed=numel)
    results, _, _, after = run(compressor, collective, arrays, step=numel, **settings)
    first = results[0]
    for result in results:
        assert result.mean.tobytes() == first.mean.tobytes()
        assert result.gain == first.gain or compressor.id in UNTOLD
        assert (result.kept, result.energy) == (first.kept, first.energy)
        assert not result.nonfinite
        assert not result.stale
    sent = [dense(result.sent, numel) for result in results]
    scale = np.sum(np.abs(arrays), axis=0).max()
    atol = 4 * ranks * np.finfo(dtype).eps * scale
    np.testing.assert_allclose(np.sum(sent, axis=0), ranks * first.mean.astype(np.float64), rtol=0, atol=atol)
    if collective.startswith("hierarchical") and compressor.message == "sparse":  # arrays move inside a host
        np.testing.assert_allclose(np.sum(after, axis=0), np.sum(arrays, axis=0), rtol=0, atol=atol)
    else:
        np.testing.assert_array_equal(after, arrays)
    lost = sum(np.sum((array - part) ** 2) for array, part in zip(np.float64(after), sent, strict=True))
    energy = np.sum(np.square(np.float64(after)))
    if compressor.id in UNTOLD:
        assert np.isnan(first.gain)
    else:
        np.testing.assert_allclose(first.gain, 1 - lost / energy, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(first.energy, energy, rtol=1e-5)


@pytest.mark.parametrize(
    ("compressor", "collective", "ranks", "identical_sums"), everywhere([(3, True)], SUMS, MORE_SUMS), ids=str
)
@pytest.mark.parametrize("dtype", WIDTHS)
def test_nothing_is_lost_and_all_ranks_hold_the_same_bits(compressor, collective, ranks, identical_sums, dtype):
    for numel in (1, 2, 7, 1001):
        check_laws(compressor, collective, ranks, dtype, numel, identical_sums=identical_sums)


@pytest.mark.parametrize("ranks", MANY)
@pytest.mark.parametrize(("compressor", "collective"), AMONG_MANY, ids=str)
@pytest.mark.parametrize("dtype", WIDTHS)
def test_the_same_among_many(compressor, collective, ranks, dtype):
    for numel in (1, 2, 7, 1001):
        check_laws(compressor, collective, ranks, dtype, numel)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("compressor", "collective"), ON_HOSTS, ids=str)
@pytest.mark.parametrize("dtype", WIDTHS)
def test_the_same_on_hosts(compressor, collective, layout, dtype):
    for numel in (1, 2, 7, 1001):
        check_laws(compressor, collective, len(layout), dtype, numel, hosts=layout)


@pytest.mark.parametrize("layout", UNEVEN, ids=str)
@pytest.mark.parametrize(("compressor", "collective"), once(ON_HOSTS), ids=str)
def test_flags_of_one_rank_on_hosts(compressor, collective, layout):
    for numel in (1, 50):
        for culprit in range(len(layout)):
            arrays = gradients(len(layout), numel, np.float32)
            results = run(compressor, collective, arrays, stale=[culprit], hosts=layout).results
            assert all(result.stale for result in results)
            assert not any(result.nonfinite for result in results)
            arrays[culprit][numel // 2] = np.inf
            results = run(compressor, collective, arrays, hosts=layout).results
            assert all(result.nonfinite for result in results)
            assert not any(result.stale for result in results)


@pytest.mark.parametrize("layout", UNEVEN, ids=str)
@pytest.mark.parametrize(("compressor", "collective"), ON_HOSTS, ids=str)
def test_bytes_on_hosts_are_those_of_rounds(compressor, collective, layout):
    check_bytes(compressor, collective, gradients(len(layout), 1001, np.float32), hosts=layout)


@pytest.mark.parametrize(
    ("compressor", "collective", "ranks", "identical_sums"),
    everywhere([(3, True)], SOME_SUMS, [(2, True), *MORE_SUMS]),
    ids=str,
)
def test_bytes_executed_are_those_of_rounds(compressor, collective, ranks, identical_sums):
    check_bytes(compressor, collective, gradients(ranks, 1001, np.float32), identical_sums=identical_sums)


def check_bytes(compressor, collective, arrays, **settings):
    numel = arrays[0].size
    memories = [{} for _ in arrays]
    for _ in range(2):  # the first exchange of a bucket may ask for more
        _, transports, scheme, _ = run(compressor, collective, arrays, step=2, memories=memories, **settings)
    by_value = compressor.message == "sparse" and not BY_VALUE.isdisjoint(collective.split(":"))
    fixed = compressor.message != "sparse" or compressor.count(numel) is not None
    for transport in transports:
        expected = scheme.rounds(numel, np.dtype(np.float32), transport.group, step=2)
        assert [entry.operation for entry in transport.log] == [task.operation for task in expected]
        if fixed and not by_value:
            for what in ("sent_bytes", "wire_bytes"):
                assert [getattr(entry, what) for entry in transport.log] == [
                    getattr(task, what)(transport.group.part(task.group)) for task in expected
                ]


@pytest.mark.parametrize(
    ("compressor", "collective", "bad", "ranks"), everywhere([(np.nan, 3)], BAD, MORE_BAD), ids=str
)
def test_one_bad_rank_is_seen_by_all(compressor, collective, ranks, bad):
    for culprit in range(ranks):
        arrays = gradients(ranks, 50, np.float32)
        arrays[culprit][33] = bad
        results, *_ = run(compressor, collective, arrays)
        assert all(result.nonfinite for result in results)


@pytest.mark.parametrize(
    ("compressor", "collective", "ranks", "identical_sums"), everywhere([(3, True)], SOME_SUMS, OTHER_SUMS), ids=str
)
def test_one_stale_rank_is_heard_by_all(compressor, collective, ranks, identical_sums):
    for culprit in range(ranks):
        arrays = gradients(ranks, 50, np.float32)
        results, *_ = run(compressor, collective, arrays, identical_sums=identical_sums, stale=[culprit])
        assert all(result.stale for result in results)
        assert not any(result.nonfinite for result in results)


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("collective", ["allgather", "star-topk"])
def test_topk_with_feedback_is_what_the_oracle_says(ranks, collective):
    rng = np.random.default_rng(ranks)
    numel, ratio = 200, 0.05
    world = LocalWorld(ranks)
    reducers = [mpicomp.Reducer(mpicomp.TopK(ratio=ratio), collective, comm=end) for end in world.transports]
    residuals = [np.zeros(numel) for _ in range(ranks)]
    for step in range(2 * ranks + 3):
        arrays = [rng.laplace(size=numel).astype(np.float64) for _ in range(ranks)]
        if collective == "allgather":
            mean, residuals = oracle.topk_step(arrays, residuals, ratio)
        else:
            mean, residuals = oracle.star_topk_step(arrays, residuals, ratio, step)
        means = world.run([r.rounds({"w": a}) for r, a in zip(reducers, arrays, strict=True)])
        np.testing.assert_allclose(means[0]["w"], mean, rtol=1e-12, atol=1e-14)
        for reducer, residual in zip(reducers, residuals, strict=True):
            np.testing.assert_allclose(reducer.residual("w"), residual, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("collective", ["allreduce", "scatter-reduce"])
@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_sixteen_bits_round_exactly_twice(ranks, collective, wire):
    """Every value of a constant array that 16 bits can hold comes through unharmed, whatever the number of ranks."""
    arrays = [np.full(37, 2.0**rank, np.float32) for rank in range(ranks)]
    results, *_ = run(mpicomp.Dense(wire=wire), collective, arrays)
    bits = 11 if wire == "fp16" else 8
    expected = sum(2.0**rank for rank in range(ranks)) / ranks
    step = 2.0 ** (np.floor(np.log2(expected)) - bits + 1)
    np.testing.assert_array_equal(results[0].mean, np.float32(np.round(np.float32(expected) / step) * step))
