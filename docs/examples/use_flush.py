"""Two ranks in one process use the policy of flush.py."""

import flush  # noqa: F401, registers it
import numpy as np

import mpicomp
from mpicomp.mpi import LocalWorld

world = LocalWorld(2)
reducers = [mpicomp.Reducer("topk", policy={"id": "flush", "every": 3}, comm=end) for end in world.transports]
random = np.random.default_rng(0)

given, delivered = np.zeros(1000), np.zeros(1000)
for _ in range(3):
    gradients = [random.normal(size=1000) for _ in reducers]
    means = world.run([reducer.rounds({"w": g}) for reducer, g in zip(reducers, gradients, strict=True)])
    given += sum(gradients)
    delivered += 2 * means[0]["w"]
    print(reducers[0].last_step.buckets[0].reason)

assert not reducers[0].residual("w").any()  # the third step has sent all that was kept back
np.testing.assert_allclose(delivered, given, atol=1e-9)  # so that nothing is missing
