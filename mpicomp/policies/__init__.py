"""Policies choose plans: which scheme each bucket uses in a step. One file each, one registry."""

from mpicomp.policies.adaptive import Adaptive
from mpicomp.policies.joint import Joint
from mpicomp.policies.policy import Delivered, Named, Plan, Policy, Shape, StepReport
from mpicomp.policies.registry import get_policy, list_policies, policy_class
from mpicomp.policies.schedule import Schedule
from mpicomp.policies.static import Static

__all__ = [
    "Adaptive",
    "Delivered",
    "Joint",
    "Named",
    "Plan",
    "Policy",
    "Schedule",
    "Shape",
    "Static",
    "StepReport",
    "get_policy",
    "list_policies",
    "policy_class",
]
