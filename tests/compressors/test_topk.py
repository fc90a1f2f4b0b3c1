import numpy as np
import oracle
import pytest

from mpicomp import TopK
from mpicomp.compressors.accumulated import TAIL, Accumulated, Piece
from mpicomp.workspace import Workspace


def accumulated(gradient, residual=None, cuts=()):
    """Hand a gradient over in pieces that end at the given places."""
    parts = np.split(gradient, cuts)
    offsets = np.concatenate(([0], cuts)).astype(int)
    pieces = [Piece(int(offset), part) for offset, part in zip(offsets, parts, strict=True)]
    return Accumulated(np.full(gradient.size + TAIL, np.nan, gradient.dtype), residual, pieces)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 1.0])
def test_the_bound_from_the_step_before_never_changes_the_result(dtype, ratio):
    rng = np.random.default_rng(1)
    memory, workspace = {}, Workspace()
    residual = np.zeros(3001, dtype)
    # Scales that jump make the bound too high, too low and right.
    for scale in (1, 1.1, 100, 1e-6, 0, 1, 1, 1e-30):
        gradient = (scale * rng.laplace(size=3001)).astype(dtype)
        expected = gradient + residual
        state = accumulated(gradient, residual, cuts=(1, 1000, 1000, 2999))
        selection = TopK(ratio=ratio).select(state, memory, workspace)
        assert selection.indices.tolist() == oracle.largest(expected, oracle.kept(ratio, 3001))
        np.testing.assert_array_equal(selection.values, expected[selection.indices])
        residual = state.array().copy()
        residual[selection.indices] = 0


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(100),
        np.full(100, -2.5),
        np.full(100, 1e-42),
        np.full(100, 3e38),
        np.array([5.0]),
        np.array([0.0, 1.0, 0.0, -1.0, 1.0]),
        np.array([1.0, np.nan, np.inf, -np.inf, 2.0]),
    ],
    ids=["zeros", "equal", "denormal", "huge", "one", "ties", "nonfinite"],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0])
def test_awkward_arrays(array, dtype, ratio):
    array = array.astype(dtype)
    memory, workspace = {}, Workspace()
    for _ in range(3):  # with no bound, and with bounds from the steps before
        selection = TopK(ratio=ratio).select(accumulated(array), memory, workspace)
        assert selection.indices.tolist() == oracle.largest(array, oracle.kept(ratio, array.size))
        np.testing.assert_array_equal(selection.values, array[selection.indices])


def test_strided_and_narrow_pieces():
    wide = np.arange(20, dtype=np.float32)[::-2]
    half = np.arange(5, dtype=np.float16)
    brain = (np.arange(3, dtype=np.float32) * 100).view(np.uint32) >> 16
    swapped = np.array([7.0, -900.0], ">f4")
    buffer = np.empty(20 + TAIL, np.float32)
    pieces = [Piece(0, wide), Piece(10, half), Piece(15, brain.astype(np.uint16)), Piece(18, swapped)]
    state = Accumulated(buffer, np.ones(20, np.float32), pieces)
    expected = np.concatenate((wide, half, [0, 100, 200], [7, -900])) + 1
    selection = TopK(ratio=0.1).select(state, {}, Workspace())
    np.testing.assert_array_equal(state.array(), expected)
    assert selection.indices.tolist() == [17, 19]
    assert state.finite
    assert state.energy == float(np.sum(expected**2))
