"""Initialisation from a seed without a trace in the caller's random state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw torch's CPU random numbers from a seed inside the block, and restore the generator after it.

    A user's own seed must survive the building of a model, and devices are left alone: models are built on
    the CPU, so that every rank holds the same bits whichever device it trains on.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
