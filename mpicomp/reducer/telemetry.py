"""Telemetry: the seconds of a step on each rank, sent to all ranks while the next step goes on."""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mpicomp.policies import Policy, StepReport
from mpicomp.rounds import Pending, Round, Rounds

_PER_BUCKET = 4  # times that are sent for a bucket: start, end, own work, ready


class Telemetry:
    """Sends a rank's report of a step in the background and hands everyone's to the policy one step later.

    The round is started at the end of a step and asked for at the end of the next one, whose own rounds have moved it
    on: nobody waits for it.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._report: StepReport | None = None
        self._under_way: Pending | None = None

    def publish(self, report: StepReport) -> Rounds[int]:
        """Send the report of this step in the background and return its bytes; `receive` comes first.

        Parameters
        ----------
        report : StepReport
            With this rank's times, learning rate and surveys, which have the same lengths on all ranks.
        """
        numbers = np.empty(1 + report.times.size)
        numbers[0] = math.nan if report.lr is None else report.lr
        numbers[1:] = report.times.reshape(-1)
        send = numbers.view(np.uint8)
        if report.surveys:
            send = np.concatenate([send, *(own.view(np.uint8) for own in report.surveys.values())])
        self._report = report
        task = Round(
            "allgatherv",
            [send.size] * self._ranks,
            send.dtype,
            send=send,
            recv=np.empty(send.size * self._ranks, np.uint8),
            background=True,
        )
        self._under_way = yield task
        return send.nbytes

    def receive(self, policy: Policy) -> Rounds[None]:
        """Let the policy learn from the telemetry that is under way."""
        if self._under_way is None:
            return
        everyones: NDArray[np.uint8] = (yield self._under_way).reshape(self._ranks, -1)
        self._under_way = None
        report = self._report
        assert report is not None
        end = 8 + 8 * _PER_BUCKET * len(report.plans)
        numbers = everyones[:, :end].copy().view(np.float64)
        lr = float(numbers[0, 0])
        times = numbers[:, 1:].reshape(self._ranks, len(report.plans), _PER_BUCKET)
        surveys: dict[int, NDArray[np.float32]] = {}
        for bucket, own in report.surveys.items():
            begin, end = end, end + own.nbytes
            surveys[bucket] = everyones[:, begin:end].copy().view(np.float32).reshape(self._ranks, -1)
        policy.on_telemetry(replace(report, lr=None if math.isnan(lr) else lr, times=times, surveys=surveys))

    def drop(self) -> Rounds[None]:
        """Wait for the telemetry that is under way and drop it."""
        if self._under_way is not None:
            yield self._under_way
            self._under_way = None
