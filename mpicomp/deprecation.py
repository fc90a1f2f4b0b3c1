"""Names that have moved: they still work where they were, and say where they are now."""

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def moved(module: str, homes: str | Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` that finds names where they are now, with a `DeprecationWarning`.

    Parameters
    ----------
    module : str
        Where they were.
    homes : str or mapping of str to str
        The module that has all of them now, or that of each name; with another name there as ``"module:name"``.
    """

    def find(name: str) -> Any:
        home = homes if isinstance(homes, str) else homes.get(name)
        if home is None or name.startswith("__"):
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        home, _, now = home.partition(":")
        value = getattr(importlib.import_module(home), now or name)
        where = f"{now} from {home}" if now else f"it from {home}"
        warnings.warn(f"{module}.{name} has moved: import {where}", DeprecationWarning, stacklevel=2)
        return value

    return find
