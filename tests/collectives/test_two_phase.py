"""Packed arrays in two phases, and what their residuals come to."""

import itertools

import numpy as np
import oracle
import pytest
from lockstep import gradients, run
from marks import once
from networks import Link
from schemes import OWN
from worlds import Ranks

import mpicomp
from mpicomp import Dense, Sparsifier
from mpicomp.collectives import bind, fitting
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


@pytest.mark.parametrize(("numel", "ranks"), [(1_000_000, 8), (1000, 3), (2, 5)])
def test_two_phase_sends_two_bits_an_element(numel, ranks):
    compressor = mpicomp.OneBit()
    scheme = bind(compressor, "two-phase")
    parts = [numel // ranks + (rank < numel % ranks) for rank in range(ranks)]
    counts = [HEADER + compressor.packed_bytes(part) for part in parts]
    for rank in range(ranks):
        group = Group(rank, ranks)
        tasks = scheme.rounds(numel, np.dtype(np.float32), group)
        assert [task.operation for task in tasks] == ["alltoallv", "allgatherv"]
        assert [list(task.counts) for task in tasks] == [counts, counts]
        assert [task.sent_bytes(group) for task in tasks] == [sum(counts) - counts[rank], counts[rank]]
        if numel > 10_000:
            assert sum(task.wire_bytes(group) for task in tasks) / numel < 1.05 * 2 / 8


def received_bytes(tasks, group):
    scatter, gather = (np.array(task.counts) for task in tasks)
    return int((group.size - 1) * scatter[group.rank] + gather.sum() - gather[group.rank])


def test_bytes_of_a_rank_hardly_grow_with_ranks():
    """A rank's part of each of the others, and the others' parts: at most twice the message; all messages otherwise."""
    of_ranks = {}
    for collective, ranks in itertools.product(("two-phase", "packed-allgather"), (2, 64)):
        scheme, groups = bind(mpicomp.OneBit(), collective), [Group(rank, ranks) for rank in range(ranks)]
        tasks = [scheme.rounds(3_000_000, np.dtype(np.float32), group) for group in groups]
        if collective == "two-phase":
            of_ranks[ranks] = max(map(received_bytes, tasks, groups))
            assert max(sum(t.sent_bytes(g) for t in ts) for ts, g in zip(tasks, groups, strict=True)) < 400_000
        else:
            of_ranks[-ranks] = (ranks - 1) * tasks[0][0].counts[0]
    assert of_ranks[64] < 2.2 * of_ranks[2]
    assert of_ranks[-64] == 63 * of_ranks[-2]


def test_many_ranks_lose_nothing_over_steps():
    """Of both packings' errors nothing is lost: what ranks had is what they got and what they keep."""
    ranks, numel = 64, 6400
    had, got, residuals = np.zeros(numel), np.zeros(numel), None
    for step in range(3):
        arrays = gradients(ranks, numel, np.float64, seed=step)
        outcome = run(mpicomp.OneBit(block=64), "two-phase", arrays, residuals=residuals)
        had += np.sum(arrays, axis=0)
        got += ranks * outcome.results[0].mean
        assert len({result.mean.tobytes() for result in outcome.results}) == 1
        residuals = [whole - result.sent for whole, result in zip(outcome.accumulated, outcome.results, strict=True)]
        np.testing.assert_allclose(got + np.sum(residuals, axis=0), had, atol=1e-9)
    assert np.abs(residuals).max() > 0.1


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
    assert set(in_place.holds) == {"residual" if compressor.packs_in_place else "sum"}
    for expected, result, whole, left in zip(
        outcome.results, in_place.results, outcome.accumulated, in_place.accumulated, strict=True
    ):
        assert result.mean.tobytes() == expected.mean.tobytes()
        if compressor.packs_in_place:
            assert left.tobytes() == (whole - expected.sent).tobytes()
        assert (result.energy, result.nonfinite) == (expected.energy, False)
        assert result.gain == pytest.approx(expected.gain, abs=1e-6)


STEPS = 1000
LOUDEST = 50.0
"""Norms of a gradient that a residual may have.

Random blocks of 5 % leave elements waiting for 20 steps on average, which are 13 norms of this gradient, and now and
then a part of them waits for twice as long. What is never sent reaches 450.
"""

LOSSY = once(
    [
        (entry,)
        for entry in OWN
        if entry.contractive and (entry.shares_positions or not isinstance(entry, Dense | Sparsifier))
    ],
    lambda case: case[0].message,
)


@pytest.mark.slow
@pytest.mark.parametrize(("compressor",), LOSSY, ids=str)  # noqa: PT006 (cases are tuples)
def test_residual_of_a_lossy_compressor_stays_bounded(compressor):
    """Part of each gradient is the same in all steps, as in training, and would pile up where it is never sent.

    No element is far larger than the others: for scaled signs with one magnitude that is the worst there is, and what
    they keep back then is bounded only by the number of elements.
    """
    rng = np.random.default_rng(0)
    drift = 0.5 * rng.normal(size=(24, 32))
    world = Ranks(2, compressor, fitting(compressor)[0], feedback=True)
    norms = []
    for _ in range(STEPS):
        gradients = [drift + rng.normal(size=drift.shape) for _ in range(2)]
        world.reduce([{"w": gradient.astype(np.float32)} for gradient in gradients])
        norms.append(max(np.linalg.norm(left) for left in world.residuals("w")) / np.linalg.norm(gradients[0]))
    assert max(norms) < LOUDEST
    assert max(norms[700:]) <= 1.5 * max(norms[100:400]) + 0.1
