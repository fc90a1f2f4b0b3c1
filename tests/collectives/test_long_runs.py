"""With error feedback, what is kept back stays bounded: a thousand steps, for everything that allows it."""

import numpy as np
import pytest
from marks import once
from schemes import OWN
from worlds import Ranks

from mpicomp import Dense, Sparsifier
from mpicomp.collectives import fitting

STEPS = 1000
LOUDEST = 50.0
"""Norms of a gradient that a residual may have.

Random blocks of 5 % leave elements waiting for 20 steps on average, which are 13 norms of this gradient, and now and
then a part of them waits for twice as long. What is never sent reaches 450.
"""

LOSSY = once(
    [(entry,) for entry in OWN if entry.contractive and not isinstance(entry, Dense | Sparsifier)],
    lambda case: case[0].message,
)


@pytest.mark.slow
@pytest.mark.parametrize(("compressor",), LOSSY, ids=str)  # noqa: PT006 (cases are tuples)
def test_a_residual_stays_bounded(compressor):
    """Part of each gradient is the same in all steps, as in training, and would pile up where it is never sent.

    No element is far larger than the others: for scaled signs with one magnitude that is the worst there is, and what
    they keep back then is bounded only by the number of elements.
    """
    rng = np.random.default_rng(0)
    drift = 0.5 * rng.normal(size=(24, 32))
    together = Ranks(2, compressor, fitting(compressor)[0], feedback=True)
    norms = []
    for _ in range(STEPS):
        gradients = [drift + rng.normal(size=drift.shape) for _ in range(2)]
        together.reduce([{"w": gradient.astype(np.float32)} for gradient in gradients])
        norms.append(max(np.linalg.norm(left) for left in together.residuals("w")) / np.linalg.norm(gradients[0]))
    assert max(norms) < LOUDEST
    assert max(norms[700:]) <= 1.5 * max(norms[100:400]) + 0.1
