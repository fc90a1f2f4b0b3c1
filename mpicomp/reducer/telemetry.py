"""Telemetry: the seconds of a step, which ranks send each other during the next steps."""

import math
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.cost import sample_views
from mpicomp.mpi.rounds import Group, Pending, Round, Rounds
from mpicomp.policies import Policy, StepReport
from mpicomp.policies.policy import MAX_REPORT_STEPS

_PER_BUCKET = 4  # times of a bucket: start, end, seconds outside rounds, ready
PACE_STEPS = 16  # steps between two messages about the work of ranks, which then cost next to nothing

_SECONDS = np.dtype(np.float64)
_BYTE = np.dtype(np.uint8)


class Telemetry:
    """Sends reports of steps in the background, and finds the rank that the others wait for.

    A round begins at the end of a step and ends with the next one, whose rounds have advanced it; where it is predicted
    to take longer than these, with a later one, so that no step waits for it. A rank's work is the seconds from the end
    of one exchange to that of the next, without those in which it waits, so ranks need no common clock. Ranks of one
    process take turns and do not compare their work (``shares_work``).
    """

    def __init__(self, group: Group, shares_work: bool = True) -> None:
        self.slowest_rank: int | None = None  # with most work; None before ranks have compared
        self.slowest_costs_s: float | None = None  # seconds a step over the median rank (the faster of two)
        self.under_way: deque[tuple[int, Pending, StepReport]] = deque()  # reports, and the steps that receive them
        self._arrival = 0.0  # of the last message, in steps
        self._travel_steps = 0.0  # of the last report whose seconds were predicted
        self._coefficients: dict[int, NDArray[np.float64]] = {}  # of a report's predicted seconds, by bytes
        self._group = group
        self._ranks = group.size
        self.shares_work = shares_work and group.size > 1
        self.ended: float | None = None  # the last step, by the transport's timer
        self.work_s: list[float] = []  # of the steps since the last message
        self.work_under_way: tuple[int, Pending] | None = None

    def share_work(self, step: int) -> Rounds[None]:
        """Receive the work of all ranks that was sent some steps ago, or send this rank's. As rounds."""
        if self.work_under_way is not None and step >= self.work_under_way[0]:
            work_s = yield self.work_under_way[1]
            self.work_under_way = None
            self.slowest_rank, self.slowest_costs_s = slowest_of(work_s)
        if self.shares_work and step % PACE_STEPS == PACE_STEPS - 1:
            send = np.array([sum(self.work_s) / max(len(self.work_s), 1)], _SECONDS)
            self.work_s.clear()
            recv = np.empty(self._ranks, _SECONDS)
            pending = yield Round("allgatherv", [1] * self._ranks, _SECONDS, send=send, recv=recv, background=True)
            self.work_under_way = step + MAX_REPORT_STEPS, pending
            self._arrival = max(self._arrival, step) + self._travel_steps  # reports queue behind it

    def publish(self, report: StepReport, policy: Policy) -> Rounds[int]:
        """Send this rank's report, with surveys of the same lengths, in the background; return its bytes. As rounds."""
        numbers = np.empty(1 + report.times.size)
        numbers[0] = math.nan if report.lr is None else report.lr
        numbers[1:] = report.times.reshape(-1)
        send = numbers.view(np.uint8)
        if report.surveys:
            send = np.concatenate([send, *(survey.view(np.uint8) for survey in report.surveys.values())])
        recv = np.empty(send.size * self._ranks, np.uint8)
        pending = yield Round("allgatherv", [send.size] * self._ranks, _BYTE, send=send, recv=recv, background=True)
        arrival = max(self._arrival, report.step) + self._steps_under_way(send.size, report, policy)
        self._arrival = min(arrival, report.step + MAX_REPORT_STEPS)
        self.under_way.append((math.ceil(self._arrival), pending, report))
        return send.nbytes

    def _steps_under_way(self, nbytes: int, report: StepReport, policy: Policy) -> float:
        """Return a report's predicted seconds over those of a step in rounds, which advance it; 1 if none are known."""
        predictions = [plan.prediction for plan in report.plans]
        rounds_s = sum(prediction.rounds_s for prediction in predictions if prediction is not None)
        if policy.cost is None or None in predictions or rounds_s <= 0:
            return 1.0
        network = policy.cost.network
        if nbytes not in self._coefficients:
            views = sample_views(self._group)
            task = Round("allgatherv", [nbytes] * self._ranks, _BYTE)
            self._coefficients[nbytes] = network.coefficients([[task]] * len(views), views)
        self._travel_steps = network.seconds(self._coefficients[nbytes]) / rounds_s
        return self._travel_steps

    def receive(self, policy: Policy, step: int) -> Rounds[None]:
        """Pass reports of all ranks that have arrived by this step to the policy. As rounds."""
        while self.under_way and self.under_way[0][0] <= step:
            _, pending, report = self.under_way.popleft()
            rows = (yield pending).reshape(self._ranks, -1)
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
        """Wait for reports under way and drop them. As rounds."""
        while self.under_way:
            yield self.under_way.popleft()[1]
        self._arrival = 0.0


def slowest_of(work_s: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[int, float]:
    """Return the rank with most work, and its seconds over the median rank.

    >>> slowest_of(np.array([1.0, 1.25, 3.25, 1.5]))
    (2, 2.0)
    """
    slowest = int(work_s.argmax())
    return slowest, float(work_s[slowest] - np.sort(work_s)[(work_s.size - 1) // 2])
