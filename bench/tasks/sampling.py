"""Samples of each rank in each step, and samples that are held out."""

from __future__ import annotations

import numpy as np


class Sampler:
    """Deal shuffled samples to ranks, epoch by epoch.

    Every epoch shuffles all samples with a generator of (seed, epoch) and deals them in order: step by step,
    and within a step rank by rank. Thus no sample is seen twice in an epoch, by whichever rank, and every
    rank computes its share alone. What does not fill a step of all ranks is left out of that epoch.

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
        check_rank(self.name, rank, ranks)
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


class Shards:
    """Assign every rank a part of the samples to draw from: classes, if there are several.

    Groups are dealt to ranks in turn: rank r of R has groups r, r + R, r + 2 R and so on. With more ranks than groups
    they go round, and a group that several ranks have is cut into as many blocks, equally long and in the order of the
    samples. So a single group becomes a block for each rank. Every sample is in the part of one rank.

    Every rank goes through its part by itself, epoch by epoch, shuffled as a `Sampler` does it; where parts are not
    equally long, so are epochs. What does not fill a batch is left out of that epoch.

    >>> shards = Shards("digits", groups=np.array([0, 1, 2, 0, 1, 2]), batch=2, seed=0)
    >>> sorted(shards.indices(0, rank=1, ranks=3).tolist())  # those of group 1
    [1, 4]
    """

    def __init__(self, name: str, groups: np.ndarray, batch: int, seed: int) -> None:
        self.name = name
        self.batch = batch
        self.seed = seed
        self._groups = np.unique(groups, return_inverse=True)[1]  # numbers from 0, none left out
        self._parts: list[tuple[np.ndarray, Sampler]] = []  # of every rank

    def indices(self, step: int, rank: int, ranks: int) -> np.ndarray:
        """Return the sample numbers of one rank in one step; a part that fills no batch is an error on all ranks."""
        check_rank(self.name, rank, ranks)
        if len(self._parts) != ranks:
            parts = [self.part(other, ranks) for other in range(ranks)]
            least = min(map(len, parts))
            if least < self.batch:
                raise ValueError(
                    f"{self.name}: with shards some rank of {ranks} has {least} training samples, too few for a batch "
                    f"of {self.batch}: fewer ranks, or more data"
                )
            self._parts = [(part, Sampler(self.name, len(part), self.batch, self.seed)) for part in parts]
        part, sampler = self._parts[rank]
        found: np.ndarray = part[sampler.indices(step, 0, 1)]
        return found

    def part(self, rank: int, ranks: int) -> np.ndarray:
        """Return the numbers of all samples of a rank."""
        groups = int(self._groups.max()) + 1
        turn = min(groups, ranks)
        samples = np.flatnonzero(self._groups % turn == rank % turn)
        sharing = len(range(rank % turn, ranks, turn))
        return np.array_split(samples, sharing)[rank // turn]


def check_rank(name: str, rank: int, ranks: int) -> None:
    """Refuse a rank that is none of the ranks."""
    if not 0 <= rank < ranks:
        raise ValueError(f"{name}: rank must be in 0..{ranks - 1}, got {rank}")


def evenly(samples: int, share: float) -> np.ndarray:
    """Return the numbers of a share of some samples, at least one, taken evenly from the first to the last.

    >>> evenly(9, 1 / 3).tolist()
    [0, 4, 8]
    """
    count = max(1, round(share * samples))
    return np.linspace(0, samples - 1, count).astype(np.int64)
