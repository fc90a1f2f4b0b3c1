"""The cost model: predict the seconds of a plan from measured links, operations and kernels; learn at every step."""

from mpicomp.cost.calibrate import (
    calibrate,
    calibrate_for_elsewhere,
    first_says,
    flags_of_first,
    measure_kernels,
    share_model,
)
from mpicomp.cost.formulas import Terms
from mpicomp.cost.model import CostModel
from mpicomp.cost.network import Network, seen_by_some
from mpicomp.cost.plans import Candidates, Prediction
from mpicomp.cost.probe import probe_link

__all__ = [
    "Candidates",
    "CostModel",
    "Network",
    "Prediction",
    "Terms",
    "calibrate",
    "calibrate_for_elsewhere",
    "first_says",
    "flags_of_first",
    "measure_kernels",
    "probe_link",
    "seen_by_some",
    "share_model",
]
