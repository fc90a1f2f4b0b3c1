"""Reducers of several ranks in one process."""

import numpy as np

from mpicomp.policies.warmup import with_warmup
from mpicomp.reducer.reducer import TrainingReducer
from mpicomp.transport import LocalWorld


class Ranks:
    """N reducers that step together, without a warm-up unless asked; with a network, each rank is a host of its own."""

    def __init__(self, size, *args, identical_sums=True, network=None, hosts=None, **settings):
        hosts = hosts or (1 if network is None else size)
        self.world = LocalWorld(size, identical_sums, hosts, network)
        named = args[2] if len(args) > 2 else settings.pop("policy", None)
        settings["policy"] = with_warmup(named, settings.pop("warmup", 0))
        if "cost" in settings:
            settings["policy"] |= {"cost": settings.pop("cost")}
        self.reducers = [TrainingReducer(*args[:2], *args[3:], comm=end, **settings) for end in self.world.transports]

    def reduce(self, gradients, lr=None):
        """Reduce one mapping a rank; give one mapping of means a rank."""
        return self.world.run([r.rounds(g, lr) for r, g in zip(self.reducers, gradients, strict=True)])

    def residual_sum(self, name):
        return np.sum([reducer.residual(name).astype(np.float64) for reducer in self.reducers], axis=0)

    def residuals(self, name):
        return [reducer.residual(name) for reducer in self.reducers]
