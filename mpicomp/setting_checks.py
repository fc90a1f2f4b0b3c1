"""Checks of settings: a wrong one raises an error with the subsystem, the rule and the value, before any data moves."""

import inspect
import operator
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from types import UnionType
from typing import Any, TypeVar

from mpicomp.errors import ConfigurationError

Checked = TypeVar("Checked")


def to_builtin(value: Any) -> Any:
    """Return a setting with Python's numbers and strings in place of NumPy's, whose arithmetic and JSON differ.

    >>> import numpy as np
    >>> to_builtin({"ratio": np.float32(0.5), "sizes": [np.int64(2)]})
    {'ratio': 0.5, 'sizes': [2]}
    """
    if type(value) in (dict, list, tuple):
        if type(value) is dict:
            return {to_builtin(key): to_builtin(item) for key, item in value.items()}
        return type(value)(map(to_builtin, value))
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # also tensors of a single number
        number = value.item()
        return float(number) if hasattr(number, "dtype") else number  # a long double is its own item
    return value


def check_least(subsystem: str, name: str, value: Any, least: int = 1) -> int:
    """Return an integer of at least ``least``."""
    value = to_builtin(value)
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
    value = to_builtin(value)
    if not is_number(value) or not least <= value <= most:
        raise ConfigurationError(f"{subsystem}: {name} must be a number from {least} to {most}, got {value!r}")
    if above and value == least:
        raise ConfigurationError(f"{subsystem}: {name} must be above {least}, got {value!r}")
    return float(value)


def check_ratio(subsystem: str, ratio: Any, name: str = "ratio") -> float:
    """Return a kept fraction."""
    ratio = to_builtin(ratio)
    if not is_number(ratio) or not 0 < ratio <= 1:
        raise ConfigurationError(f"{subsystem}: {name} is the kept fraction and must be in (0, 1], got {ratio!r}")
    return float(ratio)


def check_multiple(subsystem: str, name: str, value: Any, unit: int) -> int:
    """Return a positive multiple of ``unit``."""
    value = to_builtin(value)
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
    if not any(value is choice or (isinstance(value, type(choice)) and value == choice) for choice in choices):
        *others, last = map(repr, choices)
        raise ConfigurationError(f"{subsystem}: {name} must be {', '.join(others)} or {last}, got {value!r}")


def check_flag(subsystem: str, name: str, value: object) -> None:
    """Raise unless a value is True or False."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{subsystem}: {name} must be True or False, got {value!r}")


Kinds = tuple[type, ...]

_NOUNS: dict[type, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    Mapping: "a mapping",
    Collection: "a list",
    Callable: "a function",  # type: ignore[dict-item]
    type(None): "None",
}


def kinds_of(parameter: inspect.Parameter) -> Kinds | None:
    """Return the types that a parameter's annotation names, or None where its function checks the value by itself.

    >>> def make(model: object, ratio: float | None = None, *, seed: int = 0, comm: Any = None) -> None: ...
    >>> [kinds_of(parameter) for parameter in inspect.signature(make).parameters.values()]
    [None, (<class 'float'>, <class 'NoneType'>), (<class 'int'>,), None]
    """
    annotation = parameter.annotation
    members = typing.get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    if parameter.default is parameter.empty or Any in members:
        return None
    kinds = tuple(typing.get_origin(member) or member for member in members)
    known = all(isinstance(kind, type) and not hasattr(kind, "__array_function__") for kind in kinds)
    return kinds if known else None


def check_kind(subsystem: str, name: str, value: Any, kinds: Kinds, default: Any = None) -> Any:
    """Return a value of one of some types, with Python's numbers in place of NumPy's; ``default`` is an example."""
    if type(value) in kinds:
        return value
    value = to_builtin(value)
    named = all(kind in kinds or not isinstance(value, kind) for kind in (bool, str))
    is_one = isinstance(value, kinds) and named and not isinstance(value, type)
    if is_one or (float in kinds and is_number(value)) or (int in kinds and is_integer(value)):
        return value
    nouns = [_NOUNS.get(kind, f"a {kind.__name__}") for kind in kinds]
    if isinstance(default, str):
        nouns = [f"{noun} such as {default!r}" if noun == _NOUNS[str] else noun for noun in nouns]
    *others, last = " or ".join(nouns).split(" or ")
    got, advice = f"{value!r:.80}", ""
    if isinstance(value, type):
        got, advice = f"the class {value.__name__}", f"; pass an object, {value.__name__}()"
    elif isinstance(value, str) and (float in kinds or int in kinds):
        advice = "; convert it to a number, as argparse does with type=float or type=int"
    expected = f"{', '.join(others)} or {last}" if others else last
    raise ConfigurationError(f"{subsystem}: {name} must be {expected}, got {got}{advice}")


def is_number(value: object) -> bool:
    """Return whether a value is a real number, Python's or NumPy's, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """Return whether a value is an integer, Python's or NumPy's, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)
