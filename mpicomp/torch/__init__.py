"""For PyTorch scripts: an optimizer that averages gradients over MPI ranks before it steps."""

from mpicomp.torch.broadcast import broadcast_parameters
from mpicomp.torch.ddp import DDPState, ddp_comm_hook
from mpicomp.torch.onebit_adam import OneBitAdam
from mpicomp.torch.optimizer import DistributedOptimizer
from mpicomp.torch.optimizer_state import broadcast_optimizer_state
from mpicomp.torch.profiling import show_ranges
from mpicomp.torch.updates import UpdateOptimizer

__all__ = [
    "DDPState",
    "DistributedOptimizer",
    "OneBitAdam",
    "UpdateOptimizer",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ddp_comm_hook",
]

show_ranges()
