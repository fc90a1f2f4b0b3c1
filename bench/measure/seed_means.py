"""Means and deviations over the seeds of a comparison, in rows and in cells of a table."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, and none where a seed has no value: a mean of the others would flatter."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def mean_and_deviation(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    """Return the mean by its name, and the deviation, which takes two values, as ``name_deviation``."""
    known = [value for value in values if value is not None]
    enough = len(known) == len(values)
    deviation = float(np.std(known, ddof=1)) if enough and len(known) > 1 else None
    return {name: mean(values), f"{name}_deviation": deviation}


def finite(value: float) -> float | None:
    """Return a number that JSON has, None where it is none."""
    return float(value) if math.isfinite(value) else None


def cell(row: Mapping[str, Any], name: str, form: str, scale: float = 1.0) -> str:
    """Return a mean of a row with its deviation in brackets, both over ``scale``.

    Examples
    --------
    >>> cell({"wire": 2e6, "wire_deviation": 1e5}, "wire", ".1f", 1e6)
    '2.0 (0.1)'
    """
    value, deviation = row[name], row[f"{name}_deviation"]
    if value is None:
        return "-"
    return format(value / scale, form) + ("" if deviation is None else f" ({format(deviation / scale, form)})")
