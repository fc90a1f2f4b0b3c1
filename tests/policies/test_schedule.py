"""The ratio as a function of the step, against the rules as they are published."""

import numpy as np
import pytest
from worlds import Ranks

import mpicomp


def run(settings, steps, compressor=None, numel=1000, size=1):
    """Give the ratio that each step requested for, and the one that it reached."""
    ranks = Ranks(size, compressor, policy={"id": "schedule"} | settings)
    gradient = np.arange(numel, dtype=np.float32)
    requested, reached = [], []
    for _ in range(steps):
        ranks.reduce([{"w": gradient}] * size)
        [bucket] = ranks.reducers[0].last_step.buckets
        requested.append(bucket.ratio)
        reached.append(bucket.ratio_reached)
    return requested, reached


@pytest.mark.parametrize(("begin", "end"), [(0.5, 0.1), (0.1, 0.5)])
def test_linear(begin, end):
    requested, reached = run({"begin": begin, "end": end, "steps": 4, "shape": "linear"}, 8)
    expected = [begin, (3 * begin + end) / 4, (begin + end) / 2, (begin + 3 * end) / 4, end, end, end, end]
    assert requested == pytest.approx(expected)
    assert reached == pytest.approx(expected)  # thousands are kept exactly
    assert requested[4:] == [end] * 4


@pytest.mark.parametrize(("begin", "end"), [(0.16, 0.01), (0.01, 0.16)])
def test_exponential(begin, end):
    requested, reached = run({"begin": begin, "end": end, "steps": 4, "shape": "exponential"}, 6)
    expected = [0.16, 0.08, 0.04, 0.02, 0.01]
    expected = expected if begin > end else expected[::-1]
    assert requested == pytest.approx([*expected, end])
    assert reached == pytest.approx([*expected, end])


def test_stages_upwards_whose_number_does_not_divide_the_steps():
    requested, _ = run({"begin": 0.01, "end": 0.64, "steps": 7, "shape": "step", "stages": 4}, 9)
    # a stage ends where t / 7 passes a third
    expected = [0.01 * 4 ** sum(3 * t >= 7 * stage for stage in (1, 2, 3)) for t in range(9)]
    assert requested == pytest.approx(expected)
    assert sorted(set(np.round(requested, 9))) == [0.01, 0.04, 0.16, 0.64]


@pytest.mark.parametrize("compressor", [mpicomp.SIDCo(), mpicomp.RandomK(), mpicomp.TopK(wire="bf16")], ids=str)
def test_everything_but_the_ratio_is_as_it_was_named(compressor):
    ranks = Ranks(2, compressor, policy={"id": "schedule", "begin": 0.5, "end": 0.25, "steps": 2})
    for ratio in (0.5, 0.5 / 2**0.5, 0.25):
        ranks.reduce([{"w": np.arange(100, dtype=np.float32)}] * 2)
        [bucket] = ranks.reducers[0].last_step.buckets
        assert bucket.compressor == compressor.get_config() | {"ratio": pytest.approx(ratio)}


def test_layers_with_a_ratio_of_their_own_keep_it():
    ranks = Ranks(
        1, mpicomp.TopK(layers={"*.bias": 1.0}), policy={"id": "schedule", "begin": 0.5, "end": 0.1, "steps": 1}
    )
    for ratio in (0.5, 0.1):
        [means] = ranks.reduce([{"fc.weight": np.arange(100, dtype=np.float32), "fc.bias": np.ones(10, np.float32)}])
        assert [np.count_nonzero(mean) / mean.size for mean in means.values()] == pytest.approx([ratio, 1.0])
