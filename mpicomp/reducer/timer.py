"""Ranks tell each other what a step took, while the next one goes on."""

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from mpicomp.collectives import Pending, Round
from mpicomp.policies import Plan, Policy
from mpicomp.transport.base import Asked


class Timer:
    """Sends each step's times in the background and hands them to the policy one step later.

    The round is started at the end of a step and asked for at the end of the next one, whose own rounds have moved it
    on: nobody waits for it.

    Parameters
    ----------
    ranks : int
        How many there are.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._plans: list[Plan] = []
        self._under_way: Pending | None = None

    def turn(
        self, policy: Policy, plans: Sequence[Plan], times: Sequence[tuple[float, float, float]]
    ) -> Generator[Asked, Any, int]:
        """Let the policy learn from the step before, and send this step's times; give the bytes of that.

        Parameters
        ----------
        policy : Policy
            Learns.
        plans : sequence of Plan
            Of the step's buckets.
        times : sequence of tuples of three floats
            A bucket each; see `Policy.learn`.
        """
        if self._under_way is not None:
            everyones = yield self._under_way
            policy.learn(self._plans, everyones.reshape(self._ranks, len(self._plans), 3))
        self._plans = list(plans)
        send = np.array(times).reshape(-1)
        task = Round(
            "allgatherv",
            [send.size] * self._ranks,
            send.dtype,
            send=send,
            recv=np.empty(send.size * self._ranks),
            background=True,
        )
        self._under_way = yield task
        return send.nbytes

    def drop(self) -> Generator[Asked, Any, None]:
        """Wait for what is under way and forget it."""
        if self._under_way is not None:
            yield self._under_way
            self._under_way = None
