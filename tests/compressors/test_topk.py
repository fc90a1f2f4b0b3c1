"""Exact selections, and the sums that they are made of."""

import numpy as np
import oracle
import pytest
from estimates import accumulated

from mpicomp import TopK, get_compressor
from mpicomp.compressors.accumulated import TRAILER, Accumulated, Piece, Velocity
from mpicomp.compressors.context import Context
from mpicomp.errors import ConfigurationError


def test_topk_of_strided_and_narrow_pieces_selects_of_the_sum():
    wide = np.arange(20, dtype=np.float32)[::-2]
    half = np.arange(5, dtype=np.float16)
    brain = (np.arange(3, dtype=np.float32) * 100).view(np.uint32) >> 16
    swapped = np.array([7.0, -900.0], ">f4")
    buffer = np.empty(20 + TRAILER, np.float32)
    pieces = [Piece(0, wide), Piece(10, half), Piece(15, brain.astype(np.uint16)), Piece(18, swapped)]
    state = Accumulated(buffer, np.ones(20, np.float32), pieces)
    expected = np.concatenate((wide, half, [0, 100, 200], [7, -900])) + 1
    selection = TopK(ratio=0.1).select(state, Context())
    np.testing.assert_array_equal(state.array(), expected)
    assert selection.indices.tolist() == [17, 19]
    assert state.finite
    assert state.energy == float(np.sum(expected**2))


def by_layer(array, sizes, ratios):
    places, start = [], 0
    for size, ratio in zip(sizes, ratios, strict=True):
        chosen = oracle.largest(array[start : start + size], oracle.kept(ratio, size))
        places += [start + place for place in chosen]
        start += size
    return places


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("cuts", [(), (500, 520, 1000), (100, 510)], ids=["whole", "layers", "across"])
def test_topk_layers_have_their_ratios(dtype, cuts):
    names, sizes = ["conv.weight", "conv.bias", "embedding.weight", "fc.weight", "out.weight"], [500, 20, 480, 700, 300]
    compressor = TopK(ratio=0.05, layers={"*.bias": 1.0, "embedding.*": 0.01}).bind(names, sizes)
    # Neighbors that match no pattern are one selection.
    parts, ratios = [500, 20, 480, 1000], [0.05, 1.0, 0.01, 0.05]
    rng = np.random.default_rng(4)
    context = Context()
    for scale in (1, 1, 50, 1e-3, 1):
        array = (scale * rng.laplace(size=2000)).astype(dtype)
        selection = compressor.select(accumulated(array, cuts=cuts), context)
        assert selection.indices.tolist() == by_layer(array, parts, ratios)
        np.testing.assert_array_equal(selection.values, array[selection.indices])
        assert selection.indices.size == compressor.count(2000)


def test_topk_layers_are_part_of_the_configuration():
    compressor = TopK(ratio=0.1, layers={"a": 0.5})
    assert get_compressor(compressor.get_config()) == compressor
    assert compressor.bind(["a", "b"], [10, 10]).get_config() == compressor.get_config()
    assert TopK().bind(["a"], [10]) == TopK()
    with pytest.raises(ConfigurationError, match=r"topk: layers\['a'\] is the kept fraction"):
        TopK(layers={"a": 2})
    with pytest.raises(ConfigurationError, match="topk: layers must map names to ratios"):
        TopK(layers=0.1)


PIECES = (7, 1, 20)


def make_sum(dtype=np.float32, momentum=False, turned=False):
    """Return a sum of three pieces; ``turned`` makes one of them an array that cannot be cut."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=size).astype(dtype) for size in PIECES]
    if turned:
        arrays[2] = np.ascontiguousarray(arrays[2].reshape(4, 5).T).T
    numel = sum(PIECES)
    pieces = [Piece(offset, array) for offset, array in zip((0, 7, 8), arrays, strict=True)]
    velocity = Velocity(np.ones(numel, np.float32), np.zeros(numel, np.float32), 0.9, True) if momentum else None
    residual = rng.normal(size=numel).astype(np.float32)
    return Accumulated(np.full(numel + TRAILER, np.nan, np.float32), residual, pieces, scale=0.5, velocity=velocity)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize(("momentum", "turned"), [(False, False), (True, False), (False, True)])
def test_sum_by_parts_is_that_of_a_sweep(dtype, momentum, turned):
    whole, parts = make_sum(dtype, momentum, turned), make_sum(dtype, momentum, turned)
    expected = whole.array()
    for start, stop in [(5, 12), (0, 5), (12, 12), (12, 28)]:
        assert parts.part(start, stop).tobytes() == expected[start:stop].tobytes()
    assert parts.is_computed
    assert parts.array().tobytes() == expected.tobytes()
    assert parts.finite
    assert parts.energy == pytest.approx(whole.energy)
    np.testing.assert_allclose(parts.with_trailer()[-TRAILER:], whole.with_trailer()[-TRAILER:], rtol=1e-6)


def test_sum_of_a_part_computes_nothing_else():
    parts = make_sum()
    parts.part(5, 12)
    assert not parts.is_computed
    assert np.flatnonzero(~np.isnan(parts.memory)).tolist() == list(range(5, 12))


def test_sum_of_a_stale_rank_is_zeros():
    stale = Accumulated(np.full(3 + TRAILER, np.nan, np.float32), None, [], stale=True)
    assert stale.part(1, 3).tolist() == [0, 0]
    assert stale.is_computed
