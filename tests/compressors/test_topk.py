import numpy as np
import oracle
import pytest
from worlds import Ranks

from mpicomp import TopK, get_compressor
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import TRAILER, GradientWithResidual, Piece
from mpicomp.errors import ConfigurationError


def accumulated(gradient, residual=None, cuts=()):
    """Hand a gradient over in pieces that end at the given places."""
    parts = np.split(gradient, cuts)
    offsets = np.concatenate(([0], cuts)).astype(int)
    pieces = [Piece(int(offset), part) for offset, part in zip(offsets, parts, strict=True)]
    return GradientWithResidual(np.full(gradient.size + TRAILER, np.nan, gradient.dtype), residual, pieces)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 1.0])
def test_the_bound_from_the_step_before_never_changes_the_result(dtype, ratio):
    rng = np.random.default_rng(1)
    context = Context()
    residual = np.zeros(3001, dtype)
    # Scales that jump make the bound too high, too low and right.
    for scale in (1, 1.1, 100, 1e-6, 0, 1, 1, 1e-30):
        gradient = (scale * rng.laplace(size=3001)).astype(dtype)
        expected = gradient + residual
        state = accumulated(gradient, residual, cuts=(1, 1000, 1000, 2999))
        selection = TopK(ratio=ratio).select(state, context)
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
    context = Context()
    for _ in range(3):  # with no bound, and with bounds from the steps before
        selection = TopK(ratio=ratio).select(accumulated(array), context)
        assert selection.indices.tolist() == oracle.largest(array, oracle.kept(ratio, array.size))
        np.testing.assert_array_equal(selection.values, array[selection.indices])


def test_strided_and_narrow_pieces():
    wide = np.arange(20, dtype=np.float32)[::-2]
    half = np.arange(5, dtype=np.float16)
    brain = (np.arange(3, dtype=np.float32) * 100).view(np.uint32) >> 16
    swapped = np.array([7.0, -900.0], ">f4")
    buffer = np.empty(20 + TRAILER, np.float32)
    pieces = [Piece(0, wide), Piece(10, half), Piece(15, brain.astype(np.uint16)), Piece(18, swapped)]
    state = GradientWithResidual(buffer, np.ones(20, np.float32), pieces)
    expected = np.concatenate((wide, half, [0, 100, 200], [7, -900])) + 1
    selection = TopK(ratio=0.1).select(state, Context())
    np.testing.assert_array_equal(state.array(), expected)
    assert selection.indices.tolist() == [17, 19]
    assert state.finite
    assert state.energy == float(np.sum(expected**2))


def by_layer(array, sizes, ratios):
    """Select in every part on its own."""
    places, start = [], 0
    for size, ratio in zip(sizes, ratios, strict=True):
        chosen = oracle.largest(array[start : start + size], oracle.kept(ratio, size))
        places += [start + place for place in chosen]
        start += size
    return places


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("cuts", [(), (500, 520, 1000), (100, 510)], ids=["whole", "layers", "across"])
def test_a_ratio_for_every_layer(dtype, cuts):
    names, sizes = ["conv.weight", "conv.bias", "embedding.weight", "fc.weight", "out.weight"], [500, 20, 480, 700, 300]
    compressor = TopK(ratio=0.05, layers={"*.bias": 1.0, "embedding.*": 0.01}).bind(names, sizes)
    # What no pattern matches is one selection wherever it stands together.
    parts, ratios = [500, 20, 480, 1000], [0.05, 1.0, 0.01, 0.05]
    rng = np.random.default_rng(4)
    context = Context()
    for scale in (1, 1, 50, 1e-3, 1):
        array = (scale * rng.laplace(size=2000)).astype(dtype)
        selection = compressor.select(accumulated(array, cuts=cuts), context)
        assert selection.indices.tolist() == by_layer(array, parts, ratios)
        np.testing.assert_array_equal(selection.values, array[selection.indices])
        assert selection.indices.size == compressor.count(2000)


def test_layers_are_part_of_the_configuration():
    compressor = TopK(ratio=0.1, layers={"a": 0.5})
    assert get_compressor(compressor.get_config()) == compressor
    assert compressor.bind(["a", "b"], [10, 10]).get_config() == compressor.get_config()
    assert TopK().bind(["a"], [10]) == TopK()
    with pytest.raises(ConfigurationError, match=r"topk: layers\['a'\] is the kept fraction"):
        TopK(layers={"a": 2})
    with pytest.raises(ConfigurationError, match="topk: layers must map names to ratios"):
        TopK(layers=0.1)


def test_layers_through_a_reducer():
    together = Ranks(3, TopK(ratio=0.1, layers={"bias": 1.0}))
    rng = np.random.default_rng(5)
    for _ in range(3):
        gradients = [
            {"weight": rng.normal(size=(20, 10)).astype(np.float32), "bias": rng.normal(size=10).astype(np.float32)}
            for _ in range(3)
        ]
        means = together.reduce(gradients)
        exact = np.mean([gradient["bias"] for gradient in gradients], axis=0)
        np.testing.assert_allclose(means[0]["bias"], exact, rtol=1e-5, atol=1e-7)
        assert not together.residual_sum("bias").any()
        assert together.reducers[0].last_step.buckets[0].ratio_reached == 30 / 210


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_select_the_same(threads):
    array = np.random.default_rng(6).laplace(size=300_000).astype(np.float32)
    context, expected = Context(), oracle.kept(0.001, array.size)
    order = np.sort(np.argsort(-np.abs(array), kind="stable")[:expected])
    for _ in range(3):
        state = accumulated(array)
        state.threads = threads
        assert TopK(ratio=0.001).select(state, context).indices.tolist() == order.tolist()
