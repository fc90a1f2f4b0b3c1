"""The one registry of compressors: a name gives a class, a configuration gives an object."""

from collections.abc import Mapping
from typing import Any, TypeVar

from mpicomp.compressors.base import Compressor
from mpicomp.registry import Registry

_registry: Registry[Compressor] = Registry("compressor")

Class = TypeVar("Class", bound=type[Compressor])


def register_compressor(cls: Class) -> Class:
    """Make a compressor known under its ``id``; use it as a decorator.

    Raises
    ------
    ConfigurationError
        Where another class has that id.
    """
    return _registry.register(cls)


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
    return config if isinstance(config, Compressor) else _registry.build(config)


def list_compressors() -> list[str]:
    """Give the names of all compressors, sorted.

    Examples
    --------
    >>> {"dense", "topk"} <= set(list_compressors())
    True
    """
    return _registry.names()


def compressor_class(name: str) -> type[Compressor]:
    """Give the class behind a name."""
    return _registry.cls(name)
