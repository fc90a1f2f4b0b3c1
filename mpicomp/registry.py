"""One register for compressors, collectives, policies and training tasks, built in or a user's own.

A class is registered where it is defined. Built-in ones stand in packages whose modules are all imported at the first
look-up, and so are plugins: a new one is one file, and nothing else names it.
"""

import importlib
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from mpicomp import plugins
from mpicomp.errors import ConfigurationError, UnknownNameError

Object = TypeVar("Object")
Class = TypeVar("Class", bound=type)


def register(cls: Class) -> Class:
    """Make a compressor, collective, policy or training task known by its name; use it as a decorator.

    Parameters
    ----------
    cls : type
        Derived from `mpicomp.Compressor`, `mpicomp.collectives.Scheme`, `mpicomp.policies.Policy` or
        `mpicomp.bench.tasks.Task`, which tell what kind it is. The name is its ``id``; a task's is its ``name``.

    Raises
    ------
    ConfigurationError
        Where it is of no known kind, has no name, or another class has that id.
    """
    kind = getattr(cls, "kind", None)
    if kind not in REGISTRIES:
        raise ConfigurationError(
            f"register: {cls!r} is neither a Compressor, a Scheme, a Policy nor a Task; derive it from one of them"
        )
    return REGISTRIES[kind].register(cls)


class Registry(Generic[Object]):
    """Classes of one kind by their ``id``, each with a class method ``from_config`` that builds an object.

    Parameters
    ----------
    kind : str
        What they are, for messages; their attribute ``kind``.
    packages : sequence of str
        Where built-in ones are: all modules of these packages are imported at the first look-up.
    key : str
        The attribute with a class's name.
    """

    def __init__(self, kind: str, packages: Sequence[str], key: str = "id") -> None:
        self._kind = kind
        self._key = key
        self._packages = packages
        self._loaded = False
        self._classes: dict[str, Any] = {}
        self._places: dict[str, tuple[str, str]] = {}  # where each was defined, and what it is called there

    def register(self, cls: Class) -> Class:
        """Take up a class; see `register`."""
        name = getattr(cls, self._key, None)
        if not isinstance(name, str):
            raise ConfigurationError(f"{self._kind}: {cls.__qualname__} needs {self._key}, a string, got {name!r}")
        place = _file_of(cls), cls.__qualname__
        if name in self._classes and self._places[name] != place:
            other = self._classes[name]
            raise ConfigurationError(f"{self._kind}: '{name}' is already {other.__module__}.{other.__qualname__}")
        self._classes[name], self._places[name] = cls, place
        return cls

    def build(self, config: str | Mapping[str, Any]) -> Object:
        """Build an object from a name, or from a configuration with its name under ``"id"``.

        Raises
        ------
        UnknownNameError
            Where nothing has that name; the message gives the nearest one.
        ConfigurationError
            Where the configuration has a parameter that the class does not know, or a bad value.
        """
        parameters: dict[str, Any] = {"id": config} if isinstance(config, str) else dict(config)
        try:
            name = parameters.pop("id")
        except KeyError:
            raise ConfigurationError(
                f"{self._kind}: a configuration names its {self._kind} under 'id', got {parameters!r}"
            ) from None
        built: Object = self._class(name).from_config(parameters)
        return built

    def names(self) -> list[str]:
        """Return all names, sorted."""
        self._load()
        return sorted(self._classes)

    def cls(self, name: str) -> type[Object]:
        """Return the class behind a name."""
        found: type[Object] = self._class(name)
        return found

    def classes(self) -> list[type[Object]]:
        """Return all classes, in the order of their names."""
        return [self._classes[name] for name in self.names()]

    def plugin(self, name: str) -> str | None:
        """Return the file that a class comes from, a module's name where it has none; None for a built-in one."""
        return None if self._class(name).__module__.startswith("mpicomp.") else self._places[name][0]

    def _class(self, name: str) -> Any:
        self._load()
        if name not in self._classes:
            raise UnknownNameError(self._kind, name, self._classes)
        return self._classes[name]

    def _load(self) -> None:
        """Import modules that register classes. They may look up names themselves."""
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


def _file_of(cls: type) -> str:
    """Return the file in which a class is defined, under whatever name it was imported; its module without one."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return os.path.realpath(file) if file else cls.__module__


COMPRESSORS: Registry[Any] = Registry("compressor", ["mpicomp.compressors", "mpicomp.algorithms", "mpicomp.systems"])
COLLECTIVES: Registry[Any] = Registry("collective", ["mpicomp.collectives", "mpicomp.algorithms", "mpicomp.systems"])
POLICIES: Registry[Any] = Registry("policy", ["mpicomp.policies", "mpicomp.systems"])
TASKS: Registry[Any] = Registry("task", ["mpicomp.bench.tasks"], key="name")
REGISTRIES = {"compressor": COMPRESSORS, "collective": COLLECTIVES, "policy": POLICIES, "task": TASKS}
