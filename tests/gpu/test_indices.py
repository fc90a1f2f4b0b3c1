"""Codes of indices are those of the definition and of `mpicomp.kernels.cpu`: in an emulation, and on a GPU."""

import numpy as np
import pytest
from gpu import standin
from marks import slow
from mpicomp.kernels import cpu, gpu

# None, one, around a word of the bitmap and a warp; several words of low parts; every index there is; both ends of what
# 32 bits can say; several chunks of words.
CASES = [
    *((0, 0), (0, 7), (1, 1), (1, 2**32), (31, 31), (32, 10**6), (33, 100), (64, 64), (65, 10**6), (1000, 1000)),
    *((1000, 1001), (1000, 10**5), (3000, 2**32), (30_000, 40_000)),
]
KINDS = ["spread", "low", "high"]


def chosen(count, numel, kind="spread"):
    """Ascending indices: anywhere, or all at one end."""
    if kind == "low" or count == numel:
        return np.arange(count).astype(np.uint32)
    if kind == "high":
        return np.arange(numel - count, numel).astype(np.uint32)
    drawn = np.random.default_rng(count).integers(0, numel, 2 * count + 5)
    some = np.unique(drawn)
    while some.size < count:
        some = np.union1d(some, np.random.default_rng(some.size).integers(0, numel, count))
    return np.sort(np.random.default_rng(1).permutation(some)[:count]).astype(np.uint32)


def code_of(indices, numel):
    """Elias-Fano as it is defined, in integers of any length."""
    count = len(indices)
    if count == 0:
        return b""
    bits = max(0, (numel // count).bit_length() - 1)
    low = upper = 0
    for j, index in enumerate(indices.tolist()):
        low |= index % 2**bits << j * bits
        upper |= 1 << (index >> bits) + j
    words = [-(-count * bits // 64), -(-(count + ((numel - 1) >> bits) + 1) // 64)]
    return low.to_bytes(8 * words[0], "little") + upper.to_bytes(8 * words[1], "little")


def decode(place, code, count, numel):
    """Decode where kernels run; None where the code is refused. The host has to say the same."""
    out, own = place.empty(count, np.uint32), np.empty(count, np.uint32)
    there = place.put(np.frombuffer(code, np.uint8))
    with place.quiet():
        right = gpu.decode_indices(there, count, numel, out)
    assert right.dtype == np.bool_
    assert right.item() == cpu.decode_indices(np.frombuffer(bytearray(code), np.uint8), count, numel, own)
    if not right.item():
        return None
    np.testing.assert_array_equal(out.get(), own)
    return out.get()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "numel"), CASES)
def test_the_code_is_the_one_of_the_definition_and_comes_back(place, count, numel, kind):
    indices = chosen(count, numel, kind)
    out, own = place.empty(gpu.index_bytes(count, numel), np.uint8), np.empty(cpu.index_bytes(count, numel), np.uint8)
    there = place.put(indices)
    with place.quiet():
        right = gpu.encode_indices(there, numel, out)
        ascending = gpu.ascending_below(there, numel)
    assert right.item() is True
    assert ascending.item() is True
    assert out.get().tobytes() == code_of(indices, numel)
    cpu.encode_indices(indices, numel, own)
    np.testing.assert_array_equal(out.get(), own)
    np.testing.assert_array_equal(decode(place, out.get().tobytes(), count, numel), indices)


@pytest.mark.parametrize("count", [1, 32, 33, 1000, slow(5000)])
def test_wrong_indices_give_a_code_that_is_refused(place, count):
    numel = 3 * count
    right = chosen(count, numel)
    for at in {0, 1, count // 2, count - 1}:
        for bad in (numel, 2**32 - 1, int(right[at - 1]), int(right[(at + 1) % count])):
            indices = right.copy()
            if at < count:
                indices[at] = bad
            ordered = indices.tolist() == sorted(set(indices.tolist()))
            good = ordered and indices[-1] < numel
            out, there = place.empty(gpu.index_bytes(count, numel) // 8, np.uint64), place.put(indices)
            with place.quiet():
                said = gpu.encode_indices(there, numel, out), gpu.ascending_below(there, numel)
            assert [answer.item() for answer in said] == [good, good]
            if good:
                assert out.get().tobytes() == code_of(indices, numel)
            else:
                assert not out.get().any()
                assert decode(place, out.get().tobytes(), count, numel) is None


@pytest.mark.parametrize("kind", ["descending", "equal", "largest", "anything"])
@pytest.mark.parametrize(("count", "numel"), [(2, 2), (70, 80), (3000, 3000), (3000, 10**6), (1000, 2**32)])
def test_what_is_no_selection_at_all_gives_zeros(place, count, numel, kind):
    """The code is written before that is known: nothing outside is touched, and the last block clears it."""
    indices = {
        "descending": lambda: np.arange(count)[::-1],
        "equal": lambda: np.full(count, 1),
        "largest": lambda: np.full(count, 2**32 - 1),
        "anything": lambda: np.random.default_rng(count).integers(0, 2**32, count),
    }[kind]().astype(np.uint32)
    if kind == "anything" and count == 2:
        indices[:] = 1, 0
    words = gpu.index_bytes(count, numel) // 8
    room, there = place.put(np.full(words + 20, 7, np.uint64)), place.put(indices)
    for _ in range(3):
        with place.quiet():
            good = gpu.encode_indices(there, numel, room[10 : 10 + words])
        assert good.item() is False
        told = room.get()
        assert not told[10 : 10 + words].any()
        assert (told[:10] == 7).all()
        assert (told[10 + words :] == 7).all()


@pytest.mark.parametrize(("count", "numel"), [(1, 1), (4, 1000), (33, 40), (1000, 10**5)])
def test_damaged_codes_are_refused_or_give_other_indices(place, count, numel):
    rng = np.random.default_rng(count)
    code = code_of(chosen(count, numel), numel)
    for changes in (1, 1, 1, 2, 5, 30):
        damaged = np.frombuffer(code, np.uint8).copy()
        for bit in rng.integers(0, 8 * damaged.size, changes):
            damaged[bit // 8] ^= 1 << bit % 8
        indices = decode(place, damaged.tobytes(), count, numel)
        assert indices is None or (np.diff(indices.astype(np.int64)) > 0).all()
        assert indices is None or indices[-1] < numel
    size = len(code)
    for other in (bytes(size), b"\xff" * size, rng.bytes(size), b"\x01" + bytes(size - 1)):
        decode(place, other, count, numel)


@pytest.mark.parametrize("last", [99, 100, 101, 127])
def test_a_code_of_indices_that_are_too_large_is_refused(place, last):
    """There is room for them in it where the last high part is not full."""
    code = code_of(np.array([1, 2, last], np.uint32), 100)
    assert len(code) == gpu.index_bytes(3, 100)
    indices = decode(place, code, 3, 100)
    assert (indices is None) == (last >= 100)


@pytest.mark.parametrize("bit", [0, 1, 62, 63, 64, 65, 127, 128])
def test_a_repeated_high_part_wants_ascending_low_parts(place, bit):
    """Also where its two ones are in neighbouring words."""
    count, numel, low = 200, 2**12, 4  # every index has 4 low bits, which makes 13 words of low parts
    assert gpu.index_bytes(count, numel) == 8 * (13 + 8)
    for first, second in ((3, 4), (4, 4), (5, 4)):
        parts = np.arange(count) // 8 % 16
        # Elsewhere every second place has a one, so that all others have high parts of their own.
        others = [place for place in range(512) if abs(place - bit) > 2 and place % 2 == bit % 2][: count - 2]
        ones = sorted([*others, bit, bit + 1])
        parts[ones.index(bit)], parts[ones.index(bit + 1)] = first, second
        words = sum(int(part) << low * j for j, part in enumerate(parts)).to_bytes(8 * 13, "little")
        code = words + sum(1 << place for place in ones).to_bytes(64, "little")
        indices = decode(place, code, count, numel)
        assert (indices is not None) == (first < second)


def test_a_code_of_another_length_is_refused_and_arrays_have_to_fit(place):
    code = code_of(chosen(10, 100), 100)
    assert decode(place, code + bytes(8), 10, 100) is None
    assert decode(place, code[:-8], 10, 100) is None
    assert decode(place, b"", 10, 100) is None
    assert decode(place, bytes(8), 0, 100) is None
    with pytest.raises(ValueError, match="the code has 8 bytes, out has 16"):
        gpu.encode_indices(place.put(np.zeros(1, np.uint32)), 1, place.empty(16, np.uint8))
    with pytest.raises(ValueError, match="2 indices do not fill an array of 1"):
        gpu.decode_indices(place.empty(8, np.uint8), 2, 5, place.empty(1, np.uint32))


def messages_of(codes, gap):
    """Put codes into one array, ``gap`` bytes of something else before each; return where they begin, too."""
    parts, starts, place = [], [], 0
    for code in codes:
        parts += [b"\xee" * gap, code]
        starts.append(place + gap)
        place += gap + len(code)
    return np.frombuffer(bytearray(b"".join([*parts, b"\xdd" * 13])), np.uint8), starts


def decode_all(place, messages, starts, counts, numel):
    """Decode several codes in one go on both sides; None where they are refused."""
    out, own = place.empty(sum(counts), np.uint32), np.empty(sum(counts), np.uint32)
    there = place.put(messages)
    with place.quiet():
        right = gpu.decode_indices_of(there, starts, counts, numel, out)
    aligned = np.zeros(messages.size // 8 + 1, np.uint64).view(np.uint8)[: messages.size]
    aligned[:] = messages
    assert right.item() == cpu.decode_indices_of(aligned, starts, counts, numel, own)
    if not right.item():
        return None
    np.testing.assert_array_equal(out.get(), own)
    return own


@pytest.mark.parametrize("gap", [0, 24])
@pytest.mark.parametrize("counts", [[], [0], [70], [70] * 5, [0, 0, 0], [3, 0, 1000, 1, 64]])
def test_several_codes_in_one_launch(place, counts, gap):
    numel = 5000
    selections = [chosen(count, numel, KINDS[place % 3]) for place, count in enumerate(counts)]
    messages, starts = messages_of([code_of(indices, numel) for indices in selections], gap)
    before = len(standin.launches)
    told = decode_all(place, messages, starts, counts, numel)
    if place.emulated:
        assert standin.launches[before:] == ["decode"]
    np.testing.assert_array_equal(told, np.concatenate([np.empty(0, np.uint32), *selections]))
    if len(counts) > 2:
        np.testing.assert_array_equal(
            decode_all(place, messages, starts[::-1], counts[::-1], numel), np.concatenate(selections[::-1])
        )


@pytest.mark.parametrize("counts", [[70] * 4, [70, 3, 1000, 64]])
def test_one_wrong_code_among_several_is_found(place, counts):
    numel = 5000
    messages, starts = messages_of([code_of(chosen(count, numel), numel) for count in counts], 8)
    assert decode_all(place, messages, starts, counts, numel) is not None
    for start, count in zip(starts, counts, strict=True):
        damaged = messages.copy()
        damaged[start + cpu.index_bytes(count, numel) - 1] ^= 0x80
        assert decode_all(place, damaged, starts, counts, numel) is None


def test_codes_that_do_not_lie_inside_are_refused(place):
    numel, counts = 5000, [70, 70, 70]
    messages, starts = messages_of([code_of(chosen(count, numel), numel) for count in counts], 8)
    step = starts[1] - starts[0]
    end = messages.size // 8 * 8
    for wrong in ([-8, *starts[1:]], [*starts[:2], end], [start + step for start in starts], [*starts[:2], 2**40]):
        assert decode_all(place, messages, wrong, counts, numel) is None
    out = place.empty(210, np.uint32)
    with pytest.raises(ValueError, match="210 indices do not fill an array of 209"):
        gpu.decode_indices_of(place.put(messages), starts, counts, numel, out[:209])
    with pytest.raises(ValueError, match="multiple of 8"):
        gpu.decode_indices_of(place.put(messages), [8, 12, 16], counts, numel, out)
    for module, array, room in ((gpu, place.put(messages), out), (cpu, messages, np.empty(210, np.uint32))):
        with pytest.raises(ValueError, match="argument 2 is longer"):
            module.decode_indices_of(array, starts[:2], counts, numel, room)


def test_launches(place):
    if not place.emulated:
        pytest.skip("launches are counted in the emulation")
    indices, out = place.put(chosen(100, 1000)), place.empty(gpu.index_bytes(100, 1000), np.uint8)
    before = len(standin.launches)
    gpu.encode_indices(indices, 1000, out)
    gpu.decode_indices(out, 100, 1000, indices)
    assert standin.launches[before:] == ["encode", "decode"]
