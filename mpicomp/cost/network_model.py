"""The state of the network: latency and bandwidth of its links, and a factor for each operation.

Seconds of a round are ``latency x Terms.latency x factor + seconds a byte x Terms.volume x factor``, with one latency
and one bandwidth between hosts, one inside a host, and two factors for each operation in each group. An extended Kalman
filter learns their logarithms from the logarithm of measured seconds: relative errors are similar at a microsecond and
at a minute. Links drift and factors hardly do, so a measurement of one plan moves the predictions of all.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.cost import arithmetic
from mpicomp.cost.formulas import slowest, terms
from mpicomp.mpi.rounds import ACROSS, HOST, WORLD, Group, Round

OPERATIONS = ("allreduce", "allgatherv", "alltoallv", "bcast", "gatherv", "sendrecv")
GROUPS = (WORLD, HOST, ACROSS)

_LINKS = 4  # between hosts: latency, seconds a byte; inside a host: the same
_TERMS = 2 * len(GROUPS) * len(OPERATIONS)
_DEFAULT_LINKS = (50e-6, 8e-9, 2e-6, 2e-10)  # 1 Gbit/s and shared memory, before a measurement
_LINK_SD = 1.0  # standard deviation of the logarithm of a link's latency or bandwidth, before a measurement
_FACTOR_SD = 0.3  # the same of an operation's factor
_LINK_DRIFT_VARIANCE = 0.02**2  # that a step adds to the logarithm of a link's latency or bandwidth
_FACTOR_DRIFT_VARIANCE = 0.002**2  # the same of an operation's factor
_LINK_MAX_VARIANCE = 0.1**2  # by drift: a link that a plan hardly uses must not absorb the plan's errors
_OUTLIER_SD = 4.0  # standard deviations from which on a measurement is an outlier, or the network has changed
_PATIENCE_STEPS = 2, 6  # outliers before the network counts as changed: at first, and at most
MIN_CHANGE_LOG = 0.35  # smaller differences of logarithms, of seconds or a link, are no change of the network

_SAMPLED_RANKS = 16  # ranks whose shapes are looked at
_FEW_SAMPLED_RANKS = 4  # the same of a group larger than `_LARGE_GROUP`: a shape is as long as the group is large
_LARGE_GROUP = 1024  # ranks


class Network:
    """Links and factors, learned from measured seconds that are the same on all ranks; one host has its memory."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        between = 0 if hosts > 1 else 2
        self._link_of = np.repeat([2 if group == HOST else between for group in GROUPS], 2 * len(OPERATIONS))
        self._link_of += np.tile([0, 1], _TERMS // 2)
        self._state = np.zeros(_LINKS + _TERMS)
        self._state[:_LINKS] = np.log(_DEFAULT_LINKS)
        self._covariance = np.diag([_LINK_SD**2] * _LINKS + [_FACTOR_SD**2] * _TERMS)
        self._suspected = 0
        self._patience = _PATIENCE_STEPS[0]
        self.unit_seconds = np.zeros(_TERMS)  # of each term
        self._refresh()

    @property
    def factor_variance(self) -> NDArray[np.float64]:
        """Variance of the logarithm of each term's factor; a view."""
        variance: NDArray[np.float64] = np.einsum("ii->i", self._covariance)[_LINKS:]
        return variance

    @property
    def change_suspected(self) -> bool:
        """Whether the last measurement was an outlier; the next one shows if the links have changed."""
        return self._suspected != 0

    @property
    def log_link(self) -> NDArray[np.float64]:
        """Logarithms of `latency` and `seconds_per_byte`, a copy."""
        link: NDArray[np.float64] = self._state[self._link_of[:2]]
        return link

    @property
    def latency(self) -> float:
        """Seconds of latency between hosts; inside the host if there is one."""
        return float(np.exp(self.log_link[0]))

    @property
    def seconds_per_byte(self) -> float:
        """Seconds a byte of the link between hosts; inside the host if there is one."""
        return float(np.exp(self.log_link[1]))

    def coefficients(self, rounds: Sequence[Sequence[Round]], groups: Sequence[Group]) -> NDArray[np.float64]:
        """Return the coefficients of a plan, shape (terms,): its seconds are their product with `unit_seconds`."""
        total = np.zeros(_TERMS)
        for name in GROUPS:
            parts = [world.part(name) for world in groups]
            by_rank = [
                [task for task in of_rank if task.group == name] if part else []
                for of_rank, part in zip(rounds, parts, strict=True)
            ]
            known = {id(task): task for of_rank in by_rank for task in of_rank}
            # Schemes of many equal rounds return the same object for them.
            equal_rounds = Counter(zip_longest(*(map(id, of_rank) for of_rank in by_rank)))
            for ids, times in equal_rounds.items():
                tasks = [
                    (known[task], part) for task, part in zip(ids, parts, strict=True) if task is not None and part
                ]
                cost = slowest(terms(task, part) for task, part in tasks)
                first = _first_term(name, tasks[0][0].operation)
                total[first] += times * cost.latency
                total[first + 1] += times * cost.volume
        return total

    def seconds(self, coefficients: NDArray[np.float64]) -> float:
        """Predict the seconds of a plan in rounds, from coefficients of shape (terms,)."""
        return float(np.add.reduce(coefficients * self.unit_seconds))

    def time_update(self) -> None:
        """Advance by a step, which adds process noise to the state."""
        arithmetic.add_process_noise(
            self._covariance, _LINKS, _LINK_DRIFT_VARIANCE, _LINK_MAX_VARIANCE, _FACTOR_DRIFT_VARIANCE, _FACTOR_SD**2
        )

    def observe(
        self,
        coefficients: NDArray[np.float64],
        seconds: float,
        noise: float,
        relative_noise: float,
        plan_error: float,
        plan_variance: float,
        added_s: float = 0.0,
    ) -> tuple[float, float, float, bool]:
        """Learn from a plan's measured seconds in rounds, from the last rank's start to the last rank's end.

        The first outlier changes nothing; if the next measurement is one of the same sign, the links have changed.
        ``noise`` and ``relative_noise`` are variances of the logarithm of the seconds: if the prediction is right, and
        relative to the measured ones; ``plan_error`` is the known error of the plan's predicted logarithm. Return the
        innovation of the logarithm, its derivative by the plan's error (1 without contention), its expected variance,
        and whether the links count as changed.
        """
        network = arithmetic.Filter(self.unit_seconds, self._link_of, self._state, self._covariance)
        measured = arithmetic.Measurement(seconds, noise, relative_noise, plan_error, plan_variance, added_s)
        innovation, slope, variance, self._suspected, changed = arithmetic.update(
            coefficients, network, measured, self._suspected, self._patience, _OUTLIER_SD, MIN_CHANGE_LOG
        )
        self._refresh()
        return innovation, slope, variance, changed

    def check_outlier(self, log_ratio: float, sd: float) -> None:
        """Suspect a change of links if the logarithm of measured over predicted seconds is far from 0, given its sd."""
        if abs(log_ratio) > max(MIN_CHANGE_LOG, _OUTLIER_SD * sd):
            self._suspected = 1 if log_ratio > 0 else -1

    def resolve_suspicion(self, changed: bool) -> bool:
        """Record whether a suspected change of links was one; return whether false alarms have become frequent."""
        is_repeated = not changed and self._patience > _PATIENCE_STEPS[0]
        self._patience = _PATIENCE_STEPS[0] if changed else min(2 * self._patience, _PATIENCE_STEPS[1])
        return is_repeated

    def set_link(self, group: str, latency: float, seconds_per_byte: float, sd: float) -> None:
        """Set a link's measured latency and bandwidth, with the standard deviation of their logarithms."""
        link = self._link_of[_first_term(group, "sendrecv")]
        self._state[link : link + 2] = np.log([latency, seconds_per_byte])
        self._set_variance(slice(link, link + 2), sd)

    def set_factors(self, group: str, operation: str, latency: float, volume: float, sd: float) -> None:
        """Set an operation's factors, with the standard deviation of the logarithms."""
        first = _LINKS + _first_term(group, operation)
        self._state[first : first + 2] = np.log([latency, volume])
        self._set_variance(slice(first, first + 2), sd)

    def factors(self, group: str, operation: str) -> tuple[float, float]:
        """Return an operation's factors, of latency and of volume."""
        first = _LINKS + _first_term(group, operation)
        latency, volume = np.exp(self._state[first : first + 2])
        return float(latency), float(volume)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able object for `from_json`."""
        return {"hosts": self.hosts, "state": self._state.tolist(), "variance": self._covariance.tolist()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Network":
        """Build one from the result of `to_json`; other content raises KeyError, TypeError or ValueError."""
        network = cls(int(content["hosts"]))
        state, covariance = np.array(content["state"], float), np.array(content["variance"], float)
        if state.shape != network._state.shape or covariance.shape != network._covariance.shape:
            raise ValueError(f"a network's state has {network._state.size} numbers, got {state.size}")
        if not (np.isfinite(state).all() and np.isfinite(covariance).all()):
            raise ValueError("a network's state must be finite")
        network._state, network._covariance = state, covariance
        network._refresh()
        return network

    def _set_variance(self, rows: slice, sd: float) -> None:
        self._covariance[rows] = 0
        self._covariance[:, rows] = 0
        np.einsum("ii->i", self._covariance)[rows] = sd**2
        self._refresh()

    def _refresh(self) -> None:
        arithmetic.unit_seconds(self._state, self._link_of, self.unit_seconds)


@lru_cache(maxsize=16)
def sample_views(group: Group) -> tuple[Group, ...]:
    """Return the group of all ranks as some of them see it, the same ones on every rank."""
    half = (_SAMPLED_RANKS if group.size <= _LARGE_GROUP else _FEW_SAMPLED_RANKS) // 2
    ranks = range(group.size)
    sampled = ranks if group.size <= _SAMPLED_RANKS else (*ranks[:half], *ranks[-half:])
    return tuple(group.seen_by(rank) for rank in sampled)


def _first_term(group: str, operation: str) -> int:
    return 2 * (GROUPS.index(group) * len(OPERATIONS) + OPERATIONS.index(operation))
