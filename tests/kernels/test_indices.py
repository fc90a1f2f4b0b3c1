import random

import numpy as np
import pytest
from device import emulator
from hypothesis import example, given
from hypothesis import strategies as st
from mpicomp.kernels import cpu

# None, one, around a word of the bitmap and a warp; several words of low parts; every index there is; both ends of the
# range of 32 bits; several chunks of words.
CASES = [
    *((0, 0), (0, 7), (1, 1), (1, 2**32), (31, 31), (32, 10**6), (33, 100), (64, 64), (65, 10**6), (1000, 1000)),
    *((1000, 1001), (1000, 10**5), (3000, 2**32), (30_000, 40_000)),
]
KINDS = ["spread", "low", "high"]
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


def encode(kernels, indices, numel):
    """Encode; also return whether the kernel accepted the indices."""
    out = np.full(cpu.index_bytes(len(indices), numel) // 8, 0xA5A5A5A5A5A5A5A5, np.uint64)
    accepted = kernels.encode_indices(np.array(indices, np.uint32), numel, out)
    assert kernels.ascending_below(np.array(indices, np.uint32), numel) == accepted
    return out.tobytes(), accepted


def decode(kernels, code, count, numel):
    out = np.full(count, 0xA5A5A5A5, np.uint32)
    accepted = kernels.decode_indices(np.frombuffer(code, np.uint8), count, numel, out)
    return out.tolist() if accepted else None


def chosen(count, numel, kind="spread"):
    if kind == "low" or count == numel:
        return np.arange(count).astype(np.uint32)
    if kind == "high":
        return np.arange(numel - count, numel).astype(np.uint32)
    return np.sort(np.array(random.Random(count).sample(range(numel), count), np.uint32))


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
def test_codes_are_those_of_the_definition_and_come_back(kernels, selection):
    indices, numel = selection
    code, accepted = encode(kernels, indices, numel)
    assert accepted
    assert code == code_of(indices, numel)
    assert decode(kernels, code, len(indices), numel) == indices


@pytest.mark.parametrize("kind", KINDS)
def test_large_selections_come_back(kernels, kind):
    for count, numel in [*CASES, (25_600, 25_600_000), (5000, 5000)]:
        indices = chosen(count, numel, kind)
        code, accepted = encode(kernels, indices, numel)
        assert accepted
        assert code == code_of(indices.tolist(), numel)
        np.testing.assert_array_equal(decode(kernels, code, count, numel), indices)


@given(st.integers(1, 10**7), st.integers(0, 2**32 - 1))
@example(1, 1)
@example(1, 2**32)
def test_codes_have_the_least_length_low_bits_allow(count, more):
    numel = min(2**32, count + more)
    lengths = [8 * (-(-count * bits // 64) + -(-(count + ((numel - 1) >> bits) + 1) // 64)) for bits in range(33)]
    assert cpu.index_bytes(count, numel) % 8 == 0
    assert cpu.index_bytes(count, numel) <= min(lengths) + 8  # rounding to words


@given(selections(), st.data())
def test_wrong_indices_give_a_code_that_is_refused(kernels, selection, data):
    indices, numel = selection
    bad = data.draw(st.sampled_from([numel, numel + 1, 2**32 - 1]).filter(lambda index: index < 2**32) | st.just(0))
    place = data.draw(st.integers(0, len(indices)))
    indices = [*indices[:place], bad, *indices[place:]]
    right = indices == sorted(set(indices)) and indices[-1] < numel
    assert kernels.ascending_below(np.array(indices, np.uint32), numel) == right
    code, accepted = encode(kernels, indices, numel)
    assert accepted == right
    if not right:
        assert not any(code)
        assert decode(kernels, code, len(indices), numel) is None


def check_decoded(kernels, code, count, numel):
    indices = decode(kernels, code, count, numel)
    if indices is not None:
        assert indices == sorted(set(indices))
        assert not indices or indices[-1] < numel
    return indices


@given(st.sampled_from(SIZES) | st.tuples(st.integers(0, 200), st.integers(0, 2**32)), st.data())
def test_any_bytes_are_refused_or_give_indices(kernels, size, data):
    count, numel = size
    length = cpu.index_bytes(count, numel)
    same = st.sampled_from([b"\x00", b"\x01", b"\x80", b"\xff"]).map(lambda byte: byte * length)
    check_decoded(
        kernels, data.draw(same | st.integers(0, 2**32).map(lambda seed: random.Random(seed).randbytes(length))), *size
    )


@given(selections(), st.integers(-16, 16).filter(bool))
def test_a_code_of_another_length_is_refused(kernels, selection, more):
    indices, numel = selection
    code = encode(kernels, indices, numel)[0]
    changed = code[: max(0, len(code) + more)] + b"\x01" * more
    if len(changed) != len(code):
        assert decode(kernels, changed, len(indices), numel) is None


def test_ones_that_are_missing_or_too_many_are_refused(kernels):
    indices, numel = [3, 70, 71, 500], 1000
    code = encode(kernels, indices, numel)[0]
    assert decode(kernels, code, 4, numel) == indices
    upper = len(code) - 8 * (-(-(4 + (999 >> 7) + 1) // 64))
    for bit in range(64):
        changed = bytearray(code)
        changed[upper + bit // 8] ^= 1 << bit % 8
        assert decode(kernels, bytes(changed), 4, numel) is None


def test_codes_refuse_arrays_that_do_not_fit(kernels):
    with pytest.raises(ValueError, match="the code has 8 bytes, out has 16"):
        kernels.encode_indices(np.array([0], np.uint32), 1, np.empty(16, np.uint8))
    with pytest.raises(ValueError, match="2 indices do not fill an array of 1"):
        kernels.decode_indices(np.empty(8, np.uint8), 2, 5, np.empty(1, np.uint32))


@pytest.mark.parametrize(("count", "numel"), [(2, 2), (70, 80), (3000, 3000), (3000, 10**6), (1000, 2**32)])
def test_codes_of_no_selection_are_zeros(kernels, count, numel):
    """A GPU writes the code before that is known: nothing outside is touched, and the last block clears it."""
    descending, anything = np.arange(count)[::-1], np.random.default_rng(count).integers(0, 2**32, count)
    for indices in (descending, np.full(count, 1), np.full(count, 2**32 - 1), anything if count > 2 else descending):
        for _ in range(3):
            code, accepted = encode(kernels, indices, numel)
            assert not accepted
            assert not any(code)


@pytest.mark.parametrize("last", [99, 100, 101, 127])
def test_a_code_of_indices_that_are_too_large_is_refused(kernels, last):
    """There is room for them in it where the last high part is not full."""
    code = code_of([1, 2, last], 100)
    assert len(code) == cpu.index_bytes(3, 100)
    indices = decode(kernels, code, 3, 100)
    assert (indices is None) == (last >= 100)


@pytest.mark.parametrize("bit", [0, 1, 62, 63, 64, 65, 127, 128])
def test_a_repeated_high_part_needs_ascending_low_parts(kernels, bit):
    """Also where its two ones are in neighbouring words."""
    count, numel, low = 200, 2**12, 4  # every index has 4 low bits, which makes 13 words of low parts
    assert cpu.index_bytes(count, numel) == 8 * (13 + 8)
    for first, second in ((3, 4), (4, 4), (5, 4)):
        parts = np.arange(count) // 8 % 16
        # Elsewhere every second bit is a one, so that all others have distinct high parts.
        others = [other for other in range(512) if abs(other - bit) > 2 and other % 2 == bit % 2][: count - 2]
        ones = sorted([*others, bit, bit + 1])
        parts[ones.index(bit)], parts[ones.index(bit + 1)] = first, second
        words = sum(int(part) << low * j for j, part in enumerate(parts)).to_bytes(8 * 13, "little")
        code = words + sum(1 << one for one in ones).to_bytes(64, "little")
        indices = decode(kernels, code, count, numel)
        assert (indices is not None) == (first < second)


def messages_of(codes, gap):
    """Put codes into one array, ``gap`` bytes of something else before each; return where they begin, too."""
    parts, starts, size = [], [], 0
    for code in codes:
        parts += [b"\xee" * gap, code]
        starts.append(size + gap)
        size += gap + len(code)
    return np.frombuffer(b"".join([*parts, b"\xdd" * 13]), np.uint8), starts


def decode_all(kernels, messages, starts, counts, numel):
    """Decode several codes at once; None where they are refused."""
    out = np.empty(sum(counts), np.uint32)
    return out if kernels.decode_indices_of(messages, starts, counts, numel, out) else None


@pytest.mark.parametrize("gap", [0, 24])
@pytest.mark.parametrize("counts", [[], [0], [70], [70] * 5, [0, 0, 0], [3, 0, 1000, 1, 64]])
def test_several_codes_are_decoded_in_one_launch(kernels, counts, gap):
    numel = 5000
    selections = [chosen(count, numel, KINDS[number % 3]) for number, count in enumerate(counts)]
    messages, starts = messages_of([code_of(indices.tolist(), numel) for indices in selections], gap)
    emulator.launches.clear()
    decoded = decode_all(kernels, messages, starts, counts, numel)
    assert emulator.launches == ["decode"] * kernels.emulated
    np.testing.assert_array_equal(decoded, np.concatenate([np.empty(0, np.uint32), *selections]))
    if len(counts) > 2:
        decoded = decode_all(kernels, messages, starts[::-1], counts[::-1], numel)
        np.testing.assert_array_equal(decoded, np.concatenate(selections[::-1]))


@pytest.mark.parametrize("counts", [[70] * 4, [70, 3, 1000, 64]])
def test_one_wrong_code_among_several_is_found(kernels, counts):
    numel = 5000
    messages, starts = messages_of([code_of(chosen(count, numel).tolist(), numel) for count in counts], 8)
    assert decode_all(kernels, messages, starts, counts, numel) is not None
    for start, count in zip(starts, counts, strict=True):
        damaged = messages.copy()
        damaged[start + cpu.index_bytes(count, numel) - 1] ^= 0x80
        assert decode_all(kernels, damaged, starts, counts, numel) is None


def test_several_codes_have_to_lie_inside(kernels):
    numel, counts = 5000, [70, 70, 70]
    messages, starts = messages_of([code_of(chosen(count, numel).tolist(), numel) for count in counts], 8)
    step, end = starts[1] - starts[0], messages.size // 8 * 8
    for wrong in ([-8, *starts[1:]], [*starts[:2], end], [start + step for start in starts], [*starts[:2], 2**40]):
        assert decode_all(kernels, messages, wrong, counts, numel) is None
    with pytest.raises(ValueError, match="210 indices do not fill an array of 209"):
        kernels.decode_indices_of(messages, starts, counts, numel, np.empty(209, np.uint32))
    with pytest.raises(ValueError, match="argument 2 is longer"):
        decode_all(kernels, messages, starts[:2], counts, numel)


def test_several_codes_have_to_be_aligned_on_a_gpu(gpu_kernels):
    messages, _ = messages_of([code_of([1], 10)] * 3, 8)
    with pytest.raises(ValueError, match="multiple of 8"):
        decode_all(gpu_kernels, messages, [8, 12, 16], [1, 1, 1], 10)
