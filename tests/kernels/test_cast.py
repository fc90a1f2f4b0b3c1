import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import slow
from mpicomp.kernels import cpu

ALL = np.arange(1 << 16, dtype=np.uint16)
LARGEST = {"fp16": 65504.0, "bf16": float.fromhex("0x1.fep127")}


def meaning(half, wire):
    """What 16 bits stand for, from Python's own struct and the definition of bfloat16."""
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


@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
def test_every_number_widens_to_what_it_means(table, dtype):
    wire, numbers = table
    out = np.empty(ALL.size, dtype)
    cpu.widen(ALL, wire, out)
    np.testing.assert_array_equal(out, numbers.astype(dtype))
    total = np.ones(ALL.size, dtype)
    cpu.widen_add(ALL, wire, total)
    np.testing.assert_array_equal(total, numbers.astype(dtype) + dtype(1))


@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
def test_every_number_survives(table, dtype):
    wire, numbers = table
    out, sent = np.empty(ALL.size, np.uint16), np.empty(ALL.size, dtype)
    cpu.narrow(numbers.astype(dtype), wire, out, sent)
    np.testing.assert_array_equal(sent, numbers.astype(dtype))
    number = ~np.isnan(numbers)
    np.testing.assert_array_equal(out[number], ALL[number])


@given(value=st.floats(width=32) | st.floats(-(2**-13), 2**-13, width=32) | st.floats(60000, 70000, width=32))
def test_rounding_is_to_nearest_even_and_saturates(table, value):
    wire, numbers = table
    array = np.array([value], np.float32)
    out, sent = np.empty(1, np.uint16), np.empty(1, np.float32)
    lost = cpu.narrow(array, wire, out, sent)
    np.testing.assert_array_equal(sent[0], np.float32(nearest(value, wire, numbers)))
    np.testing.assert_array_equal(meaning(int(out[0]), wire), sent[0])
    if np.isfinite(value):
        np.testing.assert_allclose(lost, (value - float(sent[0])) ** 2)


def test_a_float64_beyond_float32_saturates(table):
    wire, _ = table
    out, sent = np.empty(2, np.uint16), np.empty(2)
    cpu.narrow(np.array([1e300, -1e300]), wire, out, sent)
    assert sent.tolist() == [LARGEST[wire], -LARGEST[wire]]


def test_sent_is_optional():
    out = np.empty(3, np.uint16)
    cpu.narrow(np.array([1, 2, 3], np.float32), "fp16", out)
    assert out.view(np.float16).tolist() == [1, 2, 3]
