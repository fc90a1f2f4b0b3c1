import numpy as np
import oracle
import pytest
from lockstep import dense, gradients, run
from marks import slow
from schemes import Above
from worlds import Ranks

import mpicomp
from mpicomp.collectives import Context, bind
from mpicomp.compressors.gradient_with_residual import TRAILER, GradientWithResidual, Piece
from mpicomp.errors import MessageError
from mpicomp.rounds import observe
from mpicomp.transport import LocalWorld


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
def test_dense_bits_are_those_of_a_sum_in_rank_order(ranks, dtype):
    arrays = gradients(ranks, 50, dtype)
    total = np.zeros(50, dtype)
    for array in arrays:
        total = total + array
    for result in run(mpicomp.Dense(), "parameter-server", arrays).results:
        assert result.mean.tobytes() == (total * dtype(1 / ranks)).tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("ratio", [0.05, 0.7])  # the union comes back, or the whole array
def test_topk_with_feedback_is_what_the_oracle_says(ranks, ratio):
    rng = np.random.default_rng(ranks)
    together = Ranks(ranks, mpicomp.TopK(ratio=ratio), "parameter-server")
    residuals = [np.zeros(200)] * ranks
    for _ in range(5):
        arrays = [rng.laplace(size=200) for _ in range(ranks)]
        mean, residuals = oracle.topk_step(arrays, residuals, ratio)
        means = together.reduce([{"w": array} for array in arrays])
        np.testing.assert_allclose(means[0]["w"], mean, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(together.residuals("w"), residuals, rtol=1e-12, atol=1e-14)


def test_the_shorter_reply_is_sent():
    def reply(arrays, compressor):
        told, answer = run(compressor, "parameter-server", arrays).transports[0].log[-2:]
        assert told.sent_bytes == 8
        return answer.sent_bytes

    numel = 1000
    apart = [np.zeros(numel, np.float32) for _ in range(3)]
    for rank, array in enumerate(apart):
        array[10 * rank : 10 * rank + 10] = 1 + rank
    compressor = mpicomp.TopK(ratio=0.01, indices="plain")
    assert reply(apart, compressor) == 24 + 30 * (4 + 4)
    assert reply([apart[0]] * 3, compressor) == 24 + 10 * (4 + 4)
    cancelled = [apart[0], -apart[0], apart[1]]
    assert reply(cancelled, compressor) == 24 + 10 * (4 + 4)
    assert reply(gradients(3, numel, np.float32), mpicomp.TopK(ratio=1.0)) == 24 + numel * 4
    assert reply(gradients(3, numel, np.float32), Above(limit=1e30)) == 24


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_the_second_rounding_is_in_the_residual_of_rank_0(wire):
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


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_damaged_message_is_an_error_on_all_ranks(culprit):
    world = LocalWorld(3)
    raised = []

    def damaged(exchange, rank):
        def damage(task):
            if task.operation == "gatherv" and rank == culprit:
                task.send[0] = 99

        try:
            yield from observe(exchange, before=damage)
        except MessageError as error:
            raised.append((rank, str(error)))
            raise

    exchanges = []
    for rank, array in enumerate(gradients(3, 50, np.float32)):
        accumulated = GradientWithResidual(np.empty(50 + TRAILER, np.float32), None, [Piece(0, array)])
        context = Context(group=world.transports[rank].group)
        scheme = bind(mpicomp.TopK(ratio=0.1), "parameter-server")
        exchanges.append(damaged(scheme.exchange(accumulated, context), rank))
    with pytest.raises(MessageError, match="parameter-server: rank 0 was sent a damaged message") as caught:
        world.run(exchanges)
    assert f"from rank {culprit}" in str(caught.value.__cause__)
    assert [rank for rank, _ in raised] == [0, 1, 2]
