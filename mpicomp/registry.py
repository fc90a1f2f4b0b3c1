"""A registry: a name gives a class, a configuration gives an object."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from mpicomp.errors import ConfigurationError, UnknownNameError

Object = TypeVar("Object")
Class = TypeVar("Class", bound=type)


class Registry(Generic[Object]):
    """Classes of one kind by their ``id``, each with a class method ``from_config`` that builds an object.

    Parameters
    ----------
    kind : str
        What they are, for messages.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._classes: dict[str, Any] = {}

    def register(self, cls: Class) -> Class:
        """Take up a class.

        Raises
        ------
        ConfigurationError
            Where another class has that id.
        """
        name = cls.id  # type: ignore[attr-defined]
        other = self._classes.setdefault(name, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigurationError(f"{self._kind}: '{name}' is already {other.__module__}.{other.__qualname__}")
        self._classes[name] = cls
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
        """Give all names, sorted."""
        return sorted(self._classes)

    def cls(self, name: str) -> type[Object]:
        """Give the class behind a name."""
        found: type[Object] = self._class(name)
        return found

    def _class(self, name: str) -> Any:
        if name not in self._classes:
            raise UnknownNameError(self._kind, name, self._classes)
        return self._classes[name]
