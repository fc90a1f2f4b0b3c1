import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mpicomp.kernels import cpu

GUARD = 8  # words or elements around every array that a kernel gets
SIZES = [(0, 0), (0, 7), (1, 1), (1, 2), (1, 2**32 - 1), (1, 2**32), (2, 3), (64, 64), (65, 10**6), (1000, 1001)]


def bits_of(count, numel):
    return max(0, int(np.floor(np.log2(numel / count)))) if count else 0


def code_of(indices, numel):
    """Elias-Fano as it is defined, in characters: low parts, and the gaps of the high parts in unary."""
    if not indices:
        return b""
    bits = bits_of(len(indices), numel)
    low = "".join(format(index % 2**bits, f"0{bits}b")[::-1] for index in indices) if bits else ""
    upper, high = "", 0
    for index in indices:
        upper += "0" * ((index >> bits) - high) + "1"
        high = index >> bits
    upper = upper.ljust(len(indices) + ((numel - 1) >> bits) + 1, "0")
    words = [part.ljust(-(-len(part) // 64) * 64, "0") for part in (low, upper)]
    stream = "".join(words)
    return bytes(int(stream[place : place + 8][::-1], 2) for place in range(0, len(stream), 8))


def encode(indices, numel):
    """Encode between guards; also tell whether the kernel accepted the indices."""
    memory = np.full(cpu.index_bytes(len(indices), numel) // 8 + 2 * GUARD, 0xA5A5A5A5A5A5A5A5, np.uint64)
    accepted = cpu.encode_indices(np.array(indices, np.uint32), numel, memory[GUARD:-GUARD])
    assert (memory[:GUARD] == 0xA5A5A5A5A5A5A5A5).all()
    assert (memory[-GUARD:] == 0xA5A5A5A5A5A5A5A5).all()
    return memory[GUARD:-GUARD].tobytes(), accepted


def decode(code, count, numel):
    """Decode between guards; None where the code was refused."""
    memory = np.full(count + 2 * GUARD, 0xA5A5A5A5, np.uint32)
    source = np.frombuffer(bytearray(bytes(64) + code + b"\xff" * 64), np.uint8)[64 : 64 + len(code)]
    accepted = cpu.decode_indices(source, count, numel, memory[GUARD : GUARD + count])
    assert (memory[:GUARD] == 0xA5A5A5A5).all()
    assert (memory[GUARD + count :] == 0xA5A5A5A5).all()
    return memory[GUARD : GUARD + count].tolist() if accepted else None


@st.composite
def selections(draw):
    """Ascending indices and what they are below: anywhere, or all near one place."""
    numel = draw(st.integers(1, 300) | st.integers(1, 10**5) | st.integers(2**32 - 10**5, 2**32))
    start = draw(st.integers(0, numel - 1) | st.just(0) | st.just(max(0, numel - 200)))
    stop = draw(st.just(numel) | st.integers(start + 1, min(numel, start + 200)))
    indices = draw(st.sets(st.integers(start, stop - 1), max_size=150))
    return sorted(indices), numel


@given(selections())
@example(([], 0))
@example(([0], 1))
@example(([2**32 - 2], 2**32 - 1))
@example((list(range(500)), 500))
@example((list(range(10**6 - 100, 10**6)), 10**6))
@example((list(range(300)), 2**32 - 1))
@example((list(range(2**32 - 301, 2**32 - 1)), 2**32 - 1))
def test_the_code_is_the_one_of_the_definition_and_comes_back(selection):
    indices, numel = selection
    code, accepted = encode(indices, numel)
    assert accepted
    assert code == code_of(indices, numel)
    assert decode(code, len(indices), numel) == indices


@pytest.mark.parametrize(("count", "numel"), [(25_600, 25_600_000), (200_000, 10**6), (3000, 2**32 - 1), (5000, 5000)])
def test_large_selections_come_back(count, numel):
    rng = np.random.default_rng(count)
    chosen = np.unique(rng.integers(0, numel, count)) if count < numel else np.arange(numel)
    clustered = chosen.size
    for indices in (chosen, np.arange(clustered), np.arange(numel - clustered, numel)):
        code, accepted = encode(indices, numel)
        assert accepted
        np.testing.assert_array_equal(decode(code, indices.size, numel), indices)


def test_a_selection_of_a_thousandth_takes_12_bits_an_index():
    assert 8 * cpu.index_bytes(25_600, 25_600_000) <= 12 * 25_600
    assert 8 * cpu.index_bytes(64, 64_000) <= 14 * 64  # padding counts


@given(st.integers(1, 10**7), st.integers(0, 2**32 - 1))
@example(1, 1)
@example(1, 2**32)
def test_the_length_is_the_least_that_low_bits_can_make_it(count, more):
    numel = min(2**32, count + more)
    lengths = [8 * (-(-count * bits // 64) + -(-(count + ((numel - 1) >> bits) + 1) // 64)) for bits in range(33)]
    assert cpu.index_bytes(count, numel) % 8 == 0
    assert cpu.index_bytes(count, numel) <= min(lengths) + 8  # rounding to words


@given(selections(), st.data())
def test_wrong_indices_give_a_code_that_is_refused(selection, data):
    indices, numel = selection
    bad = data.draw(st.sampled_from([numel, numel + 1, 2**32 - 1]).filter(lambda index: index < 2**32) | st.just(0))
    place = data.draw(st.integers(0, len(indices)))
    indices = [*indices[:place], bad, *indices[place:]]
    right = indices == sorted(set(indices)) and indices[-1] < numel
    assert cpu.ascending_below(np.array(indices, np.uint32), numel) == right
    code, accepted = encode(indices, numel)
    assert accepted == right
    if not right:
        assert not any(code)
        assert decode(code, len(indices), numel) is None


@pytest.mark.parametrize(
    ("indices", "right"),
    [([], True), ([9], True), ([10], False), ([2**32 - 1], False), ([1, 1], False), ([2, 1], False), ([1, 2, 9], True)],
)
def test_ascending_below(indices, right):
    assert cpu.ascending_below(np.array(indices, np.uint32), 10) == right


def test_one_fault_among_many_is_found():
    indices = np.arange(0, 4000, 2, dtype=np.uint32)
    for place in (1, 63, 64, 1000, 1999):
        wrong = indices.copy()
        wrong[place] = wrong[place - 1]
        assert not cpu.ascending_below(wrong, 4000)
    assert cpu.ascending_below(indices, 4000)


def check_decoded(code, count, numel):
    indices = decode(code, count, numel)
    if indices is not None:
        assert indices == sorted(set(indices))
        assert not indices or indices[-1] < numel
    return indices


@given(selections(), st.lists(st.integers(0, 2**20), min_size=1, max_size=4))
def test_flipped_bits_are_refused_or_give_other_indices(selection, places):
    indices, numel = selection
    code = bytearray(encode(indices, numel)[0])
    for place in places:
        if code:
            code[place // 8 % len(code)] ^= 1 << place % 8
    check_decoded(bytes(code), len(indices), numel)


@settings(max_examples=300)
@given(st.sampled_from(SIZES) | st.tuples(st.integers(0, 200), st.integers(0, 2**32)), st.data())
def test_any_bytes_are_refused_or_give_indices(size, data):
    count, numel = size
    length = cpu.index_bytes(count, numel)
    same = st.sampled_from([b"\x00", b"\x01", b"\x80", b"\xff"]).map(lambda byte: byte * length)
    check_decoded(
        data.draw(same | st.integers(0, 2**32).map(lambda seed: random.Random(seed).randbytes(length))), *size
    )


@given(selections(), st.integers(-16, 16).filter(bool))
def test_a_code_of_another_length_is_refused(selection, more):
    indices, numel = selection
    code = encode(indices, numel)[0]
    changed = code[: max(0, len(code) + more)] + b"\x01" * more
    if len(changed) != len(code):
        assert decode(changed, len(indices), numel) is None


def test_ones_that_are_missing_or_too_many_are_refused():
    indices, numel = [3, 70, 71, 500], 1000
    code = encode(indices, numel)[0]
    assert decode(code, 4, numel) == indices
    upper = len(code) - 8 * (-(-(4 + (999 >> 7) + 1) // 64))
    for bit in range(64):
        changed = bytearray(code)
        changed[upper + bit // 8] ^= 1 << bit % 8
        assert decode(bytes(changed), 4, numel) is None


def test_arrays_of_wrong_length_are_told_to_the_caller():
    with pytest.raises(ValueError, match="the code has 8 bytes, out has 16"):
        cpu.encode_indices(np.array([0], np.uint32), 1, np.empty(16, np.uint8))
    with pytest.raises(ValueError, match="2 indices do not fill an array of 1"):
        cpu.decode_indices(np.empty(8, np.uint8), 2, 5, np.empty(1, np.uint32))
