"""Every compressor with every collective that fits it, and a compressor whose messages vary in length."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import mpicomp
from mpicomp.collectives import fitting
from mpicomp.testing import pairs


@mpicomp.register
@dataclass(frozen=True)
class Above(mpicomp.Sparsifier):
    """What a user might write: everything above a fixed magnitude, possibly nothing."""

    id: ClassVar[str] = "test-above"
    paper: ClassVar[str] = "none: a user's own"
    limit: float = 1.0

    def select(self, accumulated, context):
        array = accumulated.array()
        indices = np.flatnonzero(np.abs(array) > self.limit).astype(np.uint32)
        return mpicomp.Selection(indices, array[indices])


LEARNED = {"ratio": 0.3, "encoder": (2,), "decoder": (2,), "passes": 1, "dense_steps": 0, "training_steps": 3}
REPRESENTATIVES = [
    mpicomp.Dense(),
    mpicomp.Dense(wire="fp16"),
    mpicomp.Dense(wire="bf16"),
    mpicomp.TopK(ratio=0.05),
    mpicomp.TopK(ratio=0.5, wire="fp16"),
    mpicomp.TopK(ratio=0.1, wire="bf16", indices="elias-fano"),
    mpicomp.TopK(ratio=0.5, wire="q4"),
    mpicomp.SIDCo(ratio=0.05),
    mpicomp.RandomK(ratio=0.05),
    mpicomp.BlockRandomK(ratio=0.05, wire="bf16"),
    mpicomp.OneBit(block=64),
    mpicomp.PowerSGD(rank=1),
    mpicomp.LGC(**LEARNED),
    mpicomp.LGC(**LEARNED, instance="server"),
    mpicomp.GlobalRandKMaxNorm(ratio=0.3),
]
"""One of each kind of message, with each form of numbers, with lengths that ranks know and with those that they do
not: what depends on the number of ranks or on the collective depends on nothing else."""

OTHERS = [
    mpicomp.TopK(ratio=1.0, indices="plain"),
    mpicomp.TopK(ratio=0.3, wire="q8", indices="plain"),
    mpicomp.SIDCo(ratio=0.3, wire="q2"),
    mpicomp.SIDCo(ratio=0.02, distribution="gamma", wire="fp16"),
    mpicomp.SIDCo(ratio=0.1, distribution="pareto", stages=2),
    mpicomp.DGC(ratio=0.05),
    mpicomp.RedSync(ratio=0.05),
    mpicomp.GaussianK(ratio=0.05),
    mpicomp.MSTopK(ratio=0.05),
    mpicomp.Threshold(limit=1.5),
    mpicomp.OneBit(),
    mpicomp.OneBit(block=None),
    mpicomp.OneBit(block=64, bits=2),
    mpicomp.QSGD(),
    mpicomp.QSGD(bits=3, bucket=1024, rounding="nearest"),
    mpicomp.Uniform(),
    mpicomp.MaxNorm(bits=8, rounding="nearest"),
]
UNBIASED_REPRESENTATIVES = [  # refused with error feedback
    mpicomp.SignSGD(scale=0.01),
]
UNBIASED_OTHERS = [
    mpicomp.QSGD(bits=2, norm="l2"),
    mpicomp.Uniform(bits=1, bucket=64, rounding="stochastic"),
    mpicomp.MaxNorm(),
    mpicomp.TernGrad(),
]
USERS = [
    Above(limit=1.5),
    Above(limit=1e30),  # selects nothing, on all ranks
]
OWN = REPRESENTATIVES + OTHERS
UNBIASED = UNBIASED_REPRESENTATIVES + UNBIASED_OTHERS


def in_turn(compressors):
    """Every compressor with one collective, so that they have all of them among themselves."""
    return [(entry, fitting(entry)[number % len(fitting(entry))]) for number, entry in enumerate(compressors)]


REPRESENTED = pairs(REPRESENTATIVES + UNBIASED_REPRESENTATIVES + USERS)
OTHER_PAIRS = in_turn(OTHERS + UNBIASED_OTHERS)


def everywhere(few, many, represented=REPRESENTED, others=OTHER_PAIRS):
    """Cases of a law: representatives with many settings, and all other compressors with a few and one collective.

    Each is a compressor, a collective, and the setting. Representatives with the few are quick. All compressors with
    all collectives are what `mpicomp.testing.checks` gives for a compressor.
    """
    cases = []
    for chosen, settings in ((represented, many), (others, few)):
        for pair in chosen:
            for setting in settings:
                marks = [pytest.mark.quick] if chosen is represented and setting in few else []
                cases.append(pytest.param(*pair, *setting, marks=marks))
    return cases
