"""Samples of each rank in each step, samples that are held out, and torch's random numbers from a seed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch


class Sampler:
    """Deal shuffled samples to ranks, epoch by epoch.

    Every epoch shuffles all samples with a generator of (seed, epoch) and deals them in order: step by step,
    and within a step rank by rank. Thus no sample is seen twice in an epoch, by whichever rank, and every
    rank computes its share alone. Samples that do not fill a step of all ranks are left out of that epoch.

    >>> sampler = Sampler("digits", samples=10, batch=2, seed=0)
    >>> first, second = sampler.indices(0, 0, 2), sampler.indices(0, 1, 2)
    >>> len(set(first) | set(second))
    4
    """

    def __init__(self, name: str, samples: int, batch: int, seed: int) -> None:
        self.name = name
        self.samples = samples
        self.batch = batch
        self.seed = seed
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def indices(self, step: int, rank: int, ranks: int) -> np.ndarray:
        """Return the sample numbers of one rank in one step."""
        if not 0 <= rank < ranks:
            raise ValueError(f"{self.name}: rank must be in 0..{ranks - 1}, got {rank}")
        steps_an_epoch = self.samples // (self.batch * ranks)
        if steps_an_epoch == 0:
            raise ValueError(
                f"{self.name}: {self.samples} training samples are too few for {ranks} ranks with batches of "
                f"{self.batch}: at most {self.samples // self.batch} ranks, or more data"
            )
        epoch, within = divmod(step, steps_an_epoch)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.samples)
            self._epoch = epoch
        start = (within * ranks + rank) * self.batch
        return self._order[start : start + self.batch]


def evenly(samples: int, share: float) -> np.ndarray:
    """Return the numbers of a share of some samples, at least one, taken evenly from the first to the last.

    >>> evenly(9, 1 / 3).tolist()
    [0, 4, 8]
    """
    count = max(1, round(share * samples))
    return np.linspace(0, samples - 1, count).astype(np.int64)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw torch's CPU random numbers from a seed inside the block, and restore a user's generator after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
