import numpy as np
import pytest
from mpicomp.kernels import cpu
from mpicomp.kernels.cpu import products

TILE = products._TILE
PLACES = [1, 2, 7, TILE - 1, TILE, TILE + 1, 2 * TILE + 3]


def layer(inputs, outputs, taps, dtype, seed=0):
    """Whole numbers, so that sums are exact in whatever order they are made."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(-4, 5, (outputs, inputs, taps)).astype(np.float32)
    bias = rng.integers(-9, 10, outputs).astype(np.float32)
    scratch = np.full(cpu.conv_room(inputs), np.nan, dtype)
    return weights, bias, scratch


def values_of(channels, places, dtype, seed=1):
    return np.random.default_rng(seed).integers(-20, 21, (channels, places)).astype(dtype)


def leaky(sums, slope, gate):
    return np.where(gate < 0, slope * sums, sums)


def halved(values, weights, bias):
    """As it is defined: three taps around every second place, zeros beyond the ends."""
    padded = np.pad(values, ((0, 0), (1, 1)))
    places = values.shape[1] // 2
    windows = np.stack([padded[:, tap : tap + 2 * places : 2] for tap in range(3)])  # tap, input, place
    return np.einsum("oik,kit->ot", weights, windows) + bias[:, None]


def doubled(values, weights, bias):
    """Every input adds to three outputs; weights come as (inputs, outputs, taps)."""
    places = values.shape[1]
    out = np.zeros((weights.shape[1], 2 * places + 2))
    for t in range(places):
        for tap in range(3):
            out[:, 2 * t + tap] += values[:, t] @ weights[:, :, tap]
    return out[:, 1:-1] + bias[:, None]


LAYERS = pytest.mark.parametrize(("inputs", "outputs"), [(1, 3), (3, 1), (4, 5)])


@LAYERS
@pytest.mark.parametrize(("name", "reference"), [("conv_halve", halved), ("conv_double", doubled)])
def test_convolutions_are_those_of_the_definition(kernels, dtype, inputs, outputs, name, reference):
    weights, bias, scratch = layer(inputs, outputs, 3, dtype)
    if name == "conv_double":
        weights = np.ascontiguousarray(weights.transpose(1, 0, 2))
    for places in PLACES:
        values = values_of(inputs, 2 * places if name == "conv_halve" else places, dtype)
        sums = reference(values, weights, bias)
        out = np.full(sums.shape, np.nan, dtype)
        getattr(kernels, name)(values, weights, bias, 0.25, out, scratch, out)
        np.testing.assert_array_equal(out, leaky(sums, 0.25, sums))


@LAYERS
def test_sums_of_channels(kernels, dtype, inputs, outputs):
    weights, bias, _ = layer(inputs, outputs, 1, dtype)
    for places in PLACES:
        values, out = values_of(inputs, places, dtype), np.full((outputs, places), np.nan, dtype)
        kernels.conv_mix(values, weights[:, :, 0].copy(), bias, out)
        np.testing.assert_array_equal(out, weights[:, :, 0] @ values + bias[:, None])


@pytest.mark.parametrize(("name", "reference"), [("conv_halve", halved), ("conv_double", doubled)])
def test_a_gate_decides_in_place_of_the_sums(kernels, dtype, name, reference):
    weights, bias, scratch = layer(2, 2, 3, dtype)
    values = values_of(2, 12, dtype)
    sums = reference(values, weights, bias)
    gate = values_of(*sums.shape, dtype, seed=5)
    gate[0, :3] = 0, -0.0, np.nan  # none of them is negative
    out = np.empty(sums.shape, dtype)
    getattr(kernels, name)(values, weights, bias, 0.25, gate, scratch, out)
    np.testing.assert_array_equal(out, leaky(sums, 0.25, gate))
    assert (leaky(sums, 0.25, gate) != leaky(sums, 0.25, sums)).any()


def test_convolutions_round_one_product_and_sum_at_a_time(kernels):
    """Fused, or in another order, some of these sums would have other bits."""
    rng = np.random.default_rng(4)
    values = rng.normal(size=(3, 200)).astype(np.float32)
    weights, bias = rng.normal(size=(2, 3, 3)).astype(np.float32), rng.normal(size=2).astype(np.float32)
    out = np.empty((2, 100), np.float32)
    kernels.conv_halve(values, weights, bias, 0.25, out, np.empty(cpu.conv_room(3), np.float32), out)
    padded = np.pad(values, ((0, 0), (1, 1)))
    sums = np.repeat(bias[:, None], 100, axis=1)
    for i in range(3):
        for tap in range(3):
            sums = sums + weights[:, i, tap, None] * padded[i, tap : tap + 200 : 2]
    assert out.tobytes() == leaky(sums, np.float32(0.25), sums).astype(np.float32).tobytes()
