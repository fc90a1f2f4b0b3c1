"""Reducers whose arrays are on a device, opaque to NumPy: everything is computed there, with the bits of the host."""

import numpy as np
import pytest
from device import fake_cuda
from schemes import OTHER_PAIRS, REPRESENTED
from worlds import Ranks

import mpicomp

SHAPES = {"first": (40, 25), "second": (7,), "third": (3, 5, 2)}
STEPS = 3


@pytest.fixture
def cupy(monkeypatch):
    return fake_cuda.install(monkeypatch)


def gradients_of(rank, step, dtype=np.float32):
    random = np.random.default_rng([rank, step])
    return {name: random.laplace(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def run(compressor, collective, size, bring, copied=lambda: 0, **settings):
    """Give the means and the residuals of all steps; of a rank's step no more is copied to the host than it sends.

    What it sends to itself is copied, too, and some hundred bytes of numbers: a whole gradient is 4 kB.
    """
    feedback = None if compressor.contractive else False
    ranks = Ranks(size, compressor, collective, feedback=feedback, **settings)
    reported = []
    for step in range(STEPS):
        given = [gradients_of(rank, step) for rank in range(size)]
        before = copied()
        means = ranks.reduce([{name: bring(value) for name, value in item.items()} for item in given])
        sent = sum(reducer.last_step.buckets[0].sent_bytes for reducer in ranks.reducers)
        assert copied() - before <= 1.5 * sent + 512 * size
        reported.append(([dict(mean) for mean in means], [ranks.residuals(name) for name in SHAPES]))
    return reported


def compare(compressor, collective, cupy, size=3, **settings):
    expected = run(compressor, collective, size, lambda value: value, **settings)
    found = run(compressor, collective, size, cupy.asarray, lambda: cupy.driver.to_host_bytes, **settings)
    for (_, residuals), (there, residuals_there) in zip(expected, found, strict=True):
        for own_there in there:
            assert all(isinstance(value, fake_cuda.ndarray) for value in own_there.values())
        np.testing.assert_equal(residuals_there, residuals)
    last = [{name: value.get() for name, value in item.items()} for item in found[-1][0]]
    np.testing.assert_equal(last, expected[-1][0])


CASES = [*REPRESENTED, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHER_PAIRS)]


@pytest.mark.parametrize(("compressor", "collective"), CASES, ids=str)
def test_the_same_bits_as_on_the_host(compressor, collective, cupy):
    compare(compressor, collective, cupy)


ON_HOSTS = [
    (mpicomp.Dense(), "hierarchical:ring"),
    (mpicomp.Dense(wire="bf16"), "hierarchical"),
    (mpicomp.TopK(ratio=0.1), "hierarchical:allgather"),
    (mpicomp.TopK(ratio=0.1, wire="fp16"), "hierarchical:star-topk"),
    (mpicomp.OneBit(block=64), "hierarchical:packed-allgather"),
    (mpicomp.MaxNorm(bits=[4, 8], rounding="nearest"), "hierarchical"),
]


@pytest.mark.parametrize("hosts", [[0, 0, 1], [0, 1, 0, 0]], ids=str)
@pytest.mark.parametrize(("compressor", "collective"), ON_HOSTS, ids=str)
def test_the_same_bits_between_hosts(compressor, collective, hosts, cupy):
    compare(compressor, collective, cupy, len(hosts), hosts=hosts)
