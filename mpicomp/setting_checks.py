"""Checks of settings: a wrong one raises an error with the subsystem, the rule and the value, before any data moves."""

import operator
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

from mpicomp.errors import ConfigurationError

Checked = TypeVar("Checked")


def check_least(subsystem: str, name: str, value: Any, least: int = 1) -> int:
    """Return an integer of at least ``least``."""
    if not is_integer(value) or value < least:
        raise ConfigurationError(f"{subsystem}: {name} must be an integer of at least {least}, got {value!r}")
    return int(value)


def to_whole(subsystem: str, name: str, value: Any, least: int | None = None) -> int:
    """Return a whole number of whatever integer type it came in."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigurationError(f"{subsystem}: {name} must be a whole number, got {value!r}") from None
    if least is not None and number < least:
        raise ConfigurationError(f"{subsystem}: {name} must be at least {least}, got {value!r}")
    return number


def to_number(subsystem: str, name: str, value: Any) -> float:
    """Return a number of whatever type it came in; 0-dimensional arrays and tensors are among them."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigurationError(f"{subsystem}: {name} must be a number or None, got {value!r}") from None


def check_range(subsystem: str, name: str, value: Any, least: float, most: float, above: bool = False) -> float:
    """Return a number from ``least`` to ``most``; with ``above`` ``least`` is refused."""
    if not is_number(value) or not least <= value <= most:
        raise ConfigurationError(f"{subsystem}: {name} must be a number from {least} to {most}, got {value!r}")
    if above and value == least:
        raise ConfigurationError(f"{subsystem}: {name} must be above {least}, got {value!r}")
    return float(value)


def check_ratio(subsystem: str, ratio: Any, name: str = "ratio") -> float:
    """Return a kept fraction."""
    if not is_number(ratio) or not 0 < ratio <= 1:
        raise ConfigurationError(f"{subsystem}: {name} is the kept fraction and must be in (0, 1], got {ratio!r}")
    return float(ratio)


def check_multiple(subsystem: str, name: str, value: Any, unit: int) -> int:
    """Return a positive multiple of ``unit``."""
    if not is_integer(value) or value < 1 or value % unit:
        raise ConfigurationError(f"{subsystem}: {name} must be a multiple of {unit}, got {value!r}")
    return int(value)


def check_layers(
    subsystem: str, setting: str, layers: Any, check: Callable[[str, Any], Checked]
) -> dict[str, Checked] | None:
    """Return the values of a setting by patterns of parameters' names, each as ``check(name, value)`` returns it."""
    if layers is None:
        return None
    if not isinstance(layers, Mapping):
        raise ConfigurationError(f"{subsystem}: layers must map names to {setting}, got {layers!r}")
    return {str(pattern): check(f"layers['{pattern}']", value) for pattern, value in layers.items()}


def check_choice(subsystem: str, name: str, value: object, choices: Sequence[object]) -> None:
    """Raise unless a value is one of its choices."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise ConfigurationError(f"{subsystem}: {name} must be {', '.join(others)} or {last}, got {value!r}")


def check_flag(subsystem: str, name: str, value: object) -> None:
    """Raise unless a value is True or False."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{subsystem}: {name} must be True or False, got {value!r}")


def is_number(value: object) -> bool:
    """Return whether a value is a real number, Python's or NumPy's, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """Return whether a value is an integer, Python's or NumPy's, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)
