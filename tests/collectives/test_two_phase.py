"""Packed arrays in two phases, and what their residuals come to."""

import numpy as np
import oracle
import pytest
from lockstep import gradients, run

import mpicomp


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
