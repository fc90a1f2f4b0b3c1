"""The one registry of policies: a name gives a class, a configuration gives an object."""

from collections.abc import Mapping
from typing import Any, TypeVar

from mpicomp.errors import ConfigurationError, UnknownNameError
from mpicomp.policies.policy import Policy

_classes: dict[str, type[Policy]] = {}

Class = TypeVar("Class", bound=type[Policy])


def register_policy(cls: Class) -> Class:
    """Make a policy known under its ``id``; use it as a decorator.

    Raises
    ------
    ConfigurationError
        Where another class has that id.
    """
    other = _classes.setdefault(cls.id, cls)
    if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ConfigurationError(f"policy: '{cls.id}' is already {other.__module__}.{other.__qualname__}")
    _classes[cls.id] = cls
    return cls


def get_policy(config: str | Mapping[str, Any] | Policy) -> Policy:
    """Build a policy from a name, or from a configuration with its name under ``"id"``.

    Parameters
    ----------
    config : str, mapping or Policy
        A policy is given back as it is: it serves one reducer.

    Raises
    ------
    UnknownNameError
        Where no policy has that name; the message gives the nearest one.
    ConfigurationError
        Where the configuration has a setting that the policy does not know, or a bad value.

    Examples
    --------
    >>> get_policy({"id": "gravac", "window": 50}).window
    50
    """
    if isinstance(config, Policy):
        return config
    settings: dict[str, Any] = {"id": config} if isinstance(config, str) else dict(config)
    try:
        name = settings.pop("id")
    except KeyError:
        raise ConfigurationError(f"policy: a configuration names its policy under 'id', got {settings!r}") from None
    return policy_class(name).from_config(settings)


def list_policies() -> list[str]:
    """Give the names of all policies, sorted.

    Examples
    --------
    >>> {"auto", "static"} <= set(list_policies())
    True
    """
    return sorted(_classes)


def policy_class(name: str) -> type[Policy]:
    """Give the class behind a name."""
    if name not in _classes:
        raise UnknownNameError("policy", name, _classes)
    return _classes[name]
