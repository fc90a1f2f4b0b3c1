"""Collectives that sum whole arrays: the order of the sums, segments, halves of a ring's parts, overflow."""

import numpy as np
import oracle
import pytest
from lockstep import dense, gradients, run

import mpicomp
from mpicomp.collectives import Context, bind, sendrecv
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.rounds import Pending, Round, observe
from mpicomp.testing import accumulated

NUMEL = 61
SINGLE = np.dtype(np.float32)


def in_rank_order(arrays):
    return sum(arrays[1:], arrays[0]) * arrays[0].dtype.type(1 / len(arrays))


def ring_in_halves(arrays):
    return oracle.ring_step(arrays, behind=0)


SEGMENTED = {"ring": oracle.ring_step, "recursive-doubling": oracle.doubling_step, "ring in halves": ring_in_halves}
DEFINITIONS = SEGMENTED | {"parameter-server": in_rank_order, "scatter-reduce": in_rank_order}


@pytest.fixture
def name_of(monkeypatch):
    """Return the name of a collective; in halves parts of arrays of `NUMEL` travel so among up to seven ranks."""

    def name(collective):
        if collective.endswith("in halves"):
            monkeypatch.setattr(sendrecv, "HALF_BYTES", 4)
        return collective.removesuffix(" in halves")

    return name


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 12])
@pytest.mark.parametrize("collective", [name for name in DEFINITIONS if " " not in name])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dense_mean_has_the_bits_of_the_oracle(ranks, collective, dtype):
    for numel in (1, 3, 50):
        arrays = gradients(ranks, numel, dtype)
        expected = DEFINITIONS[collective](arrays)
        for result in run(mpicomp.Dense(), collective, arrays).results:
            assert result.mean.tobytes() == expected.tobytes()


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("collective", SEGMENTED)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_segments_in_any_order_give_the_same_bits(ranks, collective, dtype, name_of):
    arrays, name = gradients(ranks, NUMEL, dtype), name_of(collective)
    expected = SEGMENTED[collective](arrays)
    energy = sum(float(np.sum(array.astype(np.float64) ** 2)) for array in arrays)
    for segment in (None, 1, 3, 7, 1000):
        for stale in ([], [0], [ranks - 1]):
            outcome = run(mpicomp.Dense(), name, arrays, segment=segment, stale=stale)
            for result, after, array in zip(outcome.results, outcome.after, arrays, strict=True):
                assert result.mean.tobytes() == expected.tobytes()
                assert after.tobytes() == array.tobytes()
                assert result.energy == outcome.results[0].energy == pytest.approx(energy, rel=1e-5)
                assert (result.stale, result.nonfinite) == (bool(stale), False)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize("collective", SEGMENTED)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_overflow_of_a_sum_is_seen_by_all_ranks(ranks, collective, dtype, name_of):
    for place in range(0, NUMEL, 5):
        arrays = [np.ones(NUMEL, dtype) for _ in range(ranks)]
        for array in arrays:
            array[place] = np.finfo(dtype).max
        for result in run(mpicomp.Dense(), name_of(collective), arrays).results:
            assert result.nonfinite == (ranks > 1)
            assert np.isfinite(np.delete(result.mean, place)).all()


@pytest.mark.parametrize("collective", SEGMENTED)
def test_squares_that_overflow_are_finite_numbers(collective, name_of):
    for result in run(mpicomp.Dense(), name_of(collective), [np.full(NUMEL, 1e200) for _ in range(3)]).results:
        assert not result.nonfinite
        np.testing.assert_allclose(result.mean, 1e200)


@pytest.mark.parametrize(("ranks", "steps"), [(1, 0), (2, 1), (3, 3), (4, 2), (6, 4), (7, 4), (8, 3)])
def test_recursive_doubling_takes_logarithmic_steps(ranks, steps):
    scheme = bind(mpicomp.Dense(), "recursive-doubling")
    numel, nbytes = 100, 4 * 104
    core = 1 << (ranks.bit_length() - 1)
    for rank, end in enumerate(LocalWorld(ranks).transports):
        rounds = scheme.rounds(numel, SINGLE, end.group)
        assert len(rounds) == steps
        sends = 1 if rank >= core else core.bit_length() - 1 + (rank + core < ranks)
        assert sum(task.sent_bytes(end.group) for task in rounds) == nbytes * sends


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


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_halves_are_announced_and_two_are_under_way(ranks, name_of):
    world, scheme = LocalWorld(ranks), bind(mpicomp.Dense(), name_of("ring in halves"))
    asked = [[] for _ in range(ranks)]
    exchanges = []
    for end, tasks in zip(world.transports, asked, strict=True):
        exchange = scheme.exchange(accumulated(np.ones(NUMEL, np.float32)), Context(group=end.group))
        exchanges.append(observe(exchange, before=tasks.append))
    world.run(exchanges)
    for end, tasks in zip(world.transports, asked, strict=True):
        begun = [task for task in tasks if isinstance(task, Round)]
        expected = scheme.rounds(NUMEL, SINGLE, end.group)
        assert [(task.operation, tuple(task.counts), task.peers, task.background) for task in begun] == [
            (task.operation, tuple(task.counts), task.peers, True) for task in expected
        ]
        assert len(begun) == 4 * (ranks - 1) + 1
        sent = sum(task.counts[0] for task in begun if task.operation == "sendrecv")
        assert abs(sent - 2 * (ranks - 1) * NUMEL / ranks) <= 2 * ranks
        waited = [task.task for task in tasks if isinstance(task, Pending)]
        assert sorted(map(id, waited)) == sorted(map(id, begun))
        exchanged = [task.task if isinstance(task, Pending) else task for task in tasks]
        halves = [task for task in exchanged if task.operation == "sendrecv"]
        under_way = set()
        for place, task in enumerate(halves):
            under_way ^= {id(task)}
            assert place < 1 or place == len(halves) - 1 or 1 <= len(under_way) <= 2


def test_first_half_is_accumulated_before_a_send(name_of):
    group = LocalWorld(4).transports[1].group
    gradient = accumulated(np.ones(NUMEL, np.float32))
    first = next(bind(mpicomp.Dense(), name_of("ring in halves")).exchange(gradient, Context(group=group)))
    assert first.send.size == np.count_nonzero(~np.isnan(gradient.memory)) == 8
    assert not gradient.is_computed


def test_short_parts_travel_whole():
    group = LocalWorld(4).transports[0].group
    scheme = bind(mpicomp.Dense(), "ring")
    long = 2 * sendrecv.HALF_BYTES  # elements of four bytes: two halves for each of four ranks
    assert [task.background for task in scheme.rounds(long - 1, SINGLE, group)] == [False] * 6
    assert [task.background for task in scheme.rounds(long, SINGLE, group)] == [True] * 13
