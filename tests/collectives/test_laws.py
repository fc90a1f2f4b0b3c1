"""The laws that every scheme obeys, among ranks inside one process."""

import numpy as np
import pytest
from lockstep import gradients, run
from marks import once, slow
from schemes import Above, everywhere, pairs

import mpicomp
from mpicomp.collectives import variants
from mpicomp.testing.collective_laws import Outcome, check_bytes, check_sums

UNTOLD = {"signsgd"}
"""Compressors whose gain is not known: no magnitudes travel."""

MANY = [8, slow(16), slow(33), slow(64)]
"""Each collective among so many with some compressors: what depends on the number of ranks is the collective's."""

SUMS = [(1, True), (2, True), (3, True), (3, False)]
"""Numbers of ranks, and whether an Allreduce gives all of them the same bits."""
SOME_SUMS = [(3, True), (3, False)]

CASE = ("compressor", "collective", "ranks", "identical_sums")
PAIR = ("compressor", "collective")
AMONG_MANY = pairs(
    [
        mpicomp.Dense(),
        mpicomp.Dense(wire="bf16"),
        mpicomp.TopK(ratio=0.05),
        mpicomp.RandomK(ratio=0.05),
        mpicomp.OneBit(),
        mpicomp.SignSGD(),
        mpicomp.PowerSGD(rank=1),
        mpicomp.LGC(ratio=0.3, encoder=(2,), decoder=(2,), passes=1, dense_steps=0, training_steps=3),
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
        mpicomp.GlobalRandKMaxNorm(ratio=0.1),
        Above(limit=1e30),
    ]
)


LENGTHS = (1, 2, 7, 1001)
WIDTHS = [np.float32, slow(np.float64)]  # the kits have each compressor and float64 in every run


def check_laws(compressor, collective, ranks, dtype, numel, **settings):
    arrays = gradients(ranks, numel, dtype, seed=numel)
    results, transports, scheme, after, _ = run(compressor, collective, arrays, step=numel, **settings)
    check_sums(f"{numel} elements", Outcome(scheme, transports, results, arrays, after))
    assert np.isnan(results[0].gain) == (compressor.id in UNTOLD)
    moves = compressor.message == "sparse" and not compressor.shares_positions  # arrays, inside a host
    if not (moves and collective.startswith("hierarchical")):
        np.testing.assert_array_equal(after, arrays)


@pytest.mark.parametrize(CASE, everywhere([(3, True)], SUMS), ids=str)
@pytest.mark.parametrize("dtype", WIDTHS)
def test_nothing_is_lost_and_ranks_hold_the_same_bits(compressor, collective, ranks, identical_sums, dtype):
    for numel in LENGTHS:
        check_laws(compressor, collective, ranks, dtype, numel, identical_sums=identical_sums)


@pytest.mark.parametrize("ranks", MANY)
@pytest.mark.parametrize(PAIR, AMONG_MANY, ids=str)
@pytest.mark.parametrize("dtype", WIDTHS)
def test_nothing_is_lost_among_many_ranks(compressor, collective, ranks, dtype):
    for numel in LENGTHS:
        check_laws(compressor, collective, ranks, dtype, numel)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(PAIR, ON_HOSTS, ids=str)
@pytest.mark.parametrize("dtype", WIDTHS)
def test_nothing_is_lost_on_hosts(compressor, collective, layout, dtype):
    for numel in LENGTHS:
        check_laws(compressor, collective, len(layout), dtype, numel, hosts=layout)


def check_flags(compressor, collective, ranks, numel, **settings):
    """Check that all ranks learn of a rank that asks for an agreement, and of one with a bad number."""
    for culprit in range(ranks):
        arrays = gradients(ranks, numel, np.float32)
        for result in run(compressor, collective, arrays, stale=[culprit], **settings).results:
            assert (result.stale, result.nonfinite) == (True, False)
        arrays[culprit][2 * numel // 3] = (np.nan, -np.inf, np.inf)[culprit % 3]
        for result in run(compressor, collective, arrays, **settings).results:
            assert (result.stale, result.nonfinite) == (False, True)


@pytest.mark.parametrize(CASE, everywhere([(3, True)], SOME_SUMS), ids=str)
def test_flags_of_one_rank_reach_all(compressor, collective, ranks, identical_sums):
    check_flags(compressor, collective, ranks, 50, identical_sums=identical_sums)


@pytest.mark.parametrize("layout", [UNEVEN[0], slow(UNEVEN[1])], ids=str)
@pytest.mark.parametrize(PAIR, once(ON_HOSTS), ids=str)
def test_flags_of_one_rank_on_hosts_reach_all(compressor, collective, layout):
    for numel in (1, 50):
        check_flags(compressor, collective, len(layout), numel, hosts=layout)


def check_second_bytes(compressor, collective, ranks, **settings):
    """Check the second exchange of a bucket: the first one may ask for more."""
    arrays, memories = gradients(ranks, 1001, np.float32), [{} for _ in range(ranks)]
    for _ in range(2):
        results, transports, scheme, after, _ = run(
            compressor, collective, arrays, step=2, memories=memories, **settings
        )
    check_bytes(collective, Outcome(scheme, transports, results, arrays, after), step=2)


@pytest.mark.parametrize(CASE, everywhere([(3, True)], SOME_SUMS), ids=str)
def test_bytes_executed_are_those_of_rounds(compressor, collective, ranks, identical_sums):
    check_second_bytes(compressor, collective, ranks, identical_sums=identical_sums)


@pytest.mark.parametrize("layout", UNEVEN, ids=str)
@pytest.mark.parametrize(PAIR, ON_HOSTS, ids=str)
def test_bytes_on_hosts_are_those_of_rounds(compressor, collective, layout):
    check_second_bytes(compressor, collective, len(layout), hosts=layout)
