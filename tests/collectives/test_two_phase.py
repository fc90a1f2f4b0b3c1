"""Packed arrays in two phases, and what their residuals come to."""

import numpy as np
import oracle
import pytest
from lockstep import gradients, run
from networks import Link
from worlds import Ranks

import mpicomp
from mpicomp.collectives import bind
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.rounds import Group

HEADER = 24  # bytes


def test_owner_keeps_nothing_but_the_second_error():
    """What is packed exactly by the owner leaves nothing with it, however badly others have packed theirs."""
    ranks, numel = 4, 256
    rng = np.random.default_rng(1)
    arrays = [rng.laplace(size=numel) for _ in range(ranks)]
    owned = slice(64, 128)
    # Rank 1 has just what makes its part of the mean one magnitude.
    others = sum(oracle.scaled_signs(array[owned], 64) for rank, array in enumerate(arrays) if rank != 1)
    arrays[1][owned] = 8 * np.where(rng.random(64) < 0.5, -1, 1) - others
    outcome = run(mpicomp.OneBit(), "two-phase", arrays)
    np.testing.assert_allclose(outcome.results[0].mean[owned], (arrays[1][owned] + others) / 4, rtol=1e-6)
    np.testing.assert_allclose(outcome.results[1].sent[owned], arrays[1][owned], atol=1e-6)
    assert np.abs(outcome.results[0].sent[owned] - arrays[0][owned]).max() > 0.1


def tasks_of(collective, numel, ranks):
    scheme = bind(mpicomp.OneBit(), collective)
    return [
        (scheme.rounds(numel, np.dtype(np.float32), Group(rank, ranks)), Group(rank, ranks)) for rank in range(ranks)
    ]


@pytest.mark.parametrize(("numel", "ranks"), [(1_000_000, 8), (1000, 3), (2, 5)])
def test_two_phase_sends_two_bits_an_element(numel, ranks):
    parts = [numel // ranks + (rank < numel % ranks) for rank in range(ranks)]
    counts = [HEADER + mpicomp.OneBit().packed_bytes(part) for part in parts]
    for tasks, group in tasks_of("two-phase", numel, ranks):
        assert [(task.operation, list(task.counts)) for task in tasks] == [
            ("alltoallv", counts),
            ("allgatherv", counts),
        ]
        size = counts[group.rank]
        assert [task.sent_bytes(group) for task in tasks] == [sum(counts) - size, size]
        assert numel < 10_000 or sum(task.wire_bytes(group) for task in tasks) / numel < 1.05 * 2 / 8


def test_auto_takes_the_fewest_bytes_at_many_ranks():
    world, array = LocalWorld(16, True, 16, Link(50e-6, 1e9)), np.ones(100_000, np.float32)
    reducers = [mpicomp.Reducer("onebit", policy={"warmup": 0}, comm=end) for end in world.transports]
    for _ in range(3):
        world.run([reducer.rounds({"w": array}) for reducer in reducers])
    assert reducers[0].last_step.buckets[0].collective == "two-phase"


@pytest.mark.parametrize(("dtype", "largest"), [(np.float32, 1e30), (np.float64, 1e300)])
def test_squares_that_overflow_leave_finite_residuals(dtype, largest):
    world = Ranks(2, "onebit", "two-phase")
    mean = world.reduce([{"w": np.array([largest, -1.0, 2.0], dtype)}] * 2)[0]["w"]
    assert np.isfinite(mean).all()
    assert np.isfinite(world.residuals("w")).all()


@pytest.mark.parametrize("collective", ["two-phase", "packed-allgather"])
@pytest.mark.parametrize(
    "compressor",
    [
        mpicomp.OneBit(block=64),
        mpicomp.OneBit(block=None),
        mpicomp.OneBit(bits=2),
        mpicomp.QSGD(rounding="nearest", bucket=64),
        mpicomp.Uniform(bits=4),
    ],
    ids=str,
)
@pytest.mark.parametrize(("ranks", "numel"), [(1, 7), (2, 65), (3, 1), (4, 1000), (2, 140_001)])
def test_residual_in_place_is_that_of_what_was_sent(collective, compressor, ranks, numel):
    arrays, residuals = gradients(ranks, numel, np.float32), gradients(ranks, numel, np.float32, seed=1)
    outcome = run(compressor, collective, arrays, residuals=residuals)
    in_place = run(compressor, collective, arrays, residuals=residuals, in_place=True)
    assert {one.holds for one in in_place.inputs} == {"residual" if compressor.packs_in_place else "sum"}
    for expected, result, whole, left in zip(
        outcome.results, in_place.results, outcome.after, in_place.after, strict=True
    ):
        assert result.mean.tobytes() == expected.mean.tobytes()
        if compressor.packs_in_place:
            assert left.tobytes() == (whole - expected.sent).tobytes()
        assert (result.energy, result.nonfinite) == (expected.energy, False)
        assert result.gain == pytest.approx(expected.gain, abs=1e-6)
