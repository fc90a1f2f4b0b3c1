"""The collective of least predicted time, chosen anew at every step."""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import Group, Scheme, bind, variants
from mpicomp.compressors import Compressor, Dense
from mpicomp.cost import Candidates, CostModel, measure_kernels, probe_link, share_model
from mpicomp.policies.policy import Plan, Policy, Shape
from mpicomp.transport.base import Asked, Transport

_SETTLING = "auto: as in the step before, until it is known what it takes"
_PINNED = "static: pinned"
_UNMEASURED = "auto: nothing can be measured, the first that fits"  # one rank, or ranks in lockstep
_CURIOUS = (
    12,
    1 / 64,
)  # plans that may be explored after a start or a change of the network, and for each step learnt from
_SETTLED = 2  # steps of a plan that teach nothing: buffers are made, and compressors find their bounds
_LEARNING_S, _WORTH, _SELDOM = 500e-6, 0.01, 6  # what learning from a step takes, of a step at most; one in six is
_ANOTHER = 0.35  # by which the logarithm of a link's latency or bandwidth differs when it has changed
_TOO_SLOW = 3.0  # times the least predicted seconds: such plans are not run to see whether the prediction is right


@dataclass
class _Turn:
    """Which plan a bucket runs, for how many steps it has, and whether it is known what it takes."""

    place: int
    steps: int = -1
    known: bool = False


class Selector(Policy):
    """A compressor with every collective that carries it, and no compression: what is predicted to be fastest.

    Predictions come from a cost model that learns from every step. A plan is also run now and then when it could be the
    fastest for all that is known: the less is known of it, the longer it was not run, and the less it can cost,
    the sooner. What is predicted to take three times the least is not tried. A plan is run for some steps in turn,
    since the first ones tell nothing: buffers are made, and thresholds were those of another plan. Where steps are
    so short that learning from them would be felt, one in some is learnt from, as long as nothing new is expected.

    Parameters
    ----------
    compressor : Compressor
        What every bucket uses, unless a dense collective is faster.
    collectives : sequence of str, optional
        Among which to choose, for this compressor alone; None is all, and those of `mpicomp.Dense`.
    feedback : bool
        Whether there is a residual.
    cost : CostModel or str, optional
        What is known, or the file that it is in. None: it is measured before the first step.

    Raises
    ------
    UnknownNameError, IncompatiblePairError
        See `mpicomp.collectives.bind`.
    """

    id = "static"

    def __init__(
        self,
        compressor: Compressor,
        collectives: Sequence[str] | None = None,
        feedback: bool = True,
        cost: CostModel | str | None = None,
    ) -> None:
        self._compressor = compressor
        self._collectives = collectives
        self._feedback = feedback
        self._given = cost
        self._schemes: list[list[Scheme[Any]]] = []
        self._candidates: list[Candidates] = []
        self._turns: list[_Turn] = []
        self._changed = False
        self._before = np.zeros(2)  # logarithms of the link's latency and seconds a byte, before a change was suspected
        self._curious: float = _CURIOUS[0]
        self._count = 0
        self._every = 1
        for name in collectives or ():
            bind(compressor, name)  # what does not fit is refused here

    @property
    def measures(self) -> bool:
        """Where there is something to choose, or to predict; of short steps some, unless there is news."""
        if not self._candidates:
            return False
        assert self.cost is not None
        news = self.cost.network.suspects or not all(turn.known for turn in self._turns)
        return news or self._count % self._every == 0

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Generator[Asked, Any, None]:
        """See `Policy.start`. Links, operations and kernels are measured where they are not known."""
        group = transport.group
        own = [self._compressor.within(shape.names, shape.sizes, shape.shapes) for shape in shapes]
        self._schemes = [self._all(compressor, group) for compressor in own]  # what is preferred comes first
        self._candidates = []
        if group.size == 1 or not transport.probes:
            return
        self.cost = yield from share_model(self.cost or self._given, transport)
        everything = [scheme for schemes in self._schemes for scheme in schemes]
        yield from measure_kernels(self.cost, everything, self._feedback, transport)
        self._candidates = [
            self.cost.candidates(schemes, shape.numel, shape.dtype, group)
            for schemes, shape in zip(self._schemes, shapes, strict=True)
        ]
        self._turns = [_Turn(candidates.choose(_TOO_SLOW)[0]) for candidates in self._candidates]
        self._curious, self._count, self._every = _CURIOUS[0], 0, 1

    def refresh(self, transport: Transport) -> Generator[Asked, Any, None]:
        """See `Policy.refresh`. Where the network has changed, its links are measured anew."""
        self._count += 1
        if self._changed:
            self._changed = False
            assert self.cost is not None
            network = self.cost.network
            yield from probe_link(network, transport)
            now = np.log([network.latency, network.seconds_per_byte])
            network.find(changed=bool(np.abs(now - self._before).max() > _ANOTHER))
            for candidates in self._candidates:
                candidates.unsettle()
            for turn in self._turns:
                turn.known = True
            self._curious = _CURIOUS[0]

    def plan(self, bucket: int) -> Plan:
        """See `Policy.plan`."""
        schemes = self._schemes[bucket]
        if not self._candidates:
            return Plan(schemes[0], _UNMEASURED if self._collectives is None else _PINNED)
        candidates, turn = self._candidates[bucket], self._turns[bucket]
        turn.steps += 1
        reason = _PINNED
        if len(schemes) > 1:
            reason = self._choose(candidates, turn) if turn.known else _SETTLING
        prediction = candidates.prediction(turn.place)
        return Plan(schemes[turn.place], reason, prediction, turn.steps >= _SETTLED)

    def learn(self, plans: Sequence[Plan], times: NDArray[np.float64]) -> None:
        """See `Policy.learn`."""
        assert self.cost is not None
        self.cost.network.drift()
        if not self.cost.network.suspects:
            self._before = np.log([self.cost.network.latency, self.cost.network.seconds_per_byte])
        for bucket, plan in enumerate(plans):
            if plan.settled:
                start, end, own = times[:, bucket].max(axis=0)
                place, turn = self._schemes[bucket].index(plan.scheme), self._turns[bucket]
                self._changed |= self._candidates[bucket].observe(place, float(own), float(end - start))
                turn.known |= turn.place == place
        expected_s = 0.0
        for candidates, turn in zip(self._candidates, self._turns, strict=True):
            candidates.step()
            expected_s += candidates.prediction(turn.place).seconds
        self._every = min(_SELDOM, math.ceil(_LEARNING_S * len(plans) / (_WORTH * expected_s)))
        self._curious = min(self._curious + _CURIOUS[1], _CURIOUS[0])

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        """See `Policy.load_state_dict`: a cost model counts where none is known yet, that of rank 0."""
        self._given = cost or self._given

    def _choose(self, candidates: Candidates, turn: _Turn) -> str:
        """Give a bucket its turn, and the reason."""
        place, reason, explores = choose(candidates, self._curious >= 1)
        self._curious -= explores
        if place != turn.place:
            turn.place, turn.steps, turn.known = place, 0, False
        return reason

    def _all(self, compressor: Compressor, group: Group) -> list[Scheme[Any]]:
        """Bind everything that may be chosen, what is preferred where nothing was measured first."""
        if self._collectives is not None:
            return [bind(compressor, name) for name in self._collectives]
        pairs = [(compressor, name) for name in variants(compressor)]
        if compressor != Dense():
            pairs += [(Dense(), name) for name in variants(Dense())]
        # Where a group has one rank, or there is one group, it is what it is built upon.
        flat = group.hosts in (1, group.size)
        return [bind(with_, name) for with_, name in pairs if not (flat and "hierarchical" in name)]


def choose(candidates: Candidates, curious: bool) -> tuple[int, str, bool]:
    """Give the plan to run, why, and whether that is for the sake of knowing.

    Parameters
    ----------
    candidates : Candidates
        Among which to choose.
    curious : bool
        Whether a plan may be taken that would be the fastest if all were as fast as they well may be.
    """
    best, place = candidates.choose(_TOO_SLOW)
    if place == best or not curious:
        return best, f"auto: least predicted seconds of {len(candidates)} plans", False
    age = candidates.age(place)
    known = "never run" if age is None else f"last run {age} steps ago"
    return place, f"auto: exploring, {known}, may be faster than what is predicted to be", True
