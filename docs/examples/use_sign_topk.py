"""Two ranks in one process use the compressor of sign_topk.py."""

import numpy as np
from sign_topk import SignTopK

import mpicomp
from mpicomp.mpi import LocalWorld

world = LocalWorld(2)
reducers = [
    mpicomp.Reducer(SignTopK(ratio=0.5), comm=transport, policy={"warmup": 0}) for transport in world.transports
]
gradients = [np.array([4, -2, 1, 0], np.float32), np.array([0, 1, 5, -7], np.float32)]

means = world.run([reducer.rounds({"w": g}) for reducer, g in zip(reducers, gradients, strict=True)])
residuals = [reducer.residual("w") for reducer in reducers]

print(means[0]["w"], means[1]["w"])  # [1.5 -1.5 3. -3.] on both: signs times 3 on rank 0, and times 6 on rank 1
print(residuals)  # [1, 1, 1, 0] on rank 0 and [0, 1, -1, -1] on rank 1: what was not sent
assert np.array_equal(sum(gradients), 2 * means[0]["w"] + sum(residuals))  # nothing is lost
