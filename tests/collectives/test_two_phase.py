"""Packed arrays in two phases, and what their residuals come to."""

import numpy as np
import oracle
import pytest
from lockstep import gradients, run
from marks import once
from schemes import OWN
from worlds import Ranks

import mpicomp
from mpicomp import Dense, Sparsifier
from mpicomp.collectives import bind, fitting
from mpicomp.rounds import Group

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
    for expected, result, whole, left in zip(
        outcome.results, in_place.results, outcome.accumulated, in_place.accumulated, strict=True
    ):
        assert result.mean.tobytes() == expected.mean.tobytes()
        assert (result.leaves == "residual") == compressor.packs_in_place
        if result.leaves == "residual":
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
    [(entry,) for entry in OWN if entry.contractive and not isinstance(entry, Dense | Sparsifier)],
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
