"""What every compressor that estimates a threshold has to stand."""

import copy
import json

import numpy as np
import oracle

from mpicomp import Context
from mpicomp.compressors.accumulated import TRAILER, Accumulated, Piece

AWKWARD = {
    "zeros": np.zeros(3000),
    "equal": np.full(3000, -2.5),
    "many equal": np.full(9000, 0.1),
    "denormal": np.full(3000, 1e-42),
    "denormals": np.arange(3000) * 1e-44,
    "huge": np.full(3000, 3.3e38),
    "huge and small": np.concatenate(([3.3e38], np.linspace(1e-30, 1, 2999))),
    "one": np.array([5.0]),
    "two": np.array([0.0, -1.0]),
    "three": np.array([1.0, -3.0, 2.0]),
    "one among zeros": np.eye(1, 3000, 1234)[0],
    "few among zeros": np.where(np.arange(3000) % 1000 == 7, 2.0, 0.0),
    "two magnitudes": np.where(np.arange(9000) % 3 == 0, 1.0, -1e-3),
    "ties": np.arange(3000) % 7 - 3.0,
    "nonfinite": np.where(np.arange(3000) % 500 == 3, np.inf, np.where(np.arange(3000) == 9, np.nan, 1.0)),
    "nan": np.full(3000, np.nan),
    "infinite": np.full(3000, -np.inf),
}


def accumulated(gradient, residual=None, cuts=()):
    """Hand a gradient over in pieces that end at the given places."""
    parts = np.split(gradient, cuts)
    offsets = np.concatenate(([0], cuts)).astype(int)
    pieces = [Piece(int(offset), part) for offset, part in zip(offsets, parts, strict=True)]
    return Accumulated(np.full(gradient.size + TRAILER, np.nan, gradient.dtype), residual, pieces)


def select(compressor, array, context):
    """Select, check what every selection must be, and give copies: indices and values."""
    selection = compressor.select(accumulated(array, cuts=(array.size // 3,)), context)
    indices, values = selection.indices.copy(), selection.values.copy()
    assert indices.dtype == np.uint32
    assert values.dtype == array.dtype
    assert (np.diff(indices.astype(np.int64)) > 0).all()
    np.testing.assert_array_equal(values, array[indices])
    return indices, values


def sequences(size, dtype, seed=1):
    """Arrays of steps whose scales and tails jump: bounds of the step before are too high, too low and right."""
    rng = np.random.default_rng(seed)
    for scale in (1, 1.1, 1, 100, 1e-6, 1e-6, 0, 1, 0.95, 1e-30, 1e-30):
        yield (scale * rng.laplace(size=size)).astype(dtype)
    for draw in (rng.normal, rng.uniform, rng.standard_cauchy, rng.normal):
        for _ in range(2):
            yield draw(size=size).astype(dtype)


def check_memory_changes_nothing(compressor, size, dtype):
    """Compare what is selected with the memory of the steps before to what is selected with none, and with junk."""
    context = Context(seed=3)
    for step, array in enumerate(sequences(size, dtype)):
        fresh = select(compressor, array, Context(seed=3, step=step))
        context.step = step
        for _ in range(2):
            indices, values = select(compressor, array, context)
            assert indices.tolist() == fresh[0].tolist()
            assert values.tobytes() == fresh[1].tobytes()
        for bound in (5e-324, 1e-42, 0.5, 3.0, 1e38, 1e300):
            memory = copy.deepcopy(context.memory)
            context.memory.update({key: bound for key in memory if key.endswith(".bound")})
            assert select(compressor, array, context)[0].tolist() == fresh[0].tolist()
            context.memory = memory
        # The sum may have been made by another before.
        state = accumulated(array)
        state.array()
        assert compressor.select(state, context).indices.tolist() == fresh[0].tolist()


def check_awkward(compressor, name, dtype, steps):
    """Check that selections of awkward arrays are bounded, and not empty if an element is not zero."""
    with np.errstate(over="ignore", under="ignore"):
        array = AWKWARD[name].astype(dtype)
    k = oracle.kept(compressor.ratio, array.size)
    context, first = Context(), None
    for step in range(steps):  # with no bound, and with bounds from the steps before
        indices, _ = select(compressor, array, context)
        assert all(0 < value < np.inf for key, value in context.memory.items() if key.endswith((".bound", ".gap")))
        json.dumps(context.memory, allow_nan=False)
        if compressor.count(array.size) is None:
            assert indices.size <= 4 * k + 1024
            assert (indices.size > 0) == array.any()
        else:
            assert indices.size == k
        first = indices if first is None else first
        assert step > 3 or indices.tolist() == first.tolist()  # SIDCo's stages adapt after five steps
        if compressor.id == "topk" or not np.isfinite(array).all():
            assert indices.tolist() == oracle.largest(array, k)


def largest_without_zeros(array, k):
    return oracle.largest(array, min(k, np.count_nonzero(array)))


def bounded(array, threshold, k):
    """Select what exceeds a threshold, with the rule for estimates that fail."""
    indices = np.flatnonzero(np.abs(array) > array.dtype.type(threshold))
    if not 0 < threshold < np.inf or not 0 < indices.size <= 4 * k + 1024:
        return largest_without_zeros(array, k)
    return indices.tolist()
