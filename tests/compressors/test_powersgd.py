"""PowerSGD against a slow reading of the paper."""

import itertools

import numpy as np
import pytest
from networks import Link
from worlds import Ranks

import mpicomp
from mpicomp.collectives import Context, bind
from mpicomp.compressors.accumulated import TRAILER, Accumulated, Piece
from mpicomp.compressors.powersgd import Matrix, orthogonalize, stacked
from mpicomp.mpi import LocalWorld

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
def test_powersgd_step_is_the_papers_algorithm(size, rank):
    """From the second step on, with what the first has left: residuals, and the right factors."""
    compressor = mpicomp.PowerSGD(rank=rank, min_compression_rate=0.1)
    _, reducers = run(compressor, size, 1)
    name, rows, columns, place = ("conv", 12, 27, 1) if rank == 3 else ("wide", 6, 40, 0)
    factor = reducers[0].state_dict()["memories"]["wide"]["factors"][place].astype(np.float64)
    residuals = [reducer.residual(name).astype(np.float64).reshape(rows, columns) for reducer in reducers]
    for step in range(1, 4):
        matrices = [gradients(step, r)[name].reshape(rows, columns) + residuals[r] for r in range(size)]
        basis = gram_schmidt(np.mean([matrix @ factor for matrix in matrices], axis=0))
        rights = [matrix.T @ basis for matrix in matrices]
        factor = np.mean(rights, axis=0)
        expected = basis @ factor.T
        residuals = [matrix - basis @ right.T for matrix, right in zip(matrices, rights, strict=True)]
    means, reducers = run(compressor, size, 4)
    np.testing.assert_allclose(means[3][name].reshape(rows, columns), expected, rtol=1e-3, atol=1e-4)
    for reducer, residual in zip(reducers, residuals, strict=True):
        np.testing.assert_allclose(reducer.residual(name).reshape(rows, columns), residual, rtol=1e-3, atol=1e-4)


TWINS = {"a.w": (8, 12), "a.b": (8,), "b.w": (8, 12), "b.b": (8,), "c.w": (8, 12), "d.w": (8, 12), "e.w": (12, 8)}


@pytest.mark.parametrize("rank", [1, 2])
def test_powersgd_batch_of_matrices_equals_each_alone(rank):
    """A step of a bucket of several, some of which begin at equal distances, from factors that are known."""
    compressor = mpicomp.PowerSGD(rank=rank, min_compression_rate=1)
    means, after = run(compressor, 2, 3, make=lambda step, r: gradients(step, r, TWINS))
    _, before = run(compressor, 2, 2, make=lambda step, r: gradients(step, r, TWINS))
    factors = before[0].state_dict()["memories"]["a.w"]["factors"]
    for name, factor in zip([name for name in TWINS if name.endswith("w")], factors, strict=True):
        matrices = [gradients(2, r, TWINS)[name] + before[r].residual(name) for r in range(2)]
        basis = gram_schmidt(np.mean([matrix @ factor for matrix in matrices], axis=0))
        factor = np.mean([matrix.T @ basis for matrix in matrices], axis=0)
        np.testing.assert_allclose(means[2][name], basis @ factor.T, rtol=1e-3, atol=1e-4)
    for name in ("a.b", "b.b"):  # sent whole
        expected = np.mean([gradients(2, r, TWINS)[name] for r in range(2)], axis=0)
        np.testing.assert_allclose(means[2][name], expected, rtol=1e-6, atol=1e-7)
    energy, left = 0.0, 0.0
    for name, rank in itertools.product(TWINS, range(2)):
        energy += np.square(gradients(2, rank, TWINS)[name] + before[rank].residual(name), dtype=np.float64).sum()
        left += np.square(after[rank].residual(name), dtype=np.float64).sum()
    assert after[0].last_step.buckets[0].gain == pytest.approx(1 - left / energy, rel=1e-5)
    assert [stack.count for stack in stacked(compressor.bind(*described(TWINS)).matrices)] == [3, 1, 1]


def described(shapes):
    return list(shapes), [int(np.prod(shape)) for shape in shapes.values()], list(shapes.values())


def test_powersgd_bucket_without_a_matrix_is_recorded_as_dense():
    shapes = {"b": (70,), "s": ()}
    means, (first, _) = run(mpicomp.PowerSGD(rank=1), 2, 2, make=lambda step, rank: gradients(step, rank, shapes))
    for name in shapes:
        both = [gradients(1, rank, shapes)[name].astype(np.float64) for rank in range(2)]
        np.testing.assert_allclose(means[1][name], np.mean(both, axis=0), rtol=1e-6)
    record = first.last_step.buckets[0]
    assert (record.rounds, record.ratio_reached) == (["allreduce"], 1.0)
    assert not first.residual("b").any()


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
def test_powersgd_rank_that_changes_keeps_known_columns(before, after):
    """The columns that both ranks have are those of the step before."""
    matrix = np.diag([8.0, 4, 2, 1, 0.5, 0.25]).astype(np.float32)
    memory = {}
    for step, rank in enumerate([before] * 30 + [after]):
        compressor = mpicomp.PowerSGD(rank=rank, min_compression_rate=0.1).bind(["w"], [36], [(6, 6)])
        scheme = bind(compressor, "low-rank")
        accumulated = Accumulated(np.empty(36 + TRAILER, np.float32), None, [Piece(0, matrix)])
        world = LocalWorld(1)
        (result,) = world.run([scheme.exchange(accumulated, Context(step=step, memory=memory))])
    found = result.mean.reshape(6, 6)
    kept = min(before, after)
    np.testing.assert_allclose(found[:kept, :kept], matrix[:kept, :kept], atol=1e-4)


WIDE, CONV = Matrix(0, 6, 40, 1), Matrix(247, 12, 27, 1)


@pytest.mark.parametrize(
    ("settings", "matrices"),
    [
        ({"rank": 1}, (WIDE, CONV)),
        ({"rank": 3}, (Matrix(247, 12, 27, 3),)),
        ({"rank": 7, "layers": {"*": 3}}, (Matrix(247, 12, 27, 3),)),
        ({"rank": 3, "min_compression_rate": 0.5}, (Matrix(0, 6, 40, 3), Matrix(247, 12, 27, 3), Matrix(571, 3, 2, 2))),
        # The first pattern that matches counts.
        ({"rank": 1, "layers": {"con*": 3, "c*": 2, "b": 5, "small": 9}}, (WIDE, Matrix(247, 12, 27, 3))),
    ],
)
def test_powersgd_compresses_the_matrices_that_pytorch_does(settings, matrices):
    compressor = mpicomp.PowerSGD(**settings)
    bound = compressor.bind(*described(SHAPES))
    assert bound.matrices == matrices
    assert mpicomp.get_compressor(compressor.get_config()) == compressor
    assert bound.get_config() == compressor.get_config()
    assert compressor.bind(*described(SHAPES)[:2]).matrices == ()


@pytest.mark.parametrize("size", [1, 3])
def test_powersgd_matrix_in_parts_equals_each_part_alone(size):
    """Ten rows in parts of at most four against parameters of four, four and two rows: bit for bit."""

    def whole(step, rank):
        return {"w": gradients(step, rank, {"w": (10, 20)})["w"], "b": gradients(step, rank)["b"]}

    def cut(step, rank):
        both = whole(step, rank)
        return {"w0": both["w"][:4], "w1": both["w"][4:8], "w2": both["w"][8:], "b": both["b"]}

    means, reducers = run(mpicomp.PowerSGD(rank=1, rows=4), size, 4, make=whole)
    parts, others = run(mpicomp.PowerSGD(rank=1), size, 4, make=cut)
    for mean, part in zip(means, parts, strict=True):
        assert mean["w"].tobytes() == b"".join(part[name].tobytes() for name in ("w0", "w1", "w2"))
        assert mean["b"].tobytes() == part["b"].tobytes()
    assert reducers[0].last_step.sent_bytes == others[0].last_step.sent_bytes
    # A part of one row saves nothing, and goes dense.
    [alone] = run(mpicomp.PowerSGD(rank=1, rows=3), 1, 1, make=lambda *_: {"w": np.ones((4, 20), np.float32)})[1]
    assert alone.last_step.buckets[0].ratio_reached == (3 + 20 + 20) / 80


def test_orthogonalize_of_any_matrix_is_orthonormal():
    random = np.random.default_rng(0)
    flat = np.outer(random.normal(size=9), np.ones(3))
    matrices = [random.normal(size=(9, 3)), flat, np.zeros((9, 3)), 1e-30 * flat]
    for matrix in matrices:
        basis = orthogonalize(matrix.astype(np.float32))
        np.testing.assert_allclose(basis.T @ basis, np.eye(3), atol=1e-6)
    bases = orthogonalize(np.array(matrices, np.float32))
    for basis, matrix in zip(bases, matrices, strict=True):
        assert np.array_equal(basis, orthogonalize(matrix.astype(np.float32)))


@pytest.mark.parametrize("shapes", [{"w": (400, 300), "b": (400,)}, {"b": (20_000,)}, {"w": (600, 500)}], ids=str)
def test_powersgd_collective_is_chosen_for_any_length(shapes):
    """A cost model times schemes on arrays of other lengths, into which a bucket's matrices do not fit."""
    ranks = Ranks(2, mpicomp.PowerSGD(rank=2), network=Link(latency=1e-4, bits=1e7))
    for step in range(3):
        ranks.reduce([gradients(step, rank, shapes) for rank in range(2)])
    bucket = ranks.reducers[0].last_step.buckets[0]
    assert bucket.collective.startswith("low-rank")
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    assert (bucket.gain < 1) == bool(matrices)
