import json

import numpy as np
import pytest
from lockstep import run
from marks import slow
from worlds import Ranks

import mpicomp
from mpicomp import SignSGD
from mpicomp.collectives import fitting
from mpicomp.errors import ConfigurationError, IncompatiblePairError
from mpicomp.testing import checks


@pytest.mark.parametrize("scale", [1.0, 0.01])
@pytest.mark.parametrize("check", checks(SignSGD()), ids=lambda check: check.__name__)
def test_laws(check, scale):
    check.law(SignSGD(scale=scale))


@pytest.mark.parametrize("scale", [0, -1.0, True, None, "1", np.nan, np.inf])
def test_scale_is_a_positive_number(scale):
    with pytest.raises(ConfigurationError, match=r"signsgd: scale must be a positive number, got "):
        SignSGD(scale=scale)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("numel", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
def test_the_majority_wins_and_ties_are_plus(ranks, numel, dtype):
    rng = np.random.default_rng([ranks, numel])
    arrays = [rng.normal(size=numel).astype(dtype) for _ in range(ranks)]
    arrays[0][::4] = 0
    results = run(SignSGD(scale=0.5), "majority-vote", arrays).results
    votes = sum(np.where(array >= 0, 1, -1) for array in arrays)
    for result in results:
        np.testing.assert_array_equal(result.mean, np.where(votes >= 0, 0.5, -0.5))
        np.testing.assert_array_equal(result.sent, result.mean)
        assert result.mean.dtype == dtype


def test_two_bits_an_element_whatever_the_number_of_ranks():
    numel = 200_000
    for ranks in (2, 4, 16):
        transports = run(SignSGD(), "majority-vote", [np.ones(numel, np.float32)] * ranks).transports
        bits = sum(entry.wire_bytes for entry in transports[0].log) * 8 / numel
        assert bits == pytest.approx(2 * (ranks - 1) / ranks, rel=0.02)


def test_the_record_tells_no_gain():
    together = Ranks(2, SignSGD())
    together.reduce([{"w": np.ones(100, np.float32)}] * 2)
    record = together.reducers[0].last_step
    assert record.buckets[0].gain is None
    json.loads(json.dumps(record.to_json(), allow_nan=False))


def test_there_is_no_feedback():
    assert not SignSGD().feedback
    with pytest.raises(ConfigurationError, match=r"signsgd: .*not contractive.*leave feedback out"):
        mpicomp.Reducer(SignSGD(), feedback=True, comm=Ranks(1).world.transports[0])


def test_votes_are_counted_and_not_summed():
    assert fitting(SignSGD) == fitting(SignSGD()) == ["majority-vote"]
    for collective in ("allreduce", "two-phase", "hierarchical", "integer-sum"):
        with pytest.raises(IncompatiblePairError, match=r"signsgd: does not fit.*use majority-vote"):
            mpicomp.Reducer(SignSGD(), collective, comm=Ranks(1).world.transports[0])


def test_a_model_learns_by_votes():
    """A quadratic: with a fixed step every weight ends within one step of where it should."""
    rng = np.random.default_rng(0)
    goal, weight = rng.uniform(-1, 1, 200), np.zeros(200)
    together = Ranks(3, SignSGD())
    for _ in range(150):
        noisy = [(weight - goal + 0.02 * rng.normal(size=200)).astype(np.float32) for _ in range(3)]
        weight -= 0.01 * together.reduce([{"w": gradient} for gradient in noisy])[0]["w"]
    assert np.abs(weight - goal).max() < 0.08


@pytest.mark.mpi
def test_over_mpi_all_ranks_hold_the_same_signs(comm):
    reducer = mpicomp.Reducer(SignSGD(), comm=comm)
    for step in range(3):
        everyones = [
            np.random.default_rng([rank, step]).normal(size=5000).astype(np.float32) for rank in range(comm.size)
        ]
        mean = reducer.reduce({"w": everyones[comm.rank]})["w"]
        votes = sum(np.where(array >= 0, 1, -1) for array in everyones)
        np.testing.assert_array_equal(mean, np.where(votes >= 0, 1, -1))
    reducer.close()
