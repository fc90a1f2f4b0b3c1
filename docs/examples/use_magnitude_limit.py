"""Two ranks in one process use the compressor of magnitude_limit.py."""

import numpy as np
from magnitude_limit import MagnitudeLimit

import mpicomp
from mpicomp.transport import LocalWorld

world = LocalWorld(2)
reducers = [mpicomp.Reducer(MagnitudeLimit(limit=1.0), comm=transport) for transport in world.transports]
gradients = [np.array([4, 0.5, 0], np.float32), np.array([0, 2, 0.25], np.float32)]

means = world.run([reducer.rounds({"w": g}) for reducer, g in zip(reducers, gradients, strict=True)])
residuals = [reducer.residual("w") for reducer in reducers]

print(means[0]["w"], means[1]["w"])  # [2. 1. 0.] [2. 1. 0.]
print(residuals)  # [0, 0.5, 0] on rank 0 and [0, 0, 0.25] on rank 1: what was not sent
assert np.array_equal(sum(gradients), 2 * means[0]["w"] + sum(residuals))  # nothing is lost
