"""Telemetry: the seconds of a step, which ranks send each other during the next step."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.policies import Policy, StepReport
from mpicomp.rounds import Pending, Round, Rounds

_PER_BUCKET = 4  # times of a bucket: start, end, seconds outside rounds, ready
PACE_STEPS = 16  # steps between two messages about the work of ranks, which then cost next to nothing

_SECONDS = np.dtype(np.float64)


class Telemetry:
    """Sends reports of steps in the background, and finds the rank that the others wait for.

    A round begins at the end of a step and ends with the next one, whose rounds have advanced it. A rank's work is the
    seconds from the end of one exchange to that of the next, without those in which it waits, so ranks need no common
    clock. Ranks of one process take turns and do not compare their work (``shares_work``).
    """

    def __init__(self, ranks: int, shares_work: bool = True) -> None:
        self.slowest_rank: int | None = None  # with most work; None before ranks have compared
        self.slowest_costs_s: float | None = None  # seconds a step over the median rank (the faster of two)
        self.under_way: Pending | None = None  # the report of the last step
        self._report: StepReport | None = None
        self._ranks = ranks
        self._shares_work = shares_work and ranks > 1
        self._ended: float | None = None
        self._work_s: list[float] = []
        self._work_under_way: Pending | None = None

    def note_work(self, ended: float, waited_s: float, counts: bool) -> None:
        """Note the end of a step, on any clock, and the seconds in it in which this rank waited for others.

        The work of a step that is not like others does not count.
        """
        if self._shares_work:
            if self._ended is not None and counts:
                self._work_s.append(ended - self._ended - waited_s)
            self._ended = ended

    def is_due(self, step: int) -> bool:
        """Return whether `share_work` has a round in this step."""
        return self._work_under_way is not None or (self._shares_work and step % PACE_STEPS == PACE_STEPS - 1)

    def share_work(self, step: int) -> Rounds[None]:
        """Receive the work of all ranks that was sent a step ago, and send this rank's when it is due. As rounds."""
        if self._work_under_way is not None:
            work_s = yield self._work_under_way
            self._work_under_way = None
            self.slowest_rank, self.slowest_costs_s = slowest_of(work_s)
        if self._shares_work and step % PACE_STEPS == PACE_STEPS - 1:
            send = np.array([sum(self._work_s) / max(len(self._work_s), 1)], _SECONDS)
            self._work_s.clear()
            recv = np.empty(self._ranks, _SECONDS)
            self._work_under_way = yield Round(
                "allgatherv", [1] * self._ranks, _SECONDS, send=send, recv=recv, background=True
            )

    def publish(self, report: StepReport) -> Rounds[int]:
        """Send this rank's report in the background and return its bytes; call `receive` first. As rounds.

        Surveys have the same lengths on all ranks.
        """
        numbers = np.empty(1 + report.times.size)
        numbers[0] = math.nan if report.lr is None else report.lr
        numbers[1:] = report.times.reshape(-1)
        send = numbers.view(np.uint8)
        if report.surveys:
            send = np.concatenate([send, *(survey.view(np.uint8) for survey in report.surveys.values())])
        self._report = report
        task = Round(
            "allgatherv",
            [send.size] * self._ranks,
            send.dtype,
            send=send,
            recv=np.empty(send.size * self._ranks, np.uint8),
            background=True,
        )
        self.under_way = yield task
        return send.nbytes

    def receive(self, policy: Policy) -> Rounds[None]:
        """Pass the report under way, of all ranks, to the policy. As rounds."""
        if self.under_way is None:
            return
        rows: NDArray[np.uint8] = (yield self.under_way).reshape(self._ranks, -1)
        self.under_way = None
        report = self._report
        assert report is not None
        end = 8 + 8 * _PER_BUCKET * len(report.plans)
        numbers = rows[:, :end].copy().view(np.float64)
        lr = float(numbers[0, 0])
        times = numbers[:, 1:].reshape(self._ranks, len(report.plans), _PER_BUCKET)
        surveys: dict[int, NDArray[np.float32]] = {}
        for bucket, survey in report.surveys.items():
            begin, end = end, end + survey.nbytes
            surveys[bucket] = rows[:, begin:end].copy().view(np.float32).reshape(self._ranks, -1)
        policy.on_telemetry(replace(report, lr=None if math.isnan(lr) else lr, times=times, surveys=surveys))

    def drop(self) -> Rounds[None]:
        """Wait for the report under way and drop it. As rounds."""
        if self.under_way is not None:
            yield self.under_way
            self.under_way = None


def slowest_of(work_s: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[int, float]:
    """Return the rank with most work, and its seconds over the median rank.

    Examples
    --------
    >>> slowest_of(np.array([1.0, 1.25, 3.25, 1.5]))
    (2, 2.0)
    """
    slowest = int(work_s.argmax())
    return slowest, float(work_s[slowest] - np.sort(work_s)[(work_s.size - 1) // 2])
