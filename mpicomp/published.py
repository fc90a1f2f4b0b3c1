"""The switch ``published``: a system as its paper has it, from one set of values for its parameters."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def published(**values: Any) -> Callable[[Class], Class]:
    """Give a dataclass with a field ``published`` the paper's values for where that is True; use it as a decorator.

    A parameter that is given besides ``published`` counts; of all others those that are named here have the value
    that is named here. The values are found as ``as_published`` of the class.

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
            if bound.get("published") is True:
                parameters |= {name: value for name, value in values.items() if name not in bound}
            as_given(self, *arguments, **parameters)

        cls.__init__ = init  # type: ignore[misc]
        cls.as_published = values  # type: ignore[attr-defined]
        return cls

    return decorate


def is_published(thing: Any) -> bool:
    """Return whether a compressor or a policy has the switch, and it is on."""
    return getattr(thing, "published", False) is True
