"""Reducers of several ranks in one process."""

import numpy as np

import mpicomp
from mpicomp.transport import LocalWorld


class Ranks:
    """N reducers that step together, without a warm-up unless asked; with a network, each rank is a host of its own."""

    def __init__(self, size, *args, identical_sums=True, network=None, hosts=None, **settings):
        hosts = hosts or (1 if network is None else size)
        self.world = LocalWorld(size, identical_sums, hosts, network)
        settings = {"warmup": 0} | settings
        self.reducers = [mpicomp.Reducer(*args, comm=end, **settings) for end in self.world.transports]

    def reduce(self, gradients, lr=None):
        """Reduce one mapping a rank; give one mapping of means a rank."""
        return self.world.run([r.rounds(g, lr) for r, g in zip(self.reducers, gradients, strict=True)])

    def residual_sum(self, name):
        return np.sum([reducer.residual(name).astype(np.float64) for reducer in self.reducers], axis=0)

    def residuals(self, name):
        return [reducer.residual(name) for reducer in self.reducers]
