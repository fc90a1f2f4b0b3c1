"""Whole exchanges by the CUDA kernels, emulated, in streams that take their time: means have the bits of the host.

Where statistics are sums in float64 whose order is another one on a GPU, selections may differ, and with them means: of
those, the law is looked at and that all ranks hold the same bits.
"""

import numpy as np
import pytest
from device import fake_cuda
from worlds import Ranks

import mpicomp

SHAPES = {"first": (40, 25), "second": (7,)}
SIZE, STEPS = 2, 2
SAME_BITS = [
    (mpicomp.Dense(), "allreduce"),
    (mpicomp.Dense(wire="bf16"), "scatter-reduce"),
    (mpicomp.Dense(), "ring"),
    (mpicomp.TopK(ratio=0.1), "allgather"),
    (mpicomp.TopK(ratio=0.1, wire="fp16", indices="plain"), "allgather"),
    (mpicomp.TopK(ratio=0.5, wire="q4"), "allgather"),
    (mpicomp.TopK(ratio=0.1), "star-topk"),
    (mpicomp.TopK(ratio=0.1), "gtopk"),
    (mpicomp.TopK(ratio=0.1), "oktopk"),
    (mpicomp.RandomK(ratio=0.1), "allreduce"),
    (mpicomp.QSGD(rounding="nearest"), "packed-allgather"),
    (mpicomp.Natural(), "packed-allgather"),
    (mpicomp.MaxNorm(bits=[4, 8], rounding="nearest"), "integer-sum"),
    (mpicomp.SignSGD(), "majority-vote"),
]
LAWS = [
    (mpicomp.TopK(ratio=0.1, wire="signs"), "allgather"),
    (mpicomp.OneBit(block=64), "two-phase"),
    (mpicomp.SIDCo(ratio=0.1), "allgather"),
    (mpicomp.CountSketch(ratio=0.1), "sketched"),
    (mpicomp.PowerSGD(rank=1), "low-rank"),
]
SOME = ("allgather", "gtopk", "integer-sum")
SCHEDULES = ["lazy", pytest.param("random", marks=pytest.mark.slow)]


def kinds(cases):
    """Some of them in every run; what is slow is slow."""
    return [pytest.param(*case, marks=[] if case[1] in SOME else [pytest.mark.slow]) for case in cases]


@pytest.fixture(params=SCHEDULES)
def cupy(request, emulated, monkeypatch):
    return fake_cuda.install(monkeypatch, request.param, emulated=True)


def gradients_of(rank, step):
    random = np.random.default_rng([rank, step])
    return {name: random.laplace(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def run(compressor, collective, bring):
    """Give the means of each step and rank, and the residuals after it."""
    ranks = Ranks(SIZE, compressor, collective, feedback=None if compressor.feedback else False)
    reported = []
    for step in range(STEPS):
        given = [{name: bring(item) for name, item in gradients_of(rank, step).items()} for rank in range(SIZE)]
        means = [{name: on_host(item) for name, item in mean.items()} for mean in ranks.reduce(given)]
        reported.append((means, {name: ranks.residuals(name) for name in SHAPES}))
    return reported


def on_host(value):
    return value.get() if isinstance(value, fake_cuda.ndarray) else value.copy()


@pytest.mark.parametrize(("compressor", "collective"), kinds(SAME_BITS), ids=str)
def test_means_and_residuals_have_the_bits_of_the_host(compressor, collective, cupy):
    np.testing.assert_equal(run(compressor, collective, cupy.asarray), run(compressor, collective, lambda value: value))


@pytest.mark.parametrize(("compressor", "collective"), kinds(LAWS), ids=str)
def test_nothing_is_lost_and_all_ranks_hold_the_same_bits(compressor, collective, cupy):
    before = {name: np.zeros((SIZE, *shape)) for name, shape in SHAPES.items()}
    for step, (means, after) in enumerate(run(compressor, collective, cupy.asarray)):
        np.testing.assert_equal(means[0], means[1])
        for name, shape in SHAPES.items():
            given = np.array([gradients_of(rank, step)[name] for rank in range(SIZE)], np.float64)
            held = (given + before[name]).sum(axis=0) - SIZE * means[0][name].astype(np.float64)
            np.testing.assert_allclose(held, np.sum(after[name], axis=0, dtype=np.float64), rtol=0, atol=2e-5)
            before[name] = np.array(after[name], np.float64)
            assert before[name].shape == (SIZE, *shape)
