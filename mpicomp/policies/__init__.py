"""Policies choose plans: which scheme each bucket uses in a step. One file each, one registry."""

from mpicomp.policies.accordion import Accordion
from mpicomp.policies.adaptive import Adaptive
from mpicomp.policies.flexible import Flexible
from mpicomp.policies.gravac import GraVAC
from mpicomp.policies.joint import Joint
from mpicomp.policies.lgreco import LGreCo
from mpicomp.policies.policy import Delivered, Named, Plan, Policy, Shape, StepReport
from mpicomp.policies.registry import get_policy, list_policies, policy_class
from mpicomp.policies.schedule import Schedule
from mpicomp.policies.static import Static

__all__ = [
    "Accordion",
    "Adaptive",
    "Delivered",
    "Flexible",
    "GraVAC",
    "Joint",
    "LGreCo",
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
