"""VAR-Topk against the definition."""

import numpy as np
import oracle
import pytest
from lockstep import run
from schemes import Above
from worlds import Ranks

import mpicomp

SELECT = {
    "fixed": (mpicomp.TopK(ratio=0.05), lambda array: oracle.largest(array, oracle.kept(0.05, array.size))),
    "varying": (Above(limit=2.0), lambda array: [i for i, value in enumerate(array) if abs(value) > 2.0]),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize("kind", SELECT)
@pytest.mark.parametrize("inner", ["allreduce", "scatter-reduce"])
def test_it_is_what_the_oracle_says(ranks, kind, inner):
    compressor, select = SELECT[kind]
    rng = np.random.default_rng(ranks)
    together = Ranks(ranks, compressor, f"var-topk:{inner}", feedback=True)
    residuals = [np.zeros(200) for _ in range(ranks)]
    leaders = set()

    def leader(accumulated, selected):
        first = oracle.loudest(accumulated, selected)
        leaders.add(first)
        return first

    for _ in range(9):
        gradients = [rng.laplace(size=200) for _ in range(ranks)]
        mean, residuals = oracle.chosen_step(gradients, residuals, select, leader)
        means = together.reduce([{"w": gradient} for gradient in gradients])
        np.testing.assert_allclose(means[0]["w"], mean, rtol=1e-12, atol=1e-14)
        for got, residual in zip(together.residuals("w"), residuals, strict=True):
            np.testing.assert_allclose(got, residual, rtol=1e-12, atol=1e-14)
    assert ranks == 1 or len(leaders) > 1


def test_the_lowest_of_equal_ranks_leads():
    first = np.array([0, 0, 3, 0], np.float32)
    arrays = [np.array([1, 0, 0, 0], np.float32), first, np.array([0, -3, 0, 0], np.float32)]
    results, *_ = run(mpicomp.TopK(ratio=0.25), "var-topk", arrays)
    assert [result.sent.indices.tolist() for result in results] == [[2]] * 3
    np.testing.assert_array_equal(results[2].mean, first / np.float32(3))


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_rank_whose_energy_is_no_number_does_not_lead(bad):
    arrays = [np.array([1, 0, 0, 0], np.float32), np.array([0, 2, 0, 0], np.float32), np.ones(4, np.float32)]
    arrays[bad][3] = np.nan
    results, *_ = run(mpicomp.TopK(ratio=0.25), "var-topk", arrays)
    assert [result.sent.indices.tolist() for result in results] == [[0 if bad == 1 else 1]] * 3
    assert all(result.nonfinite for result in results)


def test_nothing_may_be_selected():
    arrays = [np.ones(10, np.float32)] * 3
    results, *_ = run(Above(limit=2.0), "var-topk", arrays)
    assert not results[0].mean.any()
    assert (results[0].gain, results[0].kept) == (0.0, 0.0)


def test_bytes_are_those_of_rounds_with_the_leader_as_root():
    arrays = [np.arange(1000, dtype=np.float32) * scale for scale in (1, 3, 2)]
    _, transports, scheme, _ = run(mpicomp.TopK(ratio=0.1), "var-topk", arrays)
    rounds = [scheme.rounds(1000, np.dtype(np.float32), end.group) for end in transports]
    for end, expected in zip(transports, rounds, strict=True):
        assert [entry.wire_bytes for entry in end.log] == [task.wire_bytes(end.group) for task in expected]
    sent = [end.log[1].sent_bytes for end in transports]
    assert sent == [0, rounds[0][1].sent_bytes(transports[0].group), 0]
