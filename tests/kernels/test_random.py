import numba
import numpy as np
import pytest
from mpicomp.kernels.cpu.bits import draw, halves

KEYS = [0, 1, 2, 3, 2**32, 2**63 + 5, 0x123456789ABCDEF]
COUNT = 1 << 16


@numba.njit
def _many(start, low, high, out):
    for i in range(out.size):
        out[i] = draw(start + i, low, high)


def many(key, start=0):
    out = np.empty(COUNT, np.uint32)
    _many(start, *halves(key), out)
    return out


def slowly(index, key):
    mixed = (key + 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    mixed ^= mixed >> 31
    low, high, most = mixed % 2**32, mixed >> 32, 2**32
    word = index % most ^ low
    word ^= word >> 16
    word = word * 0x7FEB352D % most
    word ^= word >> 15
    word = (word ^ high) * 0x846CA68B % most
    return word ^ word >> 16


@pytest.mark.parametrize("key", KEYS)
def test_it_is_what_the_definition_says(key):
    assert many(key)[:500].tolist() == [slowly(index, key) for index in range(500)]
    assert many(key, start=2**32 - 10)[:20].tolist() == [slowly(index, key) for index in range(2**32 - 10, 2**32 + 10)]
