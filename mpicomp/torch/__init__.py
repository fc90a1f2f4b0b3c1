"""For PyTorch scripts: an optimizer that averages gradients over MPI ranks before it steps."""

from mpicomp.torch.broadcast import broadcast_parameters
from mpicomp.torch.ddp import DDPState, ddp_comm_hook
from mpicomp.torch.onebit_adam import OneBitAdam
from mpicomp.torch.optimizer import DistributedOptimizer

__all__ = ["DDPState", "DistributedOptimizer", "OneBitAdam", "broadcast_parameters", "ddp_comm_hook"]
