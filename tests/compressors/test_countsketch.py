import itertools

import numpy as np
import oracle
import pytest
from oracle import cells_of, estimates_of, table_of
from worlds import Ranks

import mpicomp
from mpicomp.compressors import Context


def step_by_step(compressor, gradients, residuals, step):
    """One step as the definition has it: the mean and the new residuals, in float64."""
    accumulated = [np.asarray(g, np.float64) + r for g, r in zip(gradients, residuals, strict=True)]
    numel = accumulated[0].size
    rows, columns = compressor.rows, oracle.kept(compressor.columns, numel)
    key = Context(step=step).key(shared=True)
    cells = table_of(sum(accumulated), key, rows, columns)
    estimates = estimates_of(cells, key, rows, columns, numel)
    mean, left = np.zeros(numel), [array.copy() for array in accumulated]
    for index in oracle.largest(estimates, min(numel, compressor.candidates * oracle.kept(compressor.ratio, numel))):
        mean[index] = sum(array[index] for array in accumulated) / len(accumulated)
        for array in left:
            array[index] = 0.0
    return mean, left


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "collective", ["sketched:allreduce", "sketched:ring", "sketched:scatter-reduce", "sketched:hierarchical:ring"]
)
def test_countsketch_step_is_that_of_the_definition(ranks, collective):
    compressor = mpicomp.CountSketch(ratio=0.02, rows=3, columns=0.1, candidates=3, wire=None)
    world, rng = Ranks(ranks, compressor, collective), np.random.default_rng(ranks)
    residuals = [np.zeros(200) for _ in range(ranks)]
    for step in range(4):
        gradients = [rng.standard_t(2, size=200) for _ in range(ranks)]
        mean, residuals = step_by_step(compressor, gradients, residuals, step)
        means = world.reduce([{"w": gradient} for gradient in gradients])
        assert all(other["w"].tobytes() == means[0]["w"].tobytes() for other in means)
        np.testing.assert_allclose(means[0]["w"], mean, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(world.residuals("w"), residuals, rtol=1e-12, atol=1e-14)


def test_countsketch_finds_what_is_large_in_the_sum_only():
    ranks, numel = 4, 5000
    gradients = [np.zeros(numel, np.float32) for _ in range(ranks)]
    for rank, gradient in enumerate(gradients):
        gradient[:20] = 1  # 4 in the sum
        gradient[1000:1500] = 3 if rank % 2 else -3  # nothing
    compressor = mpicomp.CountSketch(ratio=0.004, rows=5, columns=0.2, candidates=1, wire=None)
    means = Ranks(ranks, compressor).reduce([{"w": gradient} for gradient in gradients])
    assert np.flatnonzero(means[0]["w"]).tolist() == list(range(20))
    by_rank = Ranks(ranks, mpicomp.TopK(ratio=0.004), "allgather").reduce([{"w": gradient} for gradient in gradients])
    assert not by_rank[0]["w"][:20].any()


def test_countsketch_finds_hidden_elements_in_later_steps():
    """Two elements whose sum is zero in two of the first step's three rows are found a few steps later."""
    key = Context().key(shared=True)
    cells = {index: list(cells_of(index, key, 3, 20)) for index in range(200, 400)}

    def hidden(one, other):
        pairs = zip(cells[one], cells[other], strict=True)
        return sum(first[1] == second[1] and first[2] != second[2] for first, second in pairs) >= 2

    one, other = next(pair for pair in itertools.combinations(cells, 2) if hidden(*pair))
    gradient = np.zeros(400)
    gradient[[one, other]] = 1
    world = Ranks(1, mpicomp.CountSketch(ratio=0.05, columns=0.05, candidates=1, wire=None))
    assert not world.reduce([{"w": gradient}])[0]["w"].any()
    delivered = sum(world.reduce([{"w": gradient}])[0]["w"].copy() for _ in range(9))
    assert delivered[[one, other]].min() >= 5


def test_countsketch_bytes_are_those_of_table_and_values():
    world = Ranks(
        3, mpicomp.CountSketch(ratio=0.01, rows=5, columns=0.0125, candidates=4, wire=None), "sketched:allreduce"
    )
    world.reduce([{"w": np.ones(10_000, np.float32)} for _ in range(3)])
    record = world.reducers[0].last_step.buckets[0]
    assert record.rounds == ["allreduce", "allreduce"]
    assert record.sent_bytes == 4 * (5 * 125 + 4 * 100 + 8)
    assert record.ratio_reached == 0.04
    per_element = mpicomp.CountSketch().wire_bytes_per_element(4)
    assert per_element == pytest.approx(2 * (3 * 0.03 + 0.12), rel=1e-3)
    assert mpicomp.CountSketch(wire=None).wire_bytes_per_element(4) == 2 * per_element


def test_countsketch_momentum_is_cleared_where_sent():
    world = Ranks(1, mpicomp.CountSketch(ratio=0.1, rows=7, columns=1.0, candidates=1, momentum=0.5, wire=None))
    # The first element would come to 12 in the second step; the other one waits, and gathers 1 + 1.5 + 1.75.
    for gradient, place, value in [([8, 1], 0, 8), ([8, 1], 0, 8), ([0, 1], 1, 4.25)]:
        mean = world.reduce([{"w": np.array(gradient + 8 * [0], np.float64)}])[0]["w"]
        assert np.flatnonzero(mean).tolist() == [place]
        assert mean[place] == value


def test_countsketch_cell_that_overflows_undoes_the_step():
    """All elements are finite and lie in the one cell of the table with the same sign."""
    key = Context().key(shared=True)
    signs = [sign for index in range(1000) for _, _, sign in cells_of(index, key, 1, 1)]
    world = Ranks(2, mpicomp.CountSketch(ratio=0.01, rows=1, columns=1e-6, wire=None), nonfinite="skip")
    means = world.reduce([{"w": np.float32(1e37) * np.array(signs, np.float32)} for _ in range(2)])
    assert world.reducers[0].last_step.skipped
    assert not means[0]["w"].any()
    assert not world.residual_sum("w").any()
