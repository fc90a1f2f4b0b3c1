"""The header of packed, dense and vote messages: what it says of them, and what is refused."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpicomp
from mpicomp.compressors.wire import HEADER_BYTES, read_dense_header, read_dense_headers, write_dense_header
from mpicomp.errors import MessageError

COUNT = 1000


def message(compressor=mpicomp.QSGD(), count=COUNT):  # noqa: B008, a frozen value
    made = np.zeros(HEADER_BYTES + compressor.packed_bytes(count), np.uint8)
    write_dense_header(made, count, 3, 2.5, 0.5)
    return made


def test_header_has_the_documented_layout():
    made = message()
    assert made[:HEADER_BYTES].tobytes() == struct.pack("<BBHIdd", 1, 3, made.size // 8, COUNT, 2.5, 0.5)
    assert read_dense_header(made, COUNT) == (3, 2.5, 0.5)
    assert read_dense_headers(np.stack([made, made]), COUNT) == (3, 5.0, 1.0)


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (0, 2, "version must be 1, got 2; run one mpicomp on all ranks"),
        (1, 8, "flags must be below 8, got 8"),
        (2, 0, "it has 568 bytes, of which its sender has written 0 words of 8"),
        (5, 0, "1000 elements are expected, got 232"),
    ],
)
def test_wrong_field_is_named(place, value, text):
    made = message()
    made[place] = value
    with pytest.raises(MessageError, match=text):
        read_dense_header(made, COUNT)
    with pytest.raises(MessageError, match=f"^from rank 1: message: {text}"):
        read_dense_headers(np.stack([message(), made]), COUNT)


@given(bit=st.integers(0, 63))
def test_flipped_bit_is_refused_but_in_flags(bit):
    made = message()
    made[bit // 8] ^= 1 << bit % 8
    if 8 <= bit < 11:
        assert read_dense_header(made, COUNT)[0] == 3 ^ (1 << bit - 8)
    else:
        with pytest.raises(MessageError):
            read_dense_header(made, COUNT)


def test_lengths_that_do_not_fit_are_refused():
    """What was packed for other elements, or in other bits, or is torn."""
    with pytest.raises(MessageError, match="1000 elements are expected, got 999"):
        read_dense_header(message(count=999), COUNT)
    eight_bits = np.zeros(message(mpicomp.QSGD(bits=8)).size, np.uint8)
    eight_bits[: message().size] = message()
    with pytest.raises(
        MessageError, match=rf"it has {eight_bits.size} bytes, of which its sender has written 71 words"
    ):
        read_dense_header(eight_bits, COUNT)
    with pytest.raises(MessageError, match="at least 24 bytes are needed, got 16"):
        read_dense_header(message()[:16], COUNT)
    with pytest.raises(MessageError, match="it has 64 bytes"):
        read_dense_header(message()[:64], COUNT)
