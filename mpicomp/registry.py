"""Registries of compressors, collectives, policies and training tasks, built in or from a plugin.

A class is registered where it is defined. Modules of built-in packages, and plugins, are imported at the first look-up:
a new class is one file, and nothing else names it.
"""

import importlib
import inspect
import os
import pkgutil
import sys
from abc import ABCMeta
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar, cast

from mpicomp import plugins
from mpicomp.errors import ConfigurationError, UnknownNameError
from mpicomp.setting_checks import check_flag, to_builtin

Object = TypeVar("Object")
Class = TypeVar("Class", bound=type)

REGISTRIES: "dict[str, Registry[Any]]" = {}  # registries by kind; importing the base class of a kind adds its registry


def register(cls: Class) -> Class:
    """Register a compressor, collective, policy or training task under its name; use it as a decorator.

    Parameters
    ----------
    cls : type
        Derived from `mpicomp.Compressor`, `mpicomp.collectives.Scheme`, `mpicomp.policies.Policy` or
        `mpicomp.bench.tasks.Task`, which have a ``kind``. Its name is its ``id``, or ``name`` for a task.

    Raises
    ------
    ConfigurationError
        For an unknown kind, a missing name, or the name of another class.
    """
    kind = getattr(cls, "kind", None)
    if kind not in REGISTRIES:
        raise ConfigurationError(
            f"register: {cls!r} is neither a Compressor, a Scheme, a Policy nor a Task; derive it from one of them"
        )
    return REGISTRIES[kind].register(cls)


class Configurable(ABCMeta):
    """Metaclass of dataclasses whose fields are settings: NumPy's numbers become Python's before they are checked."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature of a class, which is not that of `__call__`."""
        _, *parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
        return inspect.Signature(parameters)

    def __call__(cls, *values: Any, **settings: Any) -> Any:
        entries = [entry for entry in fields(cls) if entry.init] if is_dataclass(cls) else []
        known = [entry.name for entry in entries]
        unknown = [name for name in settings if name not in known]
        named = [entry.name for entry in entries if not entry.metadata]  # the others are set when it is bound
        if entries and unknown:
            raise UnknownNameError(f"{cls.__name__}: settings", unknown[0], named)
        if len(values) > len(known):
            raise ConfigurationError(
                f"{cls.__name__}: takes {', '.join(named) or 'no settings'}, got {len(values)} values"
            )
        return super().__call__(*map(to_builtin, values), **to_builtin(settings))


class Registry(Generic[Object]):
    """Classes of one ``kind`` by the attribute ``key``, from modules of ``packages`` that the first look-up imports."""

    def __init__(self, kind: str, packages: Sequence[str], key: str = "id") -> None:
        self._kind = kind
        self._key = key
        self._packages = packages
        self._loaded = False
        self._classes: dict[str, Any] = {}
        self._origins: dict[str, tuple[str, str]] = {}  # the file that defines a class, and its name there
        REGISTRIES[kind] = self

    def register(self, cls: Class) -> Class:
        """Add a class; see `register`."""
        name = getattr(cls, self._key, None)
        if not isinstance(name, str):
            raise ConfigurationError(f"{self._kind}: {cls.__qualname__} needs {self._key}, a string, got {name!r}")
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        if not hasattr(cls, "paper") and any("paper" in getattr(base, "__annotations__", ()) for base in cls.__mro__):
            missing.append("paper")
        if missing:
            raise ConfigurationError(f"{self._kind}: '{name}' lacks {', '.join(missing)}; see docs/extending.md")
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        origin = os.path.realpath(file) if file else cls.__module__, cls.__qualname__
        if name in self._classes and self._origins[name] != origin:
            other = self._classes[name]
            raise ConfigurationError(f"{self._kind}: '{name}' is already {other.__module__}.{other.__qualname__}")
        self._classes[name], self._origins[name] = cls, origin
        return cls

    def build(self, config: str | Mapping[str, Any] | Object) -> Object:
        """Return an object from its name or from a configuration with that under ``"id"``; return an object unchanged.

        ``"as_published": True`` in a configuration sets the other settings to the values of the paper.

        >>> from mpicomp import get_compressor
        >>> get_compressor({"id": "topk", "ratio": 0.05})
        TopK(ratio=0.05)
        >>> get_compressor("dense").get_config()
        {'id': 'dense', 'wire': None}
        """
        if getattr(config, "kind", None) == self._kind and not isinstance(config, type):
            return cast(Object, config)
        if isinstance(config, type):
            raise ConfigurationError(
                f"{self._kind}: an object, a name or a configuration is needed, got the class {config.__name__}; pass "
                f"an object, {config.__name__}()"
            )
        if not isinstance(config, str | Mapping):
            raise ConfigurationError(f"{self._kind}: a name or a configuration is needed, got {config!r}")
        parameters: dict[str, Any] = {"id": config} if isinstance(config, str) else dict(config)
        try:
            name = parameters.pop("id")
        except KeyError:
            raise ConfigurationError(
                f"{self._kind}: a configuration names its {self._kind} under 'id', got {parameters!r}"
            ) from None
        cls: Any = self.cls(name)
        published = parameters.pop("as_published", False)
        check_flag(name, "as_published", published)
        if published and not hasattr(cls, "as_published"):
            raise ConfigurationError(f"{name}: has no published settings that differ; leave as_published out")
        built: Object = cls.as_published(**parameters) if published else cls.from_config(parameters)
        return built

    def names(self) -> list[str]:
        """Return all names, sorted."""
        self._load()
        return sorted(self._classes)

    def cls(self, name: str) -> type[Object]:
        """Return the class with a name."""
        self._load()
        if name not in self._classes:
            raise UnknownNameError(self._kind, name, self._classes)
        found: type[Object] = self._classes[name]
        return found

    def classes(self) -> list[type[Object]]:
        """Return all classes, in the order of their names."""
        return [self._classes[name] for name in self.names()]

    def plugin(self, name: str) -> str | None:
        """Return the file of a class, or its module without one; None for a built-in class."""
        return None if self.cls(name).__module__.startswith("mpicomp.") else self._origins[name][0]

    def _load(self) -> None:
        if not self._loaded:
            self._loaded = True
            try:
                for name in self._packages:
                    package = importlib.import_module(name)
                    for found in pkgutil.iter_modules(package.__path__):
                        importlib.import_module(f"{name}.{found.name}")
            except BaseException:
                self._loaded = False
                raise
        plugins.load_all()
