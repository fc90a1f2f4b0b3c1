"""The rule for the bound of the next step, from its definition."""

import numpy as np
from mpicomp.kernels import cpu


def next_bound(workspace, before, listed, wanted, threshold):
    """Give the magnitude bits; what has to be known of earlier steps is kept on the workspace."""
    gap = getattr(workspace, "expected_gap", 1 - 0.8)
    if before:
        if listed < wanted:
            gap = min(0.5, 4 * gap)
        elif listed > min(2 * wanted, workspace.room):
            gap = max(1e-4, gap / 2)
        elif listed < 1.2 * wanted:
            gap = min(0.5, 1.5 * gap)
    workspace.expected_gap = gap
    with np.errstate(all="ignore"):
        return cpu.magnitude_bits((1 - gap) * threshold, workspace.dtype)
