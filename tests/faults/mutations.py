"""What may become of a message: mutations of bytes, each drawn from random numbers."""

import struct

SPARE = 64
"""Bytes by which a message may grow."""

# Integers that do most harm where they are read without a check.
_EXTREMES = [0, 1, 2, -1, -2, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63), 255, 65535, 65536]
_NUMBERS = {"<f": [3.4e38, 1e-45], "<d": [1e308, 5e-324, 1e20]}
_NONFINITE = [float("nan"), float("inf"), float("-inf"), -1.0, 0.0]


def mutate(rng, pristine, resizes):
    """Return a mutated message; one in sixteen is left as it is, so that what follows is seen to work again."""
    message = bytearray(pristine)
    if rng.randrange(16):
        for _ in range(rng.randint(1, 3)):
            if message:
                rng.choice([*_IN_PLACE, *(_RESIZING if resizes else [])])(rng, message)
            elif resizes:
                _lengthen(rng, message)
    return message[: len(pristine) + SPARE]


def _flip_bits(rng, message):
    for _ in range(rng.randint(1, 8)):
        message[rng.randrange(len(message))] ^= 1 << rng.randrange(8)


def _shorten(rng, message):
    del message[rng.randrange(len(message)) :]


def _lengthen(rng, message):
    message += _stretch(rng, rng.randint(0, SPARE))


def _put_extreme_integer(rng, message):
    width = rng.choice([1, 2, 4, 8])
    value = rng.choice(_EXTREMES) % (1 << 8 * width)
    _write(message, _field(rng, message, width), value.to_bytes(width, "little"))


def _put_number(rng, message):
    form = rng.choice(list(_NUMBERS))
    value = struct.pack(form, rng.choice(_NONFINITE + _NUMBERS[form]))
    _write(message, _field(rng, message, len(value)), value)


def _change_count(rng, message):
    place = _field(rng, message, 4)
    value = int.from_bytes(message[place : place + 4], "little") + rng.randint(-4, 4)
    _write(message, place, (value % (1 << 32)).to_bytes(4, "little"))


def _swap_fields(rng, message):
    width = rng.choice([1, 2, 4, 8])
    first, second = _field(rng, message, width), _field(rng, message, width)
    before = message[first : first + width]
    _write(message, first, message[second : second + width])
    _write(message, second, before)


def _repeat_or_swap_neighbors(rng, message):
    """As indices that repeat or descend."""
    place = _field(rng, message, 4)
    before = message[place : place + 4]
    _write(message, place, message[place + 4 : place + 8])
    if rng.randrange(2):
        _write(message, place + 4, before)


def _overwrite_stretch(rng, message):
    _write(message, rng.randrange(len(message)), _stretch(rng, rng.randint(1, 64)))


def _copy_stretch(rng, message):
    source = rng.randrange(len(message))
    _write(message, rng.randrange(len(message)), message[source : source + rng.randint(1, 64)])


_RESIZING = [_shorten, _lengthen]
_IN_PLACE = [
    _flip_bits, _put_extreme_integer, _put_number, _change_count, _swap_fields, _repeat_or_swap_neighbors,
    _overwrite_stretch, _copy_stretch,
]  # fmt: skip


def _field(rng, message, width):
    """Return the place of a field: of the first 32 bytes, where headers are, as often as of all others."""
    fields = max(1, len(message) // width)
    if rng.randrange(2):
        fields = min(fields, max(1, 32 // width))
    return width * rng.randrange(fields)


def _stretch(rng, length):
    return rng.choice([bytes(length), b"\xff" * length, rng.randbytes(length)])


def _write(message, place, data):
    """Overwrite bytes; what does not fit is cut off."""
    data = data[: max(0, len(message) - place)]
    message[place : place + len(data)] = data
