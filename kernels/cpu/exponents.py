"""Nine bits an element: its sign, and the power of two to which its magnitude is rounded at random.

Bit j of word w is set where element ``64 * w + j`` is negative, by its sign bit. Byte i is the exponent of element i as
float32 has it: 0 stands for zero, e for ``2**(e - 127)``, 255 for what is infinite or NaN.
"""

import numpy as np
from mpicomp.kernels.cpu.bit_planes import read_planes
from mpicomp.kernels.cpu.bits import draw, halves
from mpicomp.kernels.cpu.cast import _to_float32
from mpicomp.kernels.cpu.compile import Bytes, Floats, Words, exact, kernel
from mpicomp.kernels.cpu.signs import _signs
from mpicomp.kernels.cpu.simd import LANES

_BLOCK = 1024  # elements that are gone through again while they are in the first-level cache
_FRACTION = np.uint32(23)  # bits of a float32 after its exponent
_SIGN = np.uint32(31)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_SPARE = np.uint32(9)  # bits of a random number that are too many
_LARGEST, _NONE = np.uint32(254), np.uint32(255)


def pack_exponents(array: Floats, words: Words, exponents: Bytes, sent: Floats, key: int) -> float:
    """Round magnitudes at random to one of the two nearest powers of two, the nearer the likelier.

    ``words`` receives the signs, and zeros after the last element; ``sent`` receives the numbers that the receiver will
    see. float64 is first rounded to float32, at most to the largest number. The key has 64 bits. Return the squared L2
    norm of ``array - sent``; NaN or infinite where an element is.

    A float32 has 23 bits after its exponent. As many random bits are added to them and carry into the exponent, with
    just the probability that makes the result right on average. Below the smallest normal number the result is that
    number or zero; what is larger than 2**127, the largest power of two, becomes 2**127.
    """
    return float(_pack_exponents(array, words, exponents, sent, halves(key)))


def unpack_exponents(words: Words, exponents: Bytes, out: Floats) -> None:
    """Write what `pack_exponents` has packed to a float32 or float64 array of the same length."""
    _unpack_exponents(words, exponents, None, out)


def unpack_exponents_add(words: Words, exponents: Bytes, factor: float, out: Floats) -> None:
    """Add ``factor`` times what `pack_exponents` has packed to a float32 or float64 array of the same length."""
    _unpack_exponents(words, exponents, out.dtype.type(factor), out)


@kernel
def _narrow(part, singles):  # type: ignore[no-untyped-def]
    for i in range(part.size):
        singles[i] = _to_float32(part[i])


@kernel
def _round(bits, start, key, exponents, rounded):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & _MAGNITUDE)
        added = np.uint32(draw(np.uint32(np.uint32(start) + np.uint32(i)), key[0], key[1]) >> _SPARE)
        exponent = np.uint32(np.uint32(magnitude + added) >> _FRACTION)
        exponent = _NONE if magnitude >= _INFINITY else min(exponent, _LARGEST)
        exponents[i] = np.uint8(exponent)
        rounded[i] = np.uint32(np.uint32(bits[i] & ~_MAGNITUDE) | np.uint32(np.uint32(exponent) << _FRACTION))


@kernel
def _leave(part, singles, sent):  # type: ignore[no-untyped-def]
    lost = 0.0
    for i in range(part.size):
        sent[i] = singles[i]
        error = np.float64(part[i]) - np.float64(singles[i])
        lost += error * error
    return lost


@kernel
def _pack_exponents(array, words, exponents, sent, key):  # type: ignore[no-untyped-def]
    before, after = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    lost = 0.0
    for start in range(0, array.size, _BLOCK):
        part = array[start : start + _BLOCK]
        singles, rounded = before[: part.size], after[: part.size]
        _narrow(part, singles)
        bits = singles.view(np.uint32)
        _signs(bits, 0, bits.size, words[start // LANES : (start + part.size + LANES - 1) // LANES])
        _round(bits, start, key, exponents[start : start + _BLOCK], rounded.view(np.uint32))
        lost += _leave(part, rounded, sent[start : start + _BLOCK])
    return lost


@kernel
def _read(words, exponents, start, negative, rounded):  # type: ignore[no-untyped-def]
    codes = exponents[start : start + _BLOCK]
    read_planes(words, start // LANES, (codes.size + LANES - 1) // LANES, 1, negative)
    for i in range(codes.size):
        sign = np.uint32(np.uint32(negative[i]) << _SIGN)
        rounded[i] = np.uint32(sign | np.uint32(np.uint32(codes[i]) << _FRACTION))


@exact
def _unpack_exponents(words, exponents, factor, out):  # type: ignore[no-untyped-def]
    negative, rounded = np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.float32)
    for start in range(0, out.size, _BLOCK):
        part = out[start : start + _BLOCK]
        _read(words, exponents, start, negative, rounded.view(np.uint32))
        for i in range(part.size):
            part[i] = rounded[i] if factor is None else part[i] + factor * out.dtype.type(rounded[i])
