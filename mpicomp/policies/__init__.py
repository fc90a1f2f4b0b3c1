"""Policies choose plans: which scheme each bucket uses in a step."""

from mpicomp.policies.policy import Plan, Policy, Shape
from mpicomp.policies.selector import Selector
from mpicomp.policies.static import Static

__all__ = ["Plan", "Policy", "Selector", "Shape", "Static", "list_policies"]


def list_policies() -> list[str]:
    """Give the names of all policies, sorted.

    Examples
    --------
    >>> list_policies()
    ['auto', 'static']
    """
    return ["auto", "static"]
