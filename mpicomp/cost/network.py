"""The state of the network: latency and bandwidth of its links, and a factor for each operation.

Seconds of a round are ``latency x Terms.latency x factor + seconds a byte x Terms.volume x factor``, with a
latency and a bandwidth for what crosses hosts and for what does not, and two factors for each operation in each
group. Logarithms of all of them are the state of an extended Kalman filter, with the logarithm of seconds as what is
measured: relative errors are alike at a microsecond and at a minute. Links drift, factors hardly do, so that what
one plan measures moves the predictions of all.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.cost import arithmetic
from mpicomp.cost.formulas import Terms, slowest, terms
from mpicomp.rounds import ACROSS, HOST, WORLD, Group, Round

OPERATIONS = ("allreduce", "allgatherv", "alltoallv", "bcast", "gatherv", "sendrecv")
GROUPS = (WORLD, HOST, ACROSS)

_LINKS = 4  # between hosts: latency, seconds a byte; inside a host: the same
_TERMS = 2 * len(GROUPS) * len(OPERATIONS)
_UNKNOWN = (50e-6, 8e-9, 2e-6, 2e-10)  # 1 Gbit/s and shared memory, where nothing was measured
_LINK_SD = 1.0  # standard deviation of the logarithm of a link's latency or bandwidth, before it is measured
_FACTOR_SD = 0.3  # the same of an operation's factor
_LINK_DRIFT = 0.02**2  # variance that a step adds to the logarithm of a link's latency or bandwidth
_FACTOR_DRIFT = 0.002**2  # the same of an operation's factor
_LINK_MOST = 0.1**2  # largest variance by drift: a link that a plan hardly uses must not absorb the plan's errors
_STRANGE = 4.0  # standard deviations from which on a measurement may be an outlier, or the network has changed
_PATIENCE = 2, 6  # such measurements before the network counts as changed: at first, and at most
LEAST_STRANGE = 0.35  # of the logarithm of seconds, or of a link's: smaller deviations are never taken for a change

_RANKS = 16  # number of ranks whose shapes are looked at
_FEW = 4  # the same among more than `_MANY`, of whom each has shapes as long as there are ranks
_MANY = 1024


class Network:
    """Links and factors, learnt from measured seconds.

    All ranks have to feed it the same numbers, and then hold the same state.

    Parameters
    ----------
    hosts : int
        On how many hosts the ranks are: on one, everything goes through its memory.
    """

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        between = 0 if hosts > 1 else 2
        self._link_of = np.repeat([2 if group == HOST else between for group in GROUPS], 2 * len(OPERATIONS))
        self._link_of += np.tile([0, 1], _TERMS // 2)
        self._state = np.zeros(_LINKS + _TERMS)
        self._state[:_LINKS] = np.log(_UNKNOWN)
        self._variance = np.diag([_LINK_SD**2] * _LINKS + [_FACTOR_SD**2] * _TERMS)
        self._suspected = 0
        self._patience = _PATIENCE[0]
        self.units = np.zeros(_TERMS)
        """Seconds of a unit of each term."""
        self._refresh()

    @property
    def factor_variance(self) -> NDArray[np.float64]:
        """Variance of the logarithm of each term's factor; not to be written to."""
        variance: NDArray[np.float64] = np.einsum("ii->i", self._variance)[_LINKS:]
        return variance

    @property
    def suspects(self) -> bool:
        """Whether the last measurement was far from its prediction; the next one shows if the links have changed."""
        return self._suspected != 0

    @property
    def link(self) -> NDArray[np.float64]:
        """Logarithms of `latency` and `seconds_per_byte`, a copy."""
        link: NDArray[np.float64] = self._state[self._link_of[:2]]
        return link

    @property
    def latency(self) -> float:
        """Seconds of latency between hosts; inside the host where there is one."""
        return float(np.exp(self.link[0]))

    @property
    def seconds_per_byte(self) -> float:
        """Of the link between hosts; inside the host where there is one."""
        return float(np.exp(self.link[1]))

    def coefficients(self, rounds: Sequence[Sequence[Round]], groups: Sequence[Group]) -> NDArray[np.float64]:
        """Return the coefficients of a plan's rounds, for `seconds` and `observe`.

        Parameters
        ----------
        rounds : sequence of sequences of Round
            Each rank's shapes; ranks that skip some rounds come without them.
        groups : sequence of Group
            The group of all, as each of these ranks sees it.

        Returns
        -------
        array of float64, shape (terms,)
        """
        whole = np.zeros(_TERMS)
        for name in GROUPS:
            parts = [world.part(name) for world in groups]
            own = [
                [task for task in of_rank if task.group == name] if part else []
                for of_rank, part in zip(rounds, parts, strict=True)
            ]
            known = {id(task): task for of_rank in own for task in of_rank}
            # Schemes of many rounds, which are alike, return the same object for them.
            alike = Counter(zip_longest(*(map(id, of_rank) for of_rank in own)))
            for met, times in alike.items():
                each = [(known[task], part) for task, part in zip(met, parts, strict=True) if task is not None and part]
                cost = slowest(terms(task, part) for task, part in each)
                add_terms(whole, each[0][0].operation, name, Terms(times * cost.latency, times * cost.volume))
        return whole

    def seconds(self, coefficients: NDArray[np.float64]) -> float:
        """Predict the seconds of a plan in rounds, from coefficients of shape (terms,)."""
        return float(np.add.reduce(coefficients * self.units))

    def drift(self) -> None:
        """Advance by a step, after which the learnt state is less certain."""
        arithmetic.grow(self._variance, _LINKS, _LINK_DRIFT, _LINK_MOST, _FACTOR_DRIFT, _FACTOR_SD**2)

    def observe(
        self,
        coefficients: NDArray[np.float64],
        seconds: float,
        noise: float,
        rough: float,
        own_error: float,
        own_variance: float,
        added_s: float = 0.0,
    ) -> tuple[float, float, float, bool]:
        """Learn from a plan's measured seconds in rounds.

        A measurement that is far from what is predicted changes nothing the first time; when the next one says the
        same, the links have changed.

        Parameters
        ----------
        coefficients : array, shape (terms,)
            See `coefficients`.
        seconds : float
            From the last rank's start to the last rank's end, without own work; that may have been more.
        noise, rough : float
            Variance of the logarithm of these seconds: where they are what is predicted, and as they are.
        own_error, own_variance : float
            By how much the plan is known to differ from the prediction (logarithm), and how well.
        added_s : float
            Seconds among them that contention adds to every plan.

        Returns
        -------
        innovation : float
            Of the logarithm of seconds, from what is predicted with the plan's own error.
        slope : float
            Derivative of the logarithm of seconds by that error: 1 where contention adds nothing.
        variance : float
            What was expected of it.
        changed : bool
            Whether the links were found to be others than before.
        """
        innovation, slope, variance, self._suspected, changed = arithmetic.update(
            coefficients, self.units, self._link_of, self._state, self._variance, seconds, noise, rough, own_error,
            own_variance, added_s, self._suspected, self._patience, _STRANGE, LEAST_STRANGE,
        )  # fmt: skip
        self._refresh()
        return innovation, slope, variance, changed

    def compare(self, far: float, noise: float) -> None:
        """Take a measurement far from its prediction for the first of those that show that links have changed.

        Nothing else is learnt from it: ``far`` is the logarithm of what was measured over what was predicted, ``noise``
        its standard deviation.
        """
        if abs(far) > max(LEAST_STRANGE, _STRANGE * noise):
            self._suspected = 1 if far > 0 else -1

    def find(self, changed: bool) -> None:
        """Note whether a suspected change of links was one; after a false alarm the next suspicion takes longer."""
        self._patience = _PATIENCE[0] if changed else min(2 * self._patience, _PATIENCE[1])

    def set_link(self, group: str, latency: float, seconds_per_byte: float, sd: float) -> None:
        """Set a link's measured latency and bandwidth, with the standard deviation of their logarithms."""
        link = self._link_of[_place(group, "sendrecv")]
        self._state[link : link + 2] = np.log([latency, seconds_per_byte])
        self._spread_out(slice(link, link + 2), sd)

    def set_factors(self, group: str, operation: str, latency: float, volume: float, sd: float) -> None:
        """Set an operation's factors, with the standard deviation of the logarithms."""
        place = _LINKS + _place(group, operation)
        self._state[place : place + 2] = np.log([latency, volume])
        self._spread_out(slice(place, place + 2), sd)

    def factors(self, group: str, operation: str) -> tuple[float, float]:
        """Return an operation's factors, of latency and of volume."""
        place = _LINKS + _place(group, operation)
        latency, volume = np.exp(self._state[place : place + 2])
        return float(latency), float(volume)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able object that `from_json` takes."""
        return {"hosts": self.hosts, "state": self._state.tolist(), "variance": self._variance.tolist()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Network":
        """Build one from the result of `to_json`; raises KeyError, TypeError or ValueError where it did not."""
        network = cls(int(content["hosts"]))
        state, variance = np.array(content["state"], float), np.array(content["variance"], float)
        if state.shape != network._state.shape or variance.shape != network._variance.shape:
            raise ValueError(f"a network's state has {network._state.size} numbers, got {state.size}")
        if not (np.isfinite(state).all() and np.isfinite(variance).all()):
            raise ValueError("a network's state must be finite")
        network._state, network._variance = state, variance
        network._refresh()
        return network

    def _spread_out(self, which: slice, sd: float) -> None:
        self._variance[which] = 0
        self._variance[:, which] = 0
        np.einsum("ii->i", self._variance)[which] = sd**2
        self._refresh()

    def _refresh(self) -> None:
        arithmetic.units(self._state, self._link_of, self.units)


def add_terms(coefficients: NDArray[np.float64], operation: str, group: str, cost: Terms) -> None:
    """Add an operation's cost in a group to a plan's coefficients."""
    place = _place(group, operation)
    coefficients[place] += cost.latency
    coefficients[place + 1] += cost.volume


@lru_cache(maxsize=16)
def seen_by_some(group: Group) -> tuple[Group, ...]:
    """Return the group of all as some ranks see it: the same ranks wherever it is asked."""
    half = (_RANKS if group.size <= _MANY else _FEW) // 2
    ranks = range(group.size) if group.size <= _RANKS else {*range(half), *range(group.size - half, group.size)}
    return tuple(group.seen_by(rank) for rank in sorted(ranks))


def _place(group: str, operation: str) -> int:
    return 2 * (GROUPS.index(group) * len(OPERATIONS) + OPERATIONS.index(operation))
