"""What learned codes are made of gives the bits of `mpicomp.kernels.cpu`: in an emulation on the host, and on a GPU."""

import numpy as np
import pytest
from gpu.alike import assert_alike
from marks import slow
from mpicomp.kernels import cpu, gpu

DTYPES = [np.float32, slow(np.float64)]
LAYERS = [(1, 3), (3, 1), (8, 16)]
PLACES = [1, 2, 7, 511, 700]


def drawn(shape, dtype, seed):
    """Numbers whose sums depend on the order in which they are added up."""
    random = np.random.default_rng(seed)
    return (random.standard_normal(shape) * 10.0 ** random.integers(-3, 4, shape)).astype(dtype)


def put(place, array):
    return place.put(array).reshape(array.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (4, 16), (7, 8)])
@pytest.mark.parametrize("size", [1, 7, 16, 17, 100, 5000])
def test_blocks(place, dtype, shape, size):
    values, matrix = drawn(size, dtype, 0), drawn(shape, np.float32, 1)
    code, out = np.empty(-(-size // shape[1]) * shape[0], dtype), np.empty(size, dtype)
    cpu.encode_blocks(values, matrix, code)
    cpu.decode_blocks(code, matrix, out)
    there_code, there_out = place.empty(code.size, dtype), place.empty(size, dtype)
    there_matrix = put(place, matrix)
    with place.quiet():
        gpu.encode_blocks(place.put(values), there_matrix, there_code)
        gpu.decode_blocks(there_code, there_matrix, there_out)
    assert_alike(there_code, code)
    assert_alike(there_out, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), LAYERS)
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["conv_halve", "conv_double"])
def test_layers(place, dtype, inputs, outputs, places, gated, name):
    halves = name == "conv_halve"
    values = drawn((inputs, 2 * places if halves else places), dtype, 0)
    weights = drawn((outputs, inputs, 3) if halves else (inputs, outputs, 3), np.float32, 1)
    bias = drawn(outputs, np.float32, 2)
    out = np.empty((outputs, places if halves else 2 * places), dtype)
    gate = drawn(out.shape, dtype, 3) if gated else out
    getattr(cpu, name)(values, weights, bias, 0.1, gate, np.empty(cpu.conv_room(inputs), dtype), out)
    there = place.empty(out.size, dtype).reshape(out.shape)
    scratch = place.empty(gpu.conv_room(inputs), dtype)
    arrays = [put(place, own) for own in (values, weights, bias)]
    with place.quiet():
        getattr(gpu, name)(*arrays, 0.1, put(place, gate) if gated else there, scratch, there)
    assert_alike(there.reshape(-1), out.reshape(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), LAYERS)
@pytest.mark.parametrize("places", PLACES)
def test_channels_together(place, dtype, inputs, outputs, places):
    values, weights, bias = (
        drawn((inputs, places), dtype, 0),
        drawn((outputs, inputs), np.float32, 1),
        drawn(outputs, np.float32, 2),
    )
    out = np.empty((outputs, places), dtype)
    cpu.conv_mix(values, weights, bias, out)
    there = place.empty(out.size, dtype).reshape(out.shape)
    with place.quiet():
        gpu.conv_mix(*(put(place, own) for own in (values, weights, bias)), there)
    assert_alike(there.reshape(-1), out.reshape(-1))
