import numpy as np
import pytest
from lockstep import dense, gradients, run
from worlds import Ranks

from mpicomp import Context, GlobalRandKMaxNorm, MaxNorm
from mpicomp.rounds import Group

FORMS = [
    GlobalRandKMaxNorm(ratio=0.05),
    GlobalRandKMaxNorm(ratio=0.05, bits=[4, 8]),
    GlobalRandKMaxNorm(ratio=0.05, rounding="stochastic"),
]


def positions(compressor, numel, rank=0, **where):
    out = np.full(compressor.count(numel), 2**32 - 1, np.uint32)
    compressor.positions(numel, Context(group=Group(rank, rank + 1), **where), out)
    return out.astype(np.int64)


@pytest.mark.parametrize(
    ("numel", "ratio"), [(100, 0.1), (103, 0.1), (1000, 0.3), (7, 1e-9), (50, 1.0), (200_000, 0.4)]
)
def test_every_element_has_its_turn_before_any_has_another(numel, ratio):
    compressor = GlobalRandKMaxNorm(ratio=ratio)
    k = compressor.count(numel)
    shortest, longest = numel // k, -(-numel // k)
    seen = np.zeros(numel, int)
    for step in range(17, 17 + shortest):
        drawn = positions(compressor, numel, step=step)
        assert (np.diff(drawn) > 0).all()
        seen[drawn] += 1
    assert seen.max() == 1
    for step in range(17 + shortest, 17 + longest):
        seen[positions(compressor, numel, step=step)] += 1
    assert seen.min() == 1


def test_ranks_agree_and_buckets_and_seeds_do_not():
    compressor = GlobalRandKMaxNorm(ratio=0.01)
    first = positions(compressor, 5000, rank=0, step=4, bucket=1, seed=2)
    assert positions(compressor, 5000, rank=7, step=4, bucket=1, seed=2).tolist() == first.tolist()
    for other in ({"step": 5}, {"bucket": 2}, {"seed": 3}):
        assert positions(compressor, 5000, **({"step": 4, "bucket": 1, "seed": 2} | other)).tolist() != first.tolist()


@pytest.mark.parametrize("compressor", FORMS, ids=str)
def test_what_is_not_selected_is_zero_on_all_ranks(compressor):
    arrays = gradients(3, 1000, np.float32)
    results = run(compressor, "integer-sum", arrays, step=3).results
    selected = positions(compressor, 1000, step=3)
    elsewhere = np.setdiff1d(np.arange(1000), selected)
    for result in results:
        assert result.mean.tobytes() == results[0].mean.tobytes()
        assert not result.mean[elsewhere].any()
        assert not dense(result.sent, 1000)[elsewhere].any()
        assert result.kept == selected.size == 50
    # On them it is MaxNorm alone: half a step of the largest selected element, or a whole one at random.
    scale = MaxNorm(bits=compressor.bits).scales[0]
    step = max(np.abs(array[selected]).max() for array in arrays) / scale
    error = np.abs(results[0].mean[selected] - np.mean([array[selected] for array in arrays], axis=0))
    assert error.max() <= step * (1.0 if compressor.rounding == "stochastic" else 0.5) * 1.001


@pytest.mark.slow
def test_globalrandk_of_the_paper_delivers_the_ratio():
    compressor = GlobalRandKMaxNorm(ratio=0.25, bits=4, rounding="stochastic")
    assert not compressor.feedback
    assert not compressor.unbiased
    array, steps = gradients(1, 400, np.float32)[0], 1000
    sent = [
        run(compressor, "integer-sum", [array], step=step).results[0].mean.astype(np.float64) for step in range(steps)
    ]
    error = (np.mean(sent, axis=0) - 0.25 * array).reshape(8, 50)
    deviation = 0.25 * np.abs(array).max() / 7 / 2 / np.sqrt(steps / 4) * np.sqrt(50)
    assert (np.abs(error.sum(axis=1)) <= 4 * deviation).all()


@pytest.mark.slow
@pytest.mark.parametrize("bits", [3, [3, 6]])
def test_what_is_kept_back_stays_bounded(bits):
    together = Ranks(2, GlobalRandKMaxNorm(ratio=0.2, bits=bits))
    rng, largest, seen = np.random.default_rng(0), 0.0, []
    for step in range(1000):
        arrays = [rng.uniform(-1, 1, 300).astype(np.float32) for _ in range(2)]
        largest = max(largest, np.abs(arrays).max())
        together.reduce([{"w": array} for array in arrays])
        if step % 50 == 49:
            seen.append(np.abs(together.residuals("w")).max())
    # An element waits five steps for its turn; what rounding takes of it is at most a sixth of the largest.
    assert max(seen) <= 5 * largest / (1 - 1 / 6)
    assert max(seen) > largest
