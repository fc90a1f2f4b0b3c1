"""The one registry of compressors: a name gives a class, a configuration gives an object."""

from collections.abc import Mapping
from typing import Any, TypeVar

from mpicomp.compressors.base import Compressor
from mpicomp.errors import ConfigurationError, UnknownNameError

_classes: dict[str, type[Compressor]] = {}

Class = TypeVar("Class", bound=type[Compressor])


def register_compressor(cls: Class) -> Class:
    """Make a compressor known under its ``id``; use it as a decorator.

    Raises
    ------
    ConfigurationError
        Where another class has that id.
    """
    other = _classes.setdefault(cls.id, cls)
    if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ConfigurationError(f"compressor: '{cls.id}' is already {other.__module__}.{other.__qualname__}")
    _classes[cls.id] = cls
    return cls


def get_compressor(config: str | Mapping[str, Any] | Compressor) -> Compressor:
    """Build a compressor from a name, or from a configuration with its name under ``"id"``.

    Parameters
    ----------
    config : str, mapping or Compressor
        A compressor is given back as it is.

    Returns
    -------
    Compressor

    Raises
    ------
    UnknownNameError
        Where no compressor has that name; the message gives the nearest one.
    ConfigurationError
        Where the configuration has a parameter that the compressor does not know, or a bad value.

    Examples
    --------
    >>> get_compressor({"id": "topk", "ratio": 0.05})
    TopK(ratio=0.05)
    >>> get_compressor("dense").get_config()
    {'id': 'dense', 'wire': None}
    """
    if isinstance(config, Compressor):
        return config
    parameters: dict[str, Any] = {"id": config} if isinstance(config, str) else dict(config)
    try:
        name = parameters.pop("id")
    except KeyError:
        raise ConfigurationError(
            f"compressor: a configuration names its compressor under 'id', got {parameters!r}"
        ) from None
    if name not in _classes:
        raise UnknownNameError("compressor", name, _classes)
    return _classes[name].from_config(parameters)


def list_compressors() -> list[str]:
    """Give the names of all compressors, sorted.

    Examples
    --------
    >>> {"dense", "topk"} <= set(list_compressors())
    True
    """
    return sorted(_classes)


def compressor_class(name: str) -> type[Compressor]:
    """Give the class behind a name."""
    if name not in _classes:
        raise UnknownNameError("compressor", name, _classes)
    return _classes[name]
