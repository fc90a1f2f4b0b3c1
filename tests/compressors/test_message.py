import numpy as np
import pytest

from mpicomp.compressors.base import Selection
from mpicomp.compressors.message import message_bytes, read_message, write_message
from mpicomp.errors import MessageError


def message(count=3, dtype=np.float32):
    rng = np.random.default_rng(count)
    selection = Selection(
        np.sort(rng.integers(0, 2**32, count)).astype(np.uint32), rng.normal(size=count).astype(dtype)
    )
    out = np.zeros(message_bytes(count, np.dtype(dtype).itemsize), np.uint8)
    write_message(out, selection, flags=2, energy=1.5, kept=0.5)
    return out, selection


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 1000])
def test_round_trip(count, dtype):
    out, selection = message(count, dtype)
    assert out.size % 8 == 0
    read = read_message(out, np.dtype(dtype))
    np.testing.assert_array_equal(read.selection.indices, selection.indices)
    np.testing.assert_array_equal(read.selection.values, selection.values)
    assert (read.flags, read.energy, read.kept) == (2, 1.5, 0.5)


def test_the_bytes_are_what_the_table_says():
    out = np.zeros(message_bytes(1, 4), np.uint8)
    write_message(out, Selection(np.array([258], np.uint32), np.array([1], np.float32)), 1, 4.0, 2.0)
    expected = "0101040001000000000000000000104000000000000000400000803f02010000"
    assert out.tobytes().hex() == expected


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (0, 9, "version must be 1, got 9"),
        (2, 8, "4 bytes, got 8"),
        (4, 200, "200 values make"),
        (7, 255, "values make"),
    ],
)
def test_a_corrupted_header_is_refused(place, value, text):
    out, _ = message()
    out[place] = value
    with pytest.raises(MessageError, match=text):
        read_message(out, np.dtype(np.float32))


@pytest.mark.parametrize("length", [0, 8, 23])
def test_a_torn_message_is_refused(length):
    with pytest.raises(MessageError, match="at least 24 bytes"):
        read_message(message()[0][:length], np.dtype(np.float32))
    with pytest.raises(MessageError, match="values make"):
        read_message(message()[0][:32], np.dtype(np.float32))
