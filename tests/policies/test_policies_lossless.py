"""Policies that change their plans lose nothing, and ranks agree."""

import numpy as np
import pytest
from marks import slow
from worlds import CheckedRanks

import mpicomp
from mpicomp.collectives import fitting

POLICIES = {
    "schedule": {"begin": 0.5, "end": 0.01, "steps": 6},
    "gravac": {"least": 0.005, "window": 3, "smoothing": 0.8},
    "accordion": {"least": 0.02, "most": 0.2, "every": 2},
}
CONCENTRATION = [4.0] * 8 + [0.2] * 4 + [3.0] * 8  # of the energy, by step
SIZES = {"a": 600, "b": 300}


@pytest.mark.parametrize("collective", [name for name in fitting(mpicomp.TopK()) if "hierarchical" not in name])
@pytest.mark.parametrize("size", [1, slow(2), 3, slow(4)])
@pytest.mark.parametrize("policy", POLICIES)
def test_policy_changing_plans_loses_nothing(policy, size, collective):
    settings = {"id": policy} | POLICIES[policy]
    ranks = CheckedRanks(size, mpicomp.TopK(), collective, policy=settings, bucket_bytes=4 * SIZES["a"])
    random, plans = np.random.default_rng(size), set()
    for step, power in enumerate(CONCENTRATION):
        scales = {"a": 1.0, "b": 10.0 ** (step // 4 % 2)}
        gradients = [
            {
                name: (scales[name] * random.choice([-1, 1], n) * random.exponential(size=n) ** power).astype(
                    np.float32
                )
                for name, n in SIZES.items()
            }
            for _ in range(size)
        ]
        plans.add(str([bucket.compressor for bucket in ranks.step(gradients)]))
    assert len(plans) > 2
