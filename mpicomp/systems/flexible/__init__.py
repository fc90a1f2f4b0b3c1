"""Flexible Communication: one ratio and one kind of collective for the whole model, chosen by time and by gain."""

from mpicomp.systems.flexible.option_policy import Flexible
from mpicomp.systems.flexible.trials import TrialDriver

__all__ = ["Flexible", "TrialDriver"]
