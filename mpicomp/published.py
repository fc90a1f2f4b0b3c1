"""The switch ``published``: a system as its paper has it, from one set of values for its parameters."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from mpicomp.errors import ConfigurationError

Class = TypeVar("Class", bound=type)


def published(**values: Any) -> Callable[[Class], Class]:
    """Decorate a dataclass with a field ``published``, where True sets parameters to their paper's values.

    A parameter that is given besides ``published`` keeps what was given. The values are found as ``as_published`` of
    the class. Anything but True and False is a `ConfigurationError` when an instance is made.

    Parameters
    ----------
    **values
        The paper's, by the names of parameters.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @published(window=500)
    ... @dataclass
    ... class Search:
    ...     window: int = 20
    ...     published: bool = False
    >>> Search(), Search(published=True).window, Search(published=True, window=7).window
    (Search(window=20, published=False), 500, 7)
    """

    def decorate(cls: Class) -> Class:
        as_given = cls.__init__  # type: ignore[misc]
        signature = inspect.signature(as_given)

        @functools.wraps(as_given)
        def init(self: Any, *arguments: Any, **parameters: Any) -> None:
            bound = signature.bind(self, *arguments, **parameters).arguments
            switch = bound.get("published", False)
            if not isinstance(switch, bool):
                name = getattr(cls, "id", cls.__name__)
                raise ConfigurationError(f"{name}: published must be True or False, got {switch!r}")
            if switch:
                parameters |= {name: value for name, value in values.items() if name not in bound}
            as_given(self, *arguments, **parameters)

        cls.__init__ = init  # type: ignore[misc]
        # Of a class that has a __new__, too, inspect would tell that one's.
        cls.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
        cls.as_published = values  # type: ignore[attr-defined]
        return cls

    return decorate


def is_published(thing: Any) -> bool:
    """Return whether a compressor or a policy has the switch, and it is on."""
    return bool(getattr(thing, "published", False))
