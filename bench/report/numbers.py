"""Numbers as people write them."""

import math
from collections.abc import Sequence


def seconds(value: float) -> str:
    """Return seconds with three digits and the unit that fits.

    >>> seconds(0.02154), seconds(75.3), seconds(8.2e-6), seconds(5000)
    ('21.5 ms', '75.3 s', '8.2 us', '1 h 23 min')
    """
    if not math.isfinite(value):
        return "unknown"
    if value >= 3600:
        return f"{value // 3600:.0f} h {value % 3600 / 60:.0f} min"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{digits(value / size)} {unit}"
    return f"{digits(value * 1e6)} us"


def amount(value: float) -> str:
    """Return bytes with three digits and a decimal unit.

    >>> amount(153128), amount(17), amount(2.5e9)
    ('153 kB', '17 B', '2.5 GB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{digits(value / size)} {unit}"
    return f"{digits(value)} B"


def digits(value: float, count: int = 3) -> str:
    """Return a number with ``count`` digits, without an exponent where that is short.

    >>> digits(1234567.0), digits(0.98765), digits(0.000012), digits(20.0)
    ('1,234,567', '0.988', '1.2e-05', '20')
    """
    if not math.isfinite(value):
        return "none"
    return f"{value:,.0f}" if abs(value) >= 10 ** (count - 1) else f"{value:.{count}g}"


def times(value: float) -> str:
    """Return a factor, such as ``4.2 times``."""
    return f"{digits(value, 2)} times"


def listed(parts: Sequence[str]) -> str:
    """Join with commas and a last "and".

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
