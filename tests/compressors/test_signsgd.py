import json

import numpy as np
import pytest
from lockstep import run
from marks import slow
from worlds import Ranks

from mpicomp import SignSGD


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


def test_a_model_learns_by_votes():
    """A quadratic: with a fixed step every weight ends within one step of where it should."""
    rng = np.random.default_rng(0)
    goal, weight = rng.uniform(-1, 1, 200), np.zeros(200)
    together = Ranks(3, SignSGD())
    for _ in range(150):
        noisy = [(weight - goal + 0.02 * rng.normal(size=200)).astype(np.float32) for _ in range(3)]
        weight -= 0.01 * together.reduce([{"w": gradient} for gradient in noisy])[0]["w"]
    assert np.abs(weight - goal).max() < 0.08
