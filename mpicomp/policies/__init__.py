"""Policies choose plans: which scheme each bucket uses in a step."""

from mpicomp.policies.static import Plan, Static

__all__ = ["Plan", "Static", "list_policies"]


def list_policies() -> list[str]:
    """Give the names of all policies, sorted.

    Examples
    --------
    >>> list_policies()
    ['auto', 'static']
    """
    return ["auto", "static"]
