"""A name gives a class, a configuration gives an object."""

from collections.abc import Mapping
from typing import Any

from mpicomp.policies.policy import Policy
from mpicomp.registry import POLICIES


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
    >>> from mpicomp.policies import get_policy
    >>> get_policy({"id": "gravac", "window": 50}).window
    50
    """
    if isinstance(config, Policy):
        return config
    built: Policy = POLICIES.build(config)
    return built


def list_policies() -> list[str]:
    """Return the names of all policies, sorted.

    Examples
    --------
    >>> from mpicomp.policies import list_policies
    >>> {"auto", "static"} <= set(list_policies())
    True
    """
    return POLICIES.names()


def policy_class(name: str) -> type[Policy]:
    """Return the class behind a name."""
    return POLICIES.cls(name)
