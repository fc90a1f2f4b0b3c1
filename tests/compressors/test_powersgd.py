"""PowerSGD against a slow reading of the paper."""

import numpy as np
import pytest
from worlds import Link, Ranks

import mpicomp
from mpicomp.compressors.powersgd import Matrix, orthonormal
from mpicomp.errors import ConfigurationError, IncompatiblePairError
from mpicomp.transport import LocalWorld

SHAPES = {"wide": (6, 40), "b": (7,), "conv": (12, 3, 3, 3), "small": (3, 2), "s": ()}


def gradients(step, rank, shapes=SHAPES):
    random = np.random.default_rng((step, rank))
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def run(compressor, size, steps, collective="low-rank", make=gradients):
    """Give the means of every step and the reducers."""
    world = LocalWorld(size)
    reducers = [mpicomp.Reducer(compressor, collective, comm=end) for end in world.transports]
    means = []
    for step in range(steps):
        every = world.run([r.rounds(make(step, rank)) for rank, r in enumerate(reducers)])
        for other in every[1:]:
            assert all(other[name].tobytes() == every[0][name].tobytes() for name in other)
        means.append({name: mean.copy() for name, mean in every[0].items()})
    return means, reducers


def gram_schmidt(matrix):
    """Make columns orthonormal, in the order in which they come."""
    out = matrix.astype(np.float64).copy()
    for column in range(out.shape[1]):
        for before in range(column):
            out[:, column] -= (out[:, before] @ out[:, column]) * out[:, before]
        out[:, column] /= np.linalg.norm(out[:, column])
    return out


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_it_is_the_papers_algorithm(size, rank):
    """From the second step on, with what the first has left: residuals, and the right factors."""
    compressor = mpicomp.PowerSGD(rank=rank)
    _, reducers = run(compressor, size, 1)
    name, rows, columns, place = ("conv", 12, 27, -1) if rank == 3 else ("wide", 6, 40, 0)
    factor = reducers[0].state_dict()["memories"]["wide"]["factors"][place].astype(np.float64)
    residuals = [reducer.residual(name).astype(np.float64).reshape(rows, columns) for reducer in reducers]
    for step in range(1, 4):
        own = [gradients(step, r)[name].reshape(rows, columns) + residuals[r] for r in range(size)]
        basis = gram_schmidt(np.mean([matrix @ factor for matrix in own], axis=0))
        rights = [matrix.T @ basis for matrix in own]
        factor = np.mean(rights, axis=0)
        expected = basis @ factor.T
        residuals = [matrix - basis @ right.T for matrix, right in zip(own, rights, strict=True)]
    means, reducers = run(compressor, size, 4)
    np.testing.assert_allclose(means[3][name].reshape(rows, columns), expected, rtol=1e-3, atol=1e-4)
    for reducer, residual in zip(reducers, residuals, strict=True):
        np.testing.assert_allclose(reducer.residual(name).reshape(rows, columns), residual, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    ("collective", "wire"),
    [("low-rank:allreduce", None), ("low-rank:ring", None), ("low-rank:scatter-reduce", "bf16")],
)
def test_nothing_is_lost(size, collective, wire):
    total = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    means, reducers = run(mpicomp.PowerSGD(rank=2, wire=wire), size, 5, collective)
    for step in range(5):
        for rank in range(size):
            for name, gradient in gradients(step, rank).items():
                total[name] += gradient
    for name in SHAPES:
        delivered = size * np.sum([mean[name] for mean in means], axis=0)
        kept = np.sum([reducer.residual(name) for reducer in reducers], axis=0)
        np.testing.assert_allclose(delivered + kept, total[name], rtol=1e-4, atol=2e-4)


def test_bytes_are_those_of_the_factors():
    _, (first, *_) = run(mpicomp.PowerSGD(rank=2), 3, 2)
    record = first.last_step.buckets[0]
    left = 2 * (6 + 12) + 7 + 6 + 1
    right = 2 * (40 + 27)
    assert record.rounds == ["allreduce", "allreduce"]
    assert record.sent_bytes == 4 * (left + right + 8)


def test_what_is_compressed_is_what_pytorch_compresses():
    names, shapes = list(SHAPES), list(SHAPES.values())
    sizes = [int(np.prod(shape)) for shape in shapes]
    found = mpicomp.PowerSGD(rank=1).within(names, sizes, shapes).matrices
    assert found == (Matrix(0, 6, 40, 1), Matrix(247, 12, 27, 1))
    assert mpicomp.PowerSGD(rank=3).within(names, sizes, shapes).matrices == (Matrix(247, 12, 27, 3),)
    assert mpicomp.PowerSGD(rank=3, min_compression_rate=0.5).within(names, sizes, shapes).matrices[-1].rank == 2
    assert mpicomp.PowerSGD().within(names, sizes).matrices == ()


def test_a_rank_for_every_layer():
    names, shapes = list(SHAPES), list(SHAPES.values())
    sizes = [int(np.prod(shape)) for shape in shapes]
    compressor = mpicomp.PowerSGD(rank=1, layers={"con*": 3, "c*": 2, "b": 5, "small": 9})
    found = compressor.within(names, sizes, shapes)
    # The first pattern that matches counts; what is not worth it and what is no matrix stay dense.
    assert found.matrices == (Matrix(0, 6, 40, 1), Matrix(247, 12, 27, 3))
    assert mpicomp.get_compressor(compressor.get_config()) == compressor
    assert found.get_config() == compressor.get_config()
    plain = mpicomp.PowerSGD(rank=3).within(names, sizes, shapes)
    assert mpicomp.PowerSGD(rank=7, layers={"*": 3}).within(names, sizes, shapes).matrices == plain.matrices


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_nothing_is_lost_with_a_rank_for_every_layer(size):
    means, reducers = run(mpicomp.PowerSGD(rank=1, layers={"conv": 3}), size, 4)
    record = reducers[0].last_step.buckets[0]
    # One rank alone sends nothing.
    assert record.sent_bytes == (size > 1) * 4 * (6 * 1 + 12 * 3 + 7 + 6 + 1 + 40 * 1 + 27 * 3 + 8)
    for name in SHAPES:
        put_in = np.sum([gradients(step, rank)[name] for step in range(4) for rank in range(size)], axis=0)
        delivered = size * np.sum([mean[name] for mean in means], axis=0)
        kept = np.sum([reducer.residual(name) for reducer in reducers], axis=0)
        np.testing.assert_allclose(delivered + kept, put_in, rtol=1e-4, atol=2e-4)


def test_the_first_steps_may_be_dense():
    means, reducers = run(mpicomp.PowerSGD(rank=1, start_step=2), 2, 3)
    for step in range(2):
        for name, mean in means[step].items():
            np.testing.assert_allclose(mean, (gradients(step, 0)[name] + gradients(step, 1)[name]) / 2, atol=1e-6)
    assert reducers[0].residual("wide").any()


def test_a_matrix_of_low_rank_arrives_whole():
    def make(step, rank):
        random = np.random.default_rng(step)
        return {"w": np.outer(random.normal(size=30), random.normal(size=50)).astype(np.float32) * (rank + 1)}

    for warm in (True, False):
        means, _ = run(mpicomp.PowerSGD(rank=2, warm_start=warm), 3, 4, make=make)
        for step, mean in enumerate(means):
            expected = 2 * make(step, 0)["w"]
            np.testing.assert_allclose(mean["w"], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30, 1e30])
def test_matrices_that_are_all_alike(value):
    def make(step, rank):
        return {"w": np.full((20, 30), value, np.float32)}

    means, reducers = run(mpicomp.PowerSGD(rank=4), 2, 3, make=make)
    for mean in means:
        np.testing.assert_allclose(mean["w"], make(0, 0)["w"], rtol=1e-4)
    assert np.isfinite(reducers[0].residual("w")).all()


def test_infinity_leaves_factors_as_they_were():
    world = LocalWorld(2)
    reducers = [
        mpicomp.Reducer(mpicomp.PowerSGD(2), "low-rank", nonfinite="skip", comm=end) for end in world.transports
    ]

    def step(number, bad=False):
        own = [gradients(number, rank) for rank in range(2)]
        if bad:
            own[1]["wide"][2, 3] = np.inf
        return world.run([r.rounds(g) for r, g in zip(reducers, own, strict=True)])

    step(0)
    before = reducers[0].state_dict()
    assert not step(1, bad=True)[0]["wide"].any()
    after = reducers[0].state_dict()
    for left, right in zip(before["memories"]["wide"]["factors"], after["memories"]["wide"]["factors"], strict=True):
        assert np.array_equal(left, right)
    assert np.array_equal(before["residuals"]["wide"], after["residuals"]["wide"])
    assert np.isfinite(step(2)[0]["wide"]).all()


def test_the_basis_is_orthonormal_whatever_it_is_made_of():
    random = np.random.default_rng(0)
    flat = np.outer(random.normal(size=9), np.ones(3))
    for matrix in (random.normal(size=(9, 3)), flat, np.zeros((9, 3)), 1e-30 * flat):
        basis = orthonormal(matrix.astype(np.float32))
        np.testing.assert_allclose(basis.T @ basis, np.eye(3), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rank": 0}, "rank must be an integer of at least 1, got 0"),
        ({"start_step": -1}, "start_step must be an integer of at least 0"),
        ({"layers": ["a"]}, r"layers must map names to ranks, got \['a'\]"),
        ({"layers": {"a": 1.5}}, r"layers\['a'\] must be an integer of at least 1, got 1.5"),
        ({"wire": "fp8"}, "wire must be None, 'fp16' or 'bf16'"),
    ],
)
def test_parameters_that_cannot_be(settings, text):
    with pytest.raises(ConfigurationError, match=f"powersgd: {text}"):
        mpicomp.PowerSGD(**settings)


def test_it_does_not_fit_other_collectives():
    with pytest.raises(IncompatiblePairError, match="use low-rank"):
        mpicomp.Reducer("powersgd", "allgather", comm=LocalWorld(1).transports[0])


@pytest.mark.parametrize("shapes", [{"w": (400, 300), "b": (400,)}, {"b": (20_000,)}, {"w": (600, 500)}], ids=str)
def test_the_collective_is_chosen_for_buckets_of_any_length(shapes):
    """A cost model times schemes on arrays of its own lengths, into which a bucket's matrices do not fit."""
    together = Ranks(2, mpicomp.PowerSGD(rank=2), network=Link(latency=1e-4, bits=1e7))
    for step in range(3):
        together.reduce([gradients(step, rank, shapes) for rank in range(2)])
    bucket = together.reducers[0].last_step.buckets[0]
    assert bucket.collective.startswith("low-rank")
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    assert (bucket.gain < 1) == bool(matrices)


@pytest.mark.mpi
def test_over_mpi(comm):
    reducer = mpicomp.Reducer(mpicomp.PowerSGD(rank=2), "low-rank", comm=comm)
    expected, _ = run(mpicomp.PowerSGD(rank=2), comm.size, 3, "low-rank:scatter-reduce")
    for step in range(3):
        means = reducer.reduce(gradients(step, comm.rank))
        for name, mean in means.items():
            np.testing.assert_allclose(mean, expected[step][name], rtol=1e-3, atol=1e-4)
    reducer.close()
