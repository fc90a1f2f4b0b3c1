"""Kernels as plain Python, for whoever wants to look into them: import this first, with ``NUMBA_DISABLE_JIT=1``.

What the kernels take from LLVM itself is done here by slow and obvious means. Arithmetic of NumPy's scalars stands in
for that of registers, so that a product or a sum may say that it has wrapped round; that is what it is to do.
"""

import sys
import warnings

import numpy as np
from mpicomp.kernels.cpu import bit_ops, bit_planes, grid, simd
from numba.core import config

LANES = simd.LANES


def _ones(word):
    return np.uint64(int(word).bit_count())


def _first_one(word):
    return np.uint64((int(word) & -int(word)).bit_length() - 1 if word else 0)


def _real(bits):
    return np.array(bits).view(np.float32 if np.dtype(type(bits)).itemsize == 4 else np.float64)[()]


def _signs(word):
    return np.array([int(word) >> lane & 1 for lane in range(LANES)], bool)


def _word(truths):
    return np.uint64(sum(1 << lane for lane, own in enumerate(truths) if own))


def _at_least(bits, start, bound):
    mask = (1 << (8 * bits.itemsize - 1)) - 1
    return _word([int(own) & mask >= int(bound) for own in _lanes(bits, start)])


def _negative(bits, start):
    return _word([int(own) >> (8 * bits.itemsize - 1) for own in _lanes(bits, start)])


def _put_signed(out, start, word, value):
    _lanes(out, start)[:] = np.where(_signs(word), -value, value)


def _add_signed(out, start, word, value):
    _lanes(out, start)[:] += np.where(_signs(word), -value, value)


def _write(codes, start, planes, words, first):
    for plane in range(planes):
        words[first + plane] = _word([int(own) >> plane & 1 for own in _lanes(codes, start)])


def _read(words, first, planes, codes, start):
    own = _lanes(codes, start)
    own[:] = 0
    for plane in range(planes):
        assert 0 <= first + plane < words.size, "planes outside of the words"
        own |= _signs(words[first + plane]).astype(np.uint8) << np.uint8(plane)


def _lanes(array, start):
    assert 0 <= start <= array.size - LANES, "lanes outside of the array"
    return array[start : start + LANES]


_PLAIN = {
    bit_ops.ones: _ones,
    bit_ops.first_one: _first_one,
    grid._real: _real,
    simd.at_least: _at_least,
    simd.negative: _negative,
    simd.put_signed: _put_signed,
    simd.add_signed: _add_signed,
    bit_planes._write: _write,
    bit_planes._read: _read,
}


def replace_intrinsics():
    """Put the functions of this module wherever kernels have imported what they stand for."""
    assert config.DISABLE_JIT, "set NUMBA_DISABLE_JIT=1 before Numba is imported"
    warnings.simplefilter("ignore", RuntimeWarning)
    np.seterr(all="ignore")
    for name, module in list(sys.modules.items()):
        if name.startswith("mpicomp.kernels.cpu."):
            for key, value in list(vars(module).items()):
                if type(value).__name__ == "_Intrinsic" and value in _PLAIN:
                    setattr(module, key, _PLAIN[value])
