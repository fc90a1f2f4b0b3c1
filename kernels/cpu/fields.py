"""Integers in fields of 64-bit words, wide enough that sums over ranks stay in their fields."""


def fields_of(largest: int) -> int:
    """Give how many fields a word has when none may hold more than ``largest``.

    Examples
    --------
    >>> fields_of(7), fields_of(8), fields_of(2**40)
    (21, 16, 1)
    """
    return 64 // max(1, int(largest).bit_length())
