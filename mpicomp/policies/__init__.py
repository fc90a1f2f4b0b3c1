"""Policies choose plans: which scheme each bucket uses in a step. One file each, one registry."""

from mpicomp.policies.auto import Auto
from mpicomp.policies.measured_policy import Adaptive
from mpicomp.policies.policy import POLICIES, BucketOutcome, Plan, Policy, Shape, StepReport, UserSettings
from mpicomp.policies.schedule import Schedule
from mpicomp.policies.static import Static

__all__ = [
    "POLICIES",
    "Adaptive",
    "Auto",
    "BucketOutcome",
    "Plan",
    "Policy",
    "Schedule",
    "Shape",
    "Static",
    "StepReport",
    "UserSettings",
    "get_policy",
    "list_policies",
    "policy_class",
]

get_policy = POLICIES.build
list_policies = POLICIES.names
policy_class = POLICIES.cls
