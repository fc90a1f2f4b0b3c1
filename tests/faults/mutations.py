"""Mutations of messages, compiled: what a damaged link, another version or an enemy could send."""

import numba
import numpy as np

# What integers that are read without a look at them do most harm with.
_EXTREMES = np.array([0, 1, 2, -1, -2, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63), 255, 65535, 65536], np.int64)
_SINGLES = np.array([np.nan, np.inf, -np.inf, -1.0, 0.0, 3.4e38, 1e-45], np.float32).view(np.uint32)
_DOUBLES = np.array([np.nan, np.inf, -np.inf, -1.0, 0.0, 1e308, 5e-324, 1e20], np.float64).view(np.uint64)
KINDS = 10


@numba.njit(nogil=True)
def draw(state):
    """Return the next 64 bits of SplitMix64, whose state is an array of one number."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@numba.njit(nogil=True)
def below(state, bound):
    return np.int64(draw(state) % np.uint64(bound))


@numba.njit(nogil=True)
def put(out, place, width, value):
    for i in range(min(width, out.size - place)):
        out[place + i] = np.uint8(np.uint64(value) >> np.uint64(8 * i) & np.uint64(255))


@numba.njit(nogil=True)
def place_of(state, size, width):
    """Return the place of a field: of the first 32 bytes, where headers are, as often as of all others."""
    fields = max(1, size // width)
    if below(state, 2):
        fields = min(fields, max(1, 32 // width))
    return below(state, fields) * width


@numba.njit(nogil=True)
def mutate_once(state, out, size, room, resize):
    """Change the first ``size`` bytes of an array in one way, and return how many they are then."""
    kind = below(state, KINDS)
    if size == 0 and kind != 2:
        return size
    width = 1 << below(state, 4)
    if kind == 0:  # bits
        for _ in range(1 + below(state, 8)):
            out[below(state, size)] ^= np.uint8(1 << below(state, 8))
    elif kind == 1:  # too short
        return below(state, size) if resize else size
    elif kind == 2:  # too long
        if not resize:
            return size
        longer = size + below(state, room - size + 1)
        filling = below(state, 3)
        for i in range(size, longer):
            out[i] = 0 if filling == 0 else 255 if filling == 1 else below(state, 256)
        return longer
    elif kind == 3:  # an extreme integer
        put(out[:size], place_of(state, size, width), width, _EXTREMES[below(state, _EXTREMES.size)])
    elif kind == 4:  # two fields take each other's place
        first, second = place_of(state, size, width), place_of(state, size, width)
        for i in range(min(width, size - max(first, second))):
            out[first + i], out[second + i] = out[second + i], out[first + i]
    elif kind == 5:  # a number that is none
        if below(state, 2):
            put(out[:size], place_of(state, size, 4), 4, np.int64(_SINGLES[below(state, _SINGLES.size)]))
        else:
            put(out[:size], place_of(state, size, 8), 8, np.int64(_DOUBLES[below(state, _DOUBLES.size)]))
    elif kind == 6:  # neighbours are the same, or swapped: indices that repeat or descend
        place = place_of(state, size, 4)
        swaps = below(state, 2)
        for i in range(min(4, size - place - 4)):
            before = out[place + i]
            out[place + i] = out[place + 4 + i]
            if swaps:
                out[place + 4 + i] = before
    elif kind == 7:  # a count that lies, by a little
        place = place_of(state, size, 4)
        value = np.int64(0)
        for i in range(min(4, size - place)):
            value |= np.int64(out[place + i]) << (8 * i)
        put(out[:size], place, 4, value + below(state, 9) - 4)
    elif kind == 8:  # a stretch of the same byte, or of random ones
        start = below(state, size)
        filling = below(state, 3)
        for i in range(start, min(size, start + 1 + below(state, 64))):
            out[i] = 0 if filling == 0 else 255 if filling == 1 else below(state, 256)
    else:  # a stretch that stands somewhere else too
        start, source = below(state, size), below(state, size)
        for i in range(min(1 + below(state, 64), size - max(start, source))):
            out[start + i] = out[source + i]
    return size


@numba.njit(nogil=True)
def mutate(state, pristine, out, resize):
    """Write a mutated message to ``out``, which has room for a longer one, and return its length.

    One in sixteen is left as it is, so that what follows a mutation is seen to work again.
    """
    size = pristine.size
    out[:size] = pristine
    if below(state, 16) == 0:
        return size
    for _ in range(1 + below(state, 3)):
        size = mutate_once(state, out, size, out.size, resize)
    return size
