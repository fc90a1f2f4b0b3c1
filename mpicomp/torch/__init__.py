"""For PyTorch scripts: an optimizer that averages gradients over MPI ranks before it steps."""

from mpicomp.torch.broadcast import broadcast_parameters
from mpicomp.torch.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer", "broadcast_parameters"]
