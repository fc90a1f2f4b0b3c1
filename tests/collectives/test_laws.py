"""The laws that every scheme obeys, among ranks inside one process."""

import numpy as np
import oracle
import pytest
from schemes import IDS, PAIRS

from mpicomp.collectives import Context, bind
from mpicomp.compressors.accumulated import TAIL, Accumulated, Piece
from mpicomp.compressors.base import Selection
from mpicomp.transport import LocalWorld

RANKS = [1, 2, 3, 4, 5, 8, 16, 33, 64]


def run(compressor, collective, arrays, step=0, identical_sums=True, residuals=None, stale=()):
    """Exchange one array a rank; give the results, copied, and the transports."""
    world = LocalWorld(len(arrays), identical_sums)
    scheme = bind(compressor, collective)
    exchanges = []
    for rank, array in enumerate(arrays):
        buffer = np.full(array.size + TAIL, np.nan, array.dtype)
        residual = None if residuals is None else residuals[rank]
        accumulated = Accumulated(buffer, residual, [Piece(0, array)], stale=rank in stale)
        context = Context(group=world.transports[rank].group, step=step)
        exchanges.append(scheme.exchange(accumulated, context))
    return world.run(exchanges), world.transports, scheme


def dense(sent, numel, dtype=np.float64):
    if isinstance(sent, Selection):
        out = np.zeros(numel, dtype)
        out[sent.indices] = sent.values
        return out
    return sent.astype(dtype)


def gradients(ranks, numel, dtype, seed=0):
    # Some ranks have nothing that is large: with a fixed limit they select nothing.
    scales = [1e-3 if rank % 3 == 1 else 1.0 for rank in range(ranks)]
    rng = np.random.default_rng(seed)
    return [(scale * rng.standard_t(3, numel)).astype(dtype) for scale in scales]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("compressor", "collective"), PAIRS, ids=IDS)
@pytest.mark.parametrize("identical_sums", [True, False], ids=["sums", "own-sums"])
def test_nothing_is_lost_and_all_ranks_hold_the_same_bits(compressor, collective, ranks, identical_sums):
    for dtype in (np.float32, np.float64):
        for numel in (1, 2, 7, 1001):
            arrays = gradients(ranks, numel, dtype, seed=numel)
            results, _, _ = run(compressor, collective, arrays, step=numel, identical_sums=identical_sums)
            first = results[0]
            for result in results:
                assert result.mean.tobytes() == first.mean.tobytes()
                assert (result.gain, result.kept) == (first.gain, first.kept)
                assert not result.nonfinite
                assert not result.stale
            sent = [dense(result.sent, numel) for result in results]
            scale = np.sum(np.abs(arrays), axis=0).max()
            eps = np.finfo(dtype).eps
            np.testing.assert_allclose(
                np.sum(sent, axis=0), ranks * first.mean.astype(np.float64), rtol=0, atol=4 * ranks * eps * scale
            )
            lost = sum(np.sum((array - part) ** 2) for array, part in zip(np.float64(arrays), sent, strict=True))
            energy = np.sum(np.square(np.float64(arrays)))
            np.testing.assert_allclose(first.gain, 1 - lost / energy, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(("compressor", "collective"), PAIRS, ids=IDS)
@pytest.mark.parametrize("identical_sums", [True, False], ids=["sums", "own-sums"])
def test_bytes_executed_are_those_of_rounds(compressor, collective, ranks, identical_sums):
    numel = 1001
    arrays = gradients(ranks, numel, np.float32)
    _, transports, scheme = run(compressor, collective, arrays, step=2, identical_sums=identical_sums)
    for transport in transports:
        expected = scheme.rounds(numel, np.dtype(np.float32), transport.group, step=2)
        assert [entry.operation for entry in transport.log] == [task.operation for task in expected]
        if compressor.message != "sparse" or compressor.count(numel) is not None:  # its counts depend on the values
            assert [entry.sent_bytes for entry in transport.log] == [
                task.sent_bytes(transport.group.part(task.group)) for task in expected
            ]
            assert [entry.wire_bytes for entry in transport.log] == [
                task.wire_bytes(transport.group.part(task.group)) for task in expected
            ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("compressor", "collective"), PAIRS, ids=IDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_rank_is_seen_by_all(compressor, collective, ranks, bad):
    for culprit in range(ranks):
        arrays = gradients(ranks, 50, np.float32)
        arrays[culprit][33] = bad
        results, _, _ = run(compressor, collective, arrays)
        assert all(result.nonfinite for result in results)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("compressor", "collective"), PAIRS, ids=IDS)
@pytest.mark.parametrize("identical_sums", [True, False], ids=["sums", "own-sums"])
def test_one_stale_rank_is_heard_by_all(compressor, collective, ranks, identical_sums):
    for culprit in range(ranks):
        arrays = gradients(ranks, 50, np.float32)
        results, _, _ = run(compressor, collective, arrays, identical_sums=identical_sums, stale=[culprit])
        assert all(result.stale for result in results)
        assert not any(result.nonfinite for result in results)


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("collective", ["allgather", "star-topk"])
def test_topk_with_feedback_is_what_the_oracle_says(ranks, collective):
    import mpicomp

    rng = np.random.default_rng(ranks)
    numel, ratio = 200, 0.05
    world = LocalWorld(ranks)
    reducers = [mpicomp.Reducer(mpicomp.TopK(ratio=ratio), collective, comm=end) for end in world.transports]
    residuals = [np.zeros(numel) for _ in range(ranks)]
    for step in range(2 * ranks + 3):
        arrays = [rng.laplace(size=numel).astype(np.float64) for _ in range(ranks)]
        if collective == "allgather":
            mean, residuals = oracle.topk_step(arrays, residuals, ratio)
        else:
            mean, residuals = oracle.star_topk_step(arrays, residuals, ratio, step)
        means = world.run([r.rounds({"w": a}) for r, a in zip(reducers, arrays, strict=True)])
        np.testing.assert_allclose(means[0]["w"], mean, rtol=1e-12, atol=1e-14)
        for reducer, residual in zip(reducers, residuals, strict=True):
            np.testing.assert_allclose(reducer.residual("w"), residual, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("collective", ["allreduce", "scatter-reduce"])
@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_sixteen_bits_round_exactly_twice(ranks, collective, wire):
    """Every value of a constant array that 16 bits can hold comes through unharmed, whatever the number of ranks."""
    import mpicomp

    arrays = [np.full(37, 2.0**rank, np.float32) for rank in range(ranks)]
    results, _, _ = run(mpicomp.Dense(wire=wire), collective, arrays)
    bits = 11 if wire == "fp16" else 8
    expected = sum(2.0**rank for rank in range(ranks)) / ranks
    step = 2.0 ** (np.floor(np.log2(expected)) - bits + 1)
    np.testing.assert_array_equal(results[0].mean, np.float32(np.round(np.float32(expected) / step) * step))
