"""Count sketches as they are defined, in Python's own integers and dictionaries."""

import statistics


def halves(key):
    """The two numbers of 32 bits that a key of 64 bits is mixed into."""
    value = (key + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    value ^= value >> 31
    return value % 2**32, value >> 32


def word(index, low, high):
    """The 32-bit hash of an index."""
    value = index % 2**32 ^ low
    value = (value ^ (value >> 16)) * 0x7FEB352D % 2**32
    value = (value ^ (value >> 15) ^ high) * 0x846CA68B % 2**32
    return value ^ (value >> 16)


def cells_of(index, key, rows, columns):
    """The cell of an element in every row, and its sign there."""
    low, high = halves(key)
    for row in range(rows):
        hashed = word(index, word(2 * row, low, high), word(2 * row + 1, low, high))
        yield row, hashed * columns >> 32, -1 if hashed % 2 else 1


def table_of(array, key, rows, columns):
    """A table with all its cells."""
    cells = {(row, column): 0.0 for row in range(rows) for column in range(columns)}
    for index, value in enumerate(array.tolist()):
        for row, column, sign in cells_of(index, key, rows, columns):
            cells[row, column] += sign * value
    return cells


def estimates_of(cells, key, rows, columns, size):
    """What a table says of every element."""
    return [
        statistics.median(sign * cells[row, column] for row, column, sign in cells_of(index, key, rows, columns))
        for index in range(size)
    ]
