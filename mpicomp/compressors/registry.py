"""A name gives a class, a configuration gives an object."""

from collections.abc import Mapping
from typing import Any

from mpicomp.compressors.base import Compressor
from mpicomp.registry import COMPRESSORS


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
    built: Compressor = COMPRESSORS.build(config)
    return built


def list_compressors() -> list[str]:
    """Return the names of all compressors, sorted.

    Examples
    --------
    >>> {"dense", "topk"} <= set(list_compressors())
    True
    """
    return COMPRESSORS.names()


def compressor_class(name: str) -> type[Compressor]:
    """Return the class behind a name."""
    return COMPRESSORS.cls(name)
