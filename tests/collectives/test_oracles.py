"""Each collective against its definition, in float64, and over MPI against ranks of one process."""

from functools import partial

import numpy as np
import oracle
import pytest
from marks import slow
from schemes import Above
from worlds import Ranks

import mpicomp

NUMEL, RATIO = 200, 0.05
LAYOUTS = [[0, 0, 1, 1], [0, 0, 0, 1, 1], [0, 1, 1], [0, 1, 0, 2, 1, 0, 0, 2]]


def largest(ratio, array):
    return oracle.largest(array, oracle.kept(ratio, array.size))


def above(array):
    return [index for index, value in enumerate(array) if abs(value) > 2.0]


SELECTIONS = [
    (mpicomp.TopK(ratio=RATIO), partial(largest, RATIO)),
    (Above(limit=2.0), above),  # another number on each rank
]


def topk(ratio):
    return lambda gradients, residuals, step: oracle.topk_step(gradients, residuals, ratio)


def star(gradients, residuals, step):
    return oracle.star_topk_step(gradients, residuals, RATIO, step)


def var(select):
    return lambda gradients, residuals, step: oracle.chosen_step(gradients, residuals, select, oracle.loudest)


def two_phase(gradients, residuals, step):
    return oracle.two_phase_step(gradients, residuals, block=64)


CASES = [
    (mpicomp.TopK(ratio=RATIO), "allgather", NUMEL, topk(RATIO)),
    (mpicomp.TopK(ratio=RATIO), "star-topk", NUMEL, star),
    *((entry, "var-topk:allreduce", NUMEL, var(select)) for entry, select in SELECTIONS),
    *((entry, "var-topk:scatter-reduce", NUMEL, var(select)) for entry, select in SELECTIONS),
    *((mpicomp.OneBit(block=64), "two-phase", numel, two_phase) for numel in (1, 3, 64, 1000)),
]


def check_steps(world, numel, definition):
    ranks = len(world.reducers)
    rng = np.random.default_rng(ranks)
    residuals = [np.zeros(numel) for _ in range(ranks)]
    for step in range(9):
        common = rng.laplace(size=numel)
        gradients = [common + rng.laplace(size=numel) for _ in range(ranks)]
        mean, residuals = definition(gradients, residuals, step)
        for received in world.reduce([{"w": gradient} for gradient in gradients]):
            np.testing.assert_allclose(received["w"], mean, rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(world.residuals("w"), residuals, rtol=1e-11, atol=1e-13)


def _id(value):
    """Return the same text in every process: a function's repr has its address, which differs."""
    return None if callable(value) else str(value)


@pytest.mark.parametrize("ranks", [1, 2, 3, slow(4), slow(5), 6, slow(7)])
@pytest.mark.parametrize(("compressor", "collective", "numel", "definition"), CASES, ids=_id)
def test_collective_with_feedback_matches_oracle(ranks, compressor, collective, numel, definition):
    check_steps(Ranks(ranks, compressor, collective, feedback=True), numel, definition)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_star_topk_on_hosts_matches_oracle(layout):
    world = Ranks(len(layout), mpicomp.TopK(ratio=RATIO), "star-topk:hierarchical:ring", hosts=layout)
    check_steps(world, NUMEL, star)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("numel", [1, 201])
def test_hierarchical_topk_matches_oracle(layout, numel):
    rng = np.random.default_rng(0)
    world = Ranks(len(layout), mpicomp.TopK(ratio=RATIO), "hierarchical:allgather", hosts=layout)
    expected = dict.fromkeys(layout, 0.0)
    for _ in range(5):
        gradients = [rng.laplace(size=numel) for _ in layout]
        mean, expected = oracle.hierarchical_topk_step(gradients, expected, layout, RATIO)
        for received in world.reduce([{"w": gradient} for gradient in gradients]):
            np.testing.assert_allclose(received["w"], mean, rtol=1e-12, atol=1e-14)
        for host, residual in expected.items():
            held = [left for left, where in zip(world.residuals("w"), layout, strict=True) if where == host]
            np.testing.assert_allclose(sum(held), residual, rtol=1e-12, atol=1e-14)
            # An element that is kept back stays with its owner alone.
            assert np.sum([left != 0 for left in held], axis=0).max() == (numel > 1)


OVER_MPI = [
    (mpicomp.Dense(), "scatter-reduce"),
    (mpicomp.Dense(), "ring"),
    (mpicomp.Dense(), "recursive-doubling"),
    (mpicomp.Dense(wire="bf16"), "parameter-server"),
    *((mpicomp.TopK(ratio=RATIO), name) for name in ("allgather", "star-topk:ring", "var-topk:ring", "oktopk")),
    (mpicomp.OneBit(), "two-phase"),
    (mpicomp.OneBit(), "packed-allgather"),
    (mpicomp.TernGrad(), "packed-allgather"),
    (mpicomp.GlobalRandKMaxNorm(), "two-phase"),
    (mpicomp.SignSGD(), "packed-allgather"),
    (mpicomp.PowerSGD(rank=2), "low-rank:scatter-reduce"),
]


def gradient(rank, step):
    return {"w": np.random.default_rng([rank, step]).laplace(size=(100, 200)).astype(np.float32)}


@pytest.mark.mpi
@pytest.mark.parametrize(("compressor", "collective"), OVER_MPI, ids=str)
def test_collective_over_mpi_has_the_bits_of_one_process(comm, compressor, collective):
    reducer = mpicomp.Reducer(compressor, collective, comm=comm)
    world = Ranks(comm.size, compressor, collective)
    for step in range(3):
        mean = reducer.reduce(gradient(comm.rank, step))["w"]
        expected = world.reduce([gradient(rank, step) for rank in range(comm.size)])[comm.rank]["w"]
        assert mean.tobytes() == expected.tobytes()
        if reducer.feedback:
            assert reducer.residual("w").tobytes() == world.residuals("w")[comm.rank].tobytes()
    reducer.close()
