"""Collectives that sum whole arrays: the order of the sums, segments, and sums that overflow."""

import numpy as np
import oracle
import pytest
from lockstep import dense, gradients, run

import mpicomp
from mpicomp.collectives import bind
from mpicomp.mpi import LocalWorld

SEGMENTED = {"ring": oracle.ring_step, "recursive-doubling": oracle.doubling_step}


def in_rank_order(arrays):
    return sum(arrays[1:], arrays[0]) * arrays[0].dtype.type(1 / len(arrays))


DEFINITIONS = SEGMENTED | {"parameter-server": in_rank_order, "scatter-reduce": in_rank_order}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 12])
@pytest.mark.parametrize("collective", DEFINITIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dense_mean_has_the_bits_of_the_oracle(ranks, collective, dtype):
    for numel in (1, 3, 50):
        arrays = gradients(ranks, numel, dtype)
        expected = DEFINITIONS[collective](arrays)
        for result in run(mpicomp.Dense(), collective, arrays).results:
            assert result.mean.tobytes() == expected.tobytes()


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("collective", SEGMENTED)
def test_segments_in_any_order_give_the_same_bits(ranks, collective):
    arrays = gradients(ranks, 61, np.float32)
    expected = SEGMENTED[collective](arrays)
    for segment in (1, 4, 7, 1000):
        for culprit in (0, ranks - 1):
            for result in run(mpicomp.Dense(), collective, arrays, segment=segment, stale=[culprit]).results:
                assert result.mean.tobytes() == expected.tobytes()
                assert result.stale
                assert not result.nonfinite


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize("collective", SEGMENTED)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_overflow_of_a_sum_is_seen_by_all_ranks(ranks, collective, dtype):
    for place in range(12):
        arrays = [np.ones(12, dtype) for _ in range(ranks)]
        for array in arrays:
            array[place] = np.finfo(dtype).max
        for result in run(mpicomp.Dense(), collective, arrays).results:
            assert result.nonfinite == (ranks > 1)
            assert np.isfinite(np.delete(result.mean, place)).all()


@pytest.mark.parametrize("collective", SEGMENTED)
def test_squares_that_overflow_are_finite_numbers(collective):
    for result in run(mpicomp.Dense(), collective, [np.full(5, 1e200) for _ in range(3)]).results:
        assert not result.nonfinite
        np.testing.assert_allclose(result.mean, 1e200)


@pytest.mark.parametrize(("ranks", "steps"), [(1, 0), (2, 1), (3, 3), (4, 2), (6, 4), (7, 4), (8, 3)])
def test_recursive_doubling_takes_logarithmic_steps(ranks, steps):
    scheme = bind(mpicomp.Dense(), "recursive-doubling")
    numel, nbytes = 100, 4 * 104
    core = 1 << (ranks.bit_length() - 1)
    for rank, end in enumerate(LocalWorld(ranks).transports):
        rounds = scheme.rounds(numel, np.dtype(np.float32), end.group)
        assert len(rounds) == steps
        sends = 1 if rank >= core else core.bit_length() - 1 + (rank + core < ranks)
        assert sum(task.sent_bytes(end.group) for task in rounds) == nbytes * sends


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ring_sends_no_more_than_it_must(ranks):
    numel = 8 * 105 - 4  # with four numbers behind it, in parts of one length
    scheme = bind(mpicomp.Dense(), "ring")
    for end in LocalWorld(ranks).transports:
        rounds = scheme.rounds(numel, np.dtype(np.float32), end.group)
        assert len(rounds) == 2 * (ranks - 1)
        least = 2 * (ranks - 1) * (numel + 4) * 4
        np.testing.assert_allclose(sum(task.sent_bytes(end.group) for task in rounds), least / ranks)
        assert all(task.peers == ((end.group.rank + 1) % ranks, (end.group.rank - 1) % ranks) for task in rounds)


@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("collective", ["allreduce", "scatter-reduce"])
@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_sixteen_bits_are_rounded_exactly_twice(ranks, collective, wire):
    """Every value of a constant array that 16 bits can hold comes through unharmed, whatever the number of ranks."""
    arrays = [np.full(37, 2.0**rank, np.float32) for rank in range(ranks)]
    results, *_ = run(mpicomp.Dense(wire=wire), collective, arrays)
    bits = 11 if wire == "fp16" else 8
    expected = sum(2.0**rank for rank in range(ranks)) / ranks
    step = 2.0 ** (np.floor(np.log2(expected)) - bits + 1)
    np.testing.assert_array_equal(results[0].mean, np.float32(np.round(np.float32(expected) / step) * step))


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_second_rounding_is_in_the_residual_of_the_server(wire):
    ranks = 3
    arrays = gradients(ranks, 100, np.float32)
    results = run(mpicomp.Dense(wire=wire), "parameter-server", arrays).results
    alone = [run(mpicomp.Dense(wire=wire), "parameter-server", [array]).results[0] for array in arrays]
    rounded = [result.mean.astype(np.float64) for result in alone]  # a single rank's mean is its array, rounded
    for rank in (1, 2):
        np.testing.assert_array_equal(results[rank].sent, rounded[rank])
    second = np.sum(rounded, axis=0) / ranks - results[0].mean
    assert np.abs(second).max() > 0
    np.testing.assert_allclose(rounded[0] - dense(results[0].sent, 100), ranks * second, atol=1e-5)
