"""The check of a mean finds errors, and nothing else."""

import numpy as np
import pytest
from mpicomp.bench.measure.mean_check import BLOCKS, judge, norm, signed_sums, statement
from worlds import Ranks

from mpicomp import Dense, TopK

NUMEL = 30_011


def exchange(compressor, collective, ranks=3, steps=5):
    """Return gradient, residual before and after, and mean of each rank in the last of some steps."""
    random = np.random.default_rng(1)
    world = Ranks(ranks, compressor, collective)
    for _ in range(steps):
        before = [reducer.residual("g") for reducer in world.reducers] if world.reducers[0].last_step else None
        gradients = [random.laplace(size=NUMEL).astype(np.float32) for _ in range(ranks)]
        means = world.reduce([{"g": gradient} for gradient in gradients])
    after = world.residuals("g")
    if not world.reducers[0].feedback:
        before = after = [None] * ranks
    return [list(side) for side in zip(gradients, before, after, (mean["g"].copy() for mean in means), strict=True)]


def check(sides):
    return judge(np.array([statement(*side) for side in sides]), lossless=True)


@pytest.mark.parametrize(
    ("compressor", "collective"),
    [
        (Dense(), "allreduce"),
        (Dense(), "scatter-reduce"),
        (Dense(wire="bf16"), "scatter-reduce"),
        (TopK(ratio=0.01), "allgather"),
        (TopK(ratio=0.01, wire="fp16"), "allgather"),
        (TopK(ratio=0.01), "star-topk"),
    ],
    ids=str,
)
class TestExchanges:
    def test_right_mean_is_correct(self, compressor, collective):
        found = check(exchange(compressor, collective))
        assert found.correct
        assert 0 < found.error < 1e-6

    def test_lost_element_is_an_error(self, compressor, collective):
        sides = exchange(compressor, collective)
        place = int(np.abs(sides[0][3]).argmax())
        for side in sides:
            side[3][place] = 0
        found = check(sides)
        assert found.identical
        assert not found.correct
        assert found.error > 10 * found.tolerance

    def test_other_bits_of_a_rank_are_an_error(self, compressor, collective):
        sides = exchange(compressor, collective)
        sides[2][3][7] = np.nextafter(sides[2][3][7], np.float32(9))
        found = check(sides)
        assert not found.identical
        assert not found.correct


def test_forgotten_residual_is_an_error():
    sides = exchange(TopK(ratio=0.01), "allgather")
    sides[1][2][:100] = 0
    assert not check(sides).correct


def test_elements_that_change_places_are_seen():
    sides = exchange(Dense(), "allreduce")
    for side in sides:
        side[3][3:23] = side[3][3:23][::-1].copy()
    assert not check(sides).correct


def test_lossy_exchange_has_no_tolerance():
    sides = exchange(TopK(ratio=0.01), "allgather")
    lossy = np.array([statement(side[0], None, None, side[3]) for side in sides])
    assert not judge(lossy, lossless=True).correct
    found = judge(lossy, lossless=False)
    assert found.correct
    assert found.error > 0.01


@pytest.mark.parametrize("size", [1, 5, BLOCKS - 1, BLOCKS, 70_000])
def test_signed_sums_count_elements_once(size):
    for place in {0, size // 2, size - 1}:
        array = np.zeros(size, np.float32)
        array[place] = 2
        sums = signed_sums(array)
        assert np.count_nonzero(sums) == 1
        assert np.abs(sums).sum() == norm(array) == 2
