"""The laws that every scheme obeys, among ranks inside one process."""

import numpy as np
import pytest
from lockstep import gradients, run
from marks import once, slow
from schemes import Above

import mpicomp
from mpicomp.collectives import variants
from mpicomp.testing import pairs
from mpicomp.testing.collective_laws import check_bytes, check_sums

LEARNED = {"ratio": 0.3, "encoder": (2,), "decoder": (2,), "passes": 1, "dense_steps": 0, "training_steps": 3}
KINDS = [
    mpicomp.Dense(),
    mpicomp.Dense(wire="bf16"),
    mpicomp.TopK(ratio=0.05),
    mpicomp.TopK(ratio=0.5, wire="fp16", indices="elias-fano"),
    mpicomp.TopK(ratio=0.5, wire="q4"),
    mpicomp.SIDCo(ratio=0.05),  # of another length at every step
    Above(limit=1.5),  # that selects nothing on some ranks
    mpicomp.RandomK(ratio=0.05),
    mpicomp.GlobalRandKMaxNorm(ratio=0.3),
    mpicomp.OneBit(block=64),
    mpicomp.SignSGD(scale=0.01),
    mpicomp.PowerSGD(rank=1),
    mpicomp.LGC(**LEARNED),
    mpicomp.LGC(**LEARNED, instance="server"),
]
UNTOLD = {"signsgd"}
"""Compressors whose gain is not known: no magnitudes travel."""


def kind_of(case):
    """Return what decides the rounds of a case, and the form of its messages; ratios and settings do not."""
    compressor, collective = case
    kind = compressor.message, compressor.shares_positions, getattr(compressor, "instance", "")
    return collective, *kind, getattr(compressor, "wire", None) is None, isinstance(compressor, Above)


CASES = once(pairs(KINDS), kind_of)
SLICED = [(kind, name) for kind in KINDS for name in variants(kind) if "hierarchical:" in name and name.count(":") == 1]
ON_HOSTS = once(SLICED, lambda case: (case[1], case[0].message))
FLAT = [{"ranks": 1}, {"ranks": 2}, {"ranks": 3}, {"ranks": 3, "identical_sums": False}, {"ranks": 8}]
FLAT += [slow({"ranks": 16}), slow({"ranks": 33}), slow({"ranks": 64})]
LAYOUTS = [[0, 1, 2], [0, 0, 1, 1], [0, 0, 0, 1, 1], slow([0, 0, 0]), slow([0, 1, 0, 2, 1, 0, 0, 2])]
ON_CASE, ON_SLICES = (
    pytest.mark.parametrize(("compressor", "collective"), cases, ids=str) for cases in (CASES, ON_HOSTS)
)
DTYPES = pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])  # the kits have float64 in every run


def check_laws(compressor, collective, ranks, dtype, **settings):
    for numel in (1, 2, 7, 1001):
        arrays = gradients(ranks, numel, dtype, seed=numel)
        outcome = run(compressor, collective, arrays, step=numel, **settings)
        check_sums(f"{numel} elements", outcome)
        assert np.isnan(outcome.results[0].gain) == (compressor.id in UNTOLD)
        moves = compressor.message == "sparse" and not compressor.shares_positions  # arrays, inside a host
        if not (moves and collective.startswith("hierarchical")):
            np.testing.assert_array_equal(outcome.after, arrays)


def check_flags(compressor, collective, ranks, **settings):
    """Check that all ranks learn of a rank that asks for an agreement, and of one with a bad number."""
    for numel in (1, 50):
        for culprit in range(ranks):
            arrays = gradients(ranks, numel, np.float32)
            for result in run(compressor, collective, arrays, stale=[culprit], **settings).results:
                assert (result.stale, result.nonfinite) == (True, False)
            arrays[culprit][2 * numel // 3] = (np.nan, -np.inf, np.inf)[culprit % 3]
            for result in run(compressor, collective, arrays, **settings).results:
                assert (result.stale, result.nonfinite) == (False, True)


def check_second_bytes(compressor, collective, ranks, **settings):
    """Check the second exchange of a bucket: the first one may ask for more."""
    arrays, memories = gradients(ranks, 1001, np.float32), [{} for _ in range(ranks)]
    for _ in range(2):
        outcome = run(compressor, collective, arrays, step=2, memories=memories, **settings)
    check_bytes(collective, outcome, step=2)


@ON_CASE
@DTYPES
@pytest.mark.parametrize("world", FLAT, ids=str)
def test_nothing_is_lost_and_ranks_hold_the_same_bits(compressor, collective, world, dtype):
    check_laws(compressor, collective, dtype=dtype, **world)


@ON_SLICES
@DTYPES
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_nothing_is_lost_on_hosts(compressor, collective, layout, dtype):
    check_laws(compressor, collective, len(layout), dtype, hosts=layout)


@ON_CASE
@pytest.mark.parametrize("check", [check_flags, check_second_bytes])
@pytest.mark.parametrize("identical_sums", [True, False])
def test_flags_reach_all_and_bytes_are_those_of_rounds(compressor, collective, check, identical_sums):
    check(compressor, collective, 3, identical_sums=identical_sums)


@ON_SLICES
@pytest.mark.parametrize("check", [check_flags, check_second_bytes])
@pytest.mark.parametrize("layout", [[0, 0, 0, 1, 1], slow([0, 1, 0, 2, 1, 0, 0, 2])], ids=str)
def test_flags_and_bytes_on_hosts(compressor, collective, check, layout):
    check(compressor, collective, len(layout), hosts=layout)
