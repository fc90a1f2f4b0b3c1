"""Reducers of several ranks in one process."""

import numpy as np

from mpicomp.mpi import LocalWorld
from mpicomp.policies.schedule import with_warmup
from mpicomp.reducer.training_reducer import TrainingReducer


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


class CheckedRanks(Ranks):
    """Ranks that check every step: means and plans are equal on all ranks, and nothing is lost.

    ``accumulated`` has gradient plus residual in float64, by step and rank; ``left`` has the residuals of each rank.
    """

    def __init__(self, size, *args, tolerance=4e-6, **settings):
        super().__init__(size, *args, **settings)
        self.tolerance, self.accumulated, self.left = tolerance, [], [{}] * size

    def step(self, gradients, lr=None):
        """Reduce one mapping a rank; return the records of rank 0's buckets."""
        now = [
            {name: array.astype(np.float64) + left.get(name, 0.0) for name, array in given.items()}
            for given, left in zip(gradients, self.left, strict=True)
        ]
        means = self.reduce(gradients, lr)
        self.left = [{name: r.residual(name).astype(np.float64) for name in means[0]} for r in self.reducers]
        for name, mean in means[0].items():
            assert all(other[name].tobytes() == mean.tobytes() for other in means)
            total = sum(rank[name] for rank in now)
            delivered = len(means) * mean.astype(np.float64) + sum(rank[name] for rank in self.left)
            scale = max(1.0, np.abs(total).max())
            np.testing.assert_allclose(delivered, total, rtol=0, atol=self.tolerance * scale)
        plans = {
            str([(bucket.collective, bucket.compressor, bucket.reason, bucket.predicted_s) for bucket in buckets])
            for buckets in (reducer.last_step.buckets for reducer in self.reducers)
        }
        assert len(plans) == 1
        self.accumulated.append(now)
        return self.reducers[0].last_step.buckets
