"""Elias-Fano code of ascending indices: near the entropy of a random choice, of a length known beforehand.

An index has ``bits`` low bits and a high part. The low parts stand one after the other. The high parts do not
descend, so they make a bitmap: the one of the j-th index, from 0 on, is bit ``high + j``, and as many zeros
stand before it as its high part is large. Low parts and bitmap each begin at a 64-bit word, are filled from
the lowest bit of their first word on, and leave the rest of their last word zero.
"""

from collections.abc import Sequence

import numpy as np
from mpicomp.kernels.cpu.compile import Bytes, Indices, kernel
from mpicomp.kernels.cpu.simd import first_one, ones
from mpicomp.kernels.sizes import index_bytes, layout_of
from numpy.typing import NDArray


def encode_indices(indices: Indices, numel: int, out: NDArray[np.unsignedinteger]) -> bool:
    """Write the code of indices that ascend without repetition below ``numel``, which is at most 2**32.

    ``out`` has `index_bytes` bytes, aligned like uint64. Return False where the indices are wrong. ``out`` is then all
    zeros, a code that `decode_indices` refuses, so that all receivers learn of it.
    """
    bits, low, upper = layout_of(indices.size, numel)
    code = out.view(np.uint64)
    if code.size != low + upper:
        raise ValueError(f"encode_indices: the code has {8 * (low + upper)} bytes, out has {out.nbytes}")
    if not ascending_below(indices, numel):
        code[:] = 0
        return False
    _encode(indices, bits, code[:low], code[low:])
    return True


def decode_indices(code: NDArray[np.unsignedinteger], count: int, numel: int, out: Indices) -> bool:
    """Read the code that `encode_indices` wrote; damaged bytes never touch anything outside the arrays.

    Return False where the length is wrong or no ascending indices below ``numel`` have this code; ``out`` is then
    undefined.
    """
    bits, low, upper = layout_of(count, numel)
    if out.size != count:
        raise ValueError(f"decode_indices: {count} indices do not fill an array of {out.size}")
    if code.nbytes != 8 * (low + upper):
        return False
    words = code.view(np.uint64)
    return bool(_decode(words, bits, words[low:], numel, out))


def decode_indices_of(messages: Bytes, starts: Sequence[int], counts: Sequence[int], numel: int, out: Indices) -> bool:
    """Read several codes into ``out``, one after the other, as `decode_indices` reads one.

    Codes start at ``starts``, bytes of ``messages`` and multiples of 8, and have ``counts`` indices. Return
    False where a code lies outside ``messages`` or is wrong; ``out`` is then undefined.
    """
    if sum(counts) != out.size:
        raise ValueError(f"decode_indices_of: {sum(counts)} indices do not fill an array of {out.size}")
    if any(start % 8 for start in starts):
        raise ValueError("decode_indices_of: a code begins at a multiple of 8")
    place = 0
    for start, count in zip(starts, counts, strict=True):
        stop = start + index_bytes(count, numel)
        # A slice does not show a start before the first byte.
        if start < 0 or not decode_indices(messages[start:stop], count, numel, out[place : place + count]):
            return False
        place += count
    return True


@kernel
def ascending_below(indices: Indices, numel: int) -> bool:
    """Return whether indices ascend without repetition and are below ``numel``."""
    wrong = np.uint32(0)
    for j in range(1, indices.size):
        wrong |= np.uint32(indices[j] <= indices[j - 1])  # no early end: so it vectorises
    return bool(wrong == 0 and (indices.size == 0 or indices[indices.size - 1] < numel))


# Nothing checks bounds in the kernels below: comments show why indices are inside the arrays. Integers are
# unsigned and 64 bits wide throughout: Numba makes floats of signed with unsigned ones.


@kernel
def _encode(indices, bits, low, upper):  # type: ignore[no-untyped-def]
    one, six, last, full = np.uint64(1), np.uint64(6), np.uint64(63), np.uint64(64)
    bits = np.uint64(bits)
    mask = (one << bits) - one
    word, filled, place = np.uint64(0), np.uint64(0), np.uint64(0)
    upper[:] = 0
    for j in range(indices.size):
        index = np.uint64(indices[j])
        part = index & mask
        word |= part << filled
        filled += bits
        if filled >= full:
            low[place] = word  # every word that is written holds 64 of the count * bits bits, and the last one the rest
            place += one
            filled -= full
            word = part >> (bits - filled)
        bit = (index >> bits) + np.uint64(j)  # at most (numel - 1 >> bits) + count - 1: the bitmap has one more
        upper[bit >> six] |= one << (bit & last)
    if filled > 0:
        low[place] = word


@kernel
def _decode(code, bits, upper, numel, out):  # type: ignore[no-untyped-def]
    one, six, last = np.uint64(1), np.uint64(6), np.uint64(63)
    bits = np.uint64(bits)
    mask = (one << bits) - one
    step = np.uint64(bits > 0)
    count, at, follows = np.uint64(0), np.uint64(0), np.uint64(0)
    wrong = False
    for w in range(upper.size):
        word = upper[w]
        held = ones(word)
        if count + held > np.uint64(out.size):
            return False
        high = np.uint64(w << 6) - count
        for _ in range(held):
            # Since count < out.size, a low part begins in a word of low parts, and the bitmap has at least one word
            # after them; where there are no low parts, both places are 0.
            place, shift = at >> six, at & last
            part = (code[place] >> shift) | ((code[place + step] << one) << (last - shift))
            index = ((high + first_one(word)) << bits) | (part & mask)
            wrong |= index < follows
            out[count] = np.uint32(index)
            follows = index + one
            word &= word - one
            at += bits
            count += one
            high -= one
    return count == np.uint64(out.size) and not wrong and follows <= np.uint64(numel)
