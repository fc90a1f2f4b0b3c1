import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpicomp.kernels import gpu

ALL = np.arange(1 << 16, dtype=np.uint16)
LARGEST = {"fp16": 65504.0, "bf16": float.fromhex("0x1.fep127")}


def meaning(half, wire):
    """The number that 16 bits encode, by Python's struct and the definition of bfloat16."""
    if wire == "fp16":
        return struct.unpack("<e", struct.pack("<H", half))[0]
    return struct.unpack("<f", struct.pack("<I", half << 16))[0]


@pytest.fixture(scope="module", params=["fp16", "bf16"])
def table(request):
    return request.param, np.array([meaning(int(half), request.param) for half in ALL], np.float64)


def nearest(value, wire, numbers):
    """Round to nearest even by searching all finite numbers of the format; saturate."""
    if np.isnan(value) or np.isinf(value):
        return value
    if abs(value) >= LARGEST[wire]:
        return np.copysign(LARGEST[wire], value)
    halves = ALL[np.isfinite(numbers)]
    distance = np.abs(numbers[halves] - value)
    closest = halves[distance == distance.min()]
    even = [half for half in closest if half % 2 == 0] or list(closest)
    return numbers[even[0]]


@pytest.mark.parametrize("shift", [0, 1])
def test_every_16_bit_number_widens_and_survives(kernels, dtype, table, shift):
    kernels.shift = shift
    wire, numbers = table
    out, total = np.empty(ALL.size, dtype), np.ones(ALL.size, dtype)
    kernels.widen(ALL, wire, out)
    np.testing.assert_array_equal(kernels.seen(out), kernels.seen(numbers.astype(dtype)))
    kernels.widen_add(ALL, wire, total)
    np.testing.assert_array_equal(total, numbers.astype(dtype) + dtype(1))
    finite = np.isfinite(numbers)
    halves, sent = np.empty(finite.sum(), np.uint16), np.empty(finite.sum(), dtype)
    kernels.narrow(numbers[finite].astype(dtype), wire, halves, sent)
    np.testing.assert_array_equal(sent, numbers[finite].astype(dtype))
    np.testing.assert_array_equal(halves, ALL[finite])


FLOATS = st.floats(width=32) | st.floats(-(2**-13), 2**-13, width=32) | st.floats(60000, 70000, width=32)


@given(values=st.lists(FLOATS, min_size=1, max_size=3))
def test_narrowing_rounds_to_nearest_even_and_saturates(kernels, table, values):
    wire, numbers = table
    array = kernels.seen(np.array(values, np.float32))
    out, sent = np.empty(array.size, np.uint16), np.empty(array.size, np.float32)
    lost = kernels.narrow(array, wire, out, sent)
    np.testing.assert_array_equal(sent, np.array([nearest(value, wire, numbers) for value in array], np.float32))
    np.testing.assert_array_equal([meaning(int(half), wire) for half in out], sent)
    if np.isfinite(array).all():
        np.testing.assert_allclose(lost, np.square(array.astype(np.float64) - sent).sum(), rtol=1e-6)


def test_a_float64_beyond_float32_saturates(kernels, table):
    wire, _ = table
    out, sent = np.empty(2, np.uint16), np.empty(2)
    kernels.narrow(np.array([1e300, -1e300]), wire, out, sent)
    assert sent.tolist() == [LARGEST[wire], -LARGEST[wire]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_small_halves_stay_where_subnormals_are_zero(place, dtype):
    """Gradients below 6e-5 are subnormal as halves, and CuPy has kernels treat subnormal float32 as zero."""
    halves = ALL[ALL & 0x7C00 != 0x7C00]
    array = halves.view(np.float16).astype(dtype)
    out, wide = place.empty(halves.size, np.uint16), place.empty(halves.size, dtype)
    sent, total = place.empty(halves.size, dtype), place.put(np.ones(halves.size, dtype))
    with place.flushing():
        gpu.narrow(place.put(array), "fp16", out, sent)
        gpu.widen(out, "fp16", wide)
        gpu.widen_add(out, "fp16", total)
    np.testing.assert_array_equal(out.get(), halves)
    np.testing.assert_array_equal(sent.get(), array)
    np.testing.assert_array_equal(wide.get(), array)
    np.testing.assert_array_equal(total.get(), 1 + array)
