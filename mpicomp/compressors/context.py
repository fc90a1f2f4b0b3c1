"""`Context`: the ranks, the step, the bucket, its memory and its workspace, handed to compressors and schemes."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpicomp.mpi.rounds import Group
from mpicomp.workspace import Workspace


@dataclass
class Context:
    """The input of compressors and schemes besides the array.

    Parameters
    ----------
    group : Group
        The ranks that take part. Random choices that must differ between ranks come from this rank's place in it.
    step, bucket, seed : int
        Numbers of the step and of the bucket, and the seed of the run, the same on all ranks; they seed random choices.
    memory : dict
        This bucket's memory from step to step. Numbers and strings in it are part of a checkpoint.
    workspace : Workspace
        Arrays that are needed at every step, without allocations.

    Examples
    --------
    >>> first, second = (Context(Group(rank, 2), step=7) for rank in (0, 1))
    >>> first.key(shared=True) == second.key(shared=True), first.key(shared=False) == second.key(shared=False)
    (True, False)
    """

    group: Group = field(default_factory=lambda: Group(0, 1))
    step: int = 0
    bucket: int = 0
    seed: int = 0
    memory: dict[str, Any] = field(default_factory=dict)
    workspace: Workspace = field(default_factory=Workspace)

    @property
    def rank(self) -> int:
        """The place of this rank in the group."""
        return self.group.rank

    def random(self, shared: bool) -> np.random.Generator:
        """Return this step's and bucket's random numbers, the same on all ranks (``shared``) or different on each."""
        rank = () if shared else (self.rank,)
        return np.random.default_rng([self.seed, self.step, self.bucket, *rank])

    def key(self, shared: bool, part: int = 0) -> int:
        """Return 64 random bits for a kernel, the same on all ranks if ``shared``; ``part`` numbers a step's draws."""
        rank = () if shared else (self.rank,)
        entropy = [self.seed, self.step, self.bucket, part, *rank]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
