"""The cost model: predict the seconds of a plan from measured links, operations and kernels; learn at every step."""

from mpicomp.cost.calibrate import broadcast_flags, calibrate, measure_kernels, share_model
from mpicomp.cost.formulas import Terms
from mpicomp.cost.link_probe import probe_link
from mpicomp.cost.model import CostModel
from mpicomp.cost.network_model import Network, sample_views
from mpicomp.cost.plans import Candidates, Prediction

__all__ = [
    "Candidates",
    "CostModel",
    "Network",
    "Prediction",
    "Terms",
    "broadcast_flags",
    "calibrate",
    "measure_kernels",
    "probe_link",
    "sample_views",
    "share_model",
]
