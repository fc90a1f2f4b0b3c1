"""The joint choice: ratio and collective of every bucket, from what they cost in time and in delay."""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import Group, bind, collective_class
from mpicomp.compressors import Compressor, Dense, TopK
from mpicomp.cost import CostModel
from mpicomp.errors import ConfigurationError, IncompatiblePairError
from mpicomp.policies.allocate import least_makespan
from mpicomp.policies.carriers import Carriers, names_for
from mpicomp.policies.levels import at_ratio, check_adaptable, ladder, lost_share
from mpicomp.policies.policy import Delivered, Named, Plan, Policy, Shape, Told, feedback_of
from mpicomp.policies.registry import register_policy
from mpicomp.policies.surveys import Spectra, SpectrumSurvey, Survey
from mpicomp.transport.base import Asked, Transport

_LEAST, _MOST = 0.001, 0.25  # ratios
_EAGER, _EVERY = 10, 5  # steps that are all surveyed after a start; then one in so many
_STRIDE = 8  # of a survey: one group of elements in so many
_MIX = 0.5  # share of a new survey in what is known of a bucket
_LEARN = 0.2  # share of a step in what is known of a collective's loss
_DROP = 0.5  # of the learning rate, from which on training is taken to begin anew
_BINS = 400
_SMOOTH = 0.1  # share of a step in what is known of the time beside exchanges


@register_policy
@dataclass(eq=False)
class Joint(Policy):
    """What makes the model learn fastest here and now: ratio, collective and wire of every bucket together.

    What is not sent arrives later. With lost energy E and sent energy S of a step, over all ranks, that is by about
    ``delay = E / S`` steps in a steady state: the residual's energy over what a step adds to it. A model that has
    trained for ``age`` steps is then where it would have been ``delay`` steps before. So the plans are taken that
    minimise ``(age + delay) x seconds of a step``, among those whose delay is at most ``(1 - fidelity) x age``.

    Seconds come from the cost model, with the order in which buckets become ready and one after the other. Lost
    energies come from spectra of the accumulated gradient that ranks share every few steps, times what each collective
    was seen to lose besides. A dynamic programme over the lost energy (L-GreCo's, with the end of the last bucket in
    place of bytes) finds the best plans for every delay.

    It is careful at first, when age is small, and after the learning rate has dropped to half or less; it loosens as
    training goes on, and tightens when gains fall, for then delays grow.

    Parameters
    ----------
    fidelity : float
        In (0, 1]. A step may deliver gradients that are late by ``1 - fidelity`` of the training so far; 1 is dense.
        See docs/policies.md for what it costs.
    """

    id: ClassVar[str] = "auto"
    paper: ClassVar[str] = (
        "none; L-GreCo's dynamic programme with time in place of bytes, GraVAC's moving gain, Flexible Communication's "
        "collectives"
    )

    fidelity: float = 0.985

    def check(self) -> None:
        """See `Policy.check`."""
        number = isinstance(self.fidelity, int | float) and not isinstance(self.fidelity, bool)
        if not number or not 0 < self.fidelity <= 1:
            raise ConfigurationError(f"auto: fidelity must be in (0, 1], got {self.fidelity!r}")

    def adopt(self, named: Named) -> None:
        """See `Policy.adopt`. A compressor that was named gives all but the ratio, and dense stays a candidate."""
        self.compressor = TopK(wire="bf16") if named.compressor is None else named.compressor
        self._pinned = None if named.collective == "auto" else named.collective
        self._dense_only = self.compressor.id == "dense" or not self._carries(named)
        if not self._dense_only:
            check_adaptable("auto", self.compressor)
        self.feedback = feedback_of(self.compressor, named.feedback)
        wires = [None] if named.compressor is not None and getattr(self.compressor, "wire", None) is None else ["bf16"]
        self._dense = [Dense(wire=wire) for wire in wires if wire] + [Dense()]
        self._carriers = Carriers("auto", self.feedback, named.cost)
        self._ratios = [] if self._dense_only else ladder(_LEAST, _MOST)
        self._survey = SpectrumSurvey(_STRIDE)
        self._age = 0
        self._since = 0  # steps since the start or a change of buckets
        self._highest: float | None = None  # learning rate since training began anew
        self._kept: dict[str, float] = {}  # logarithm of what a collective sends of what the spectrum says
        self._shapes: list[Shape] = []
        self._spectra: list[Spectra | None] = []
        self._allowed: list[NDArray[np.int64]] = []
        self._reason = "careful until gradients have been looked at"
        self._beside: float | None = None  # seconds of a step beside what its exchanges add
        self._ready: NDArray[np.float64] | None = None  # of buckets, before the last one's
        self._before: tuple[int, float] | None = None

    @property
    def cost(self) -> CostModel | None:
        """See `Policy.cost`."""
        return self._carriers.cost

    @property
    def listens(self) -> bool:
        """See `Policy.listens`."""
        return self._carriers.listens

    def survey(self, bucket: int) -> Survey | None:
        """See `Policy.survey`: spectra, often at first."""
        looks = self._since < _EAGER or self._since % _EVERY == 0
        return self._survey if looks and not self._dense_only and self.fidelity < 1 else None

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Generator[Asked, Any, None]:
        """See `Policy.start`."""
        group = transport.group
        self._shapes = list(shapes)
        self._spectra = [None] * len(shapes)
        self._since = 0
        self._ready = self._before = self._beside = None
        ladders = [self._ladder(group) for _ in shapes]
        yield from self._carriers.start(ladders, shapes, transport)
        self._allowed = [self._dense_rows(bucket) for bucket in range(len(shapes))]

    def refresh(self, transport: Transport) -> Generator[Asked, Any, None]:
        """See `Policy.refresh`. Where the network has changed, plans are sought anew."""
        if (yield from self._carriers.refresh(transport)):
            self._solve()

    def plan(self, bucket: int) -> Plan:
        """See `Policy.plan`."""
        return self._carriers.plan(bucket, self._allowed[bucket], self._reason)

    def deliver(self, step: int, delivered: Sequence[Delivered]) -> None:
        """See `Policy.deliver`: what collectives lose besides."""
        self._age += 1
        self._since += 1
        for bucket, own in enumerate(delivered):
            spectra, row = self._spectra[bucket], self._carriers.row(bucket)
            rows = self._carriers.rows[bucket]
            level = int(rows.levels[row])
            if spectra is None or level >= len(self._ratios) or not 0 < own.gain <= 1:
                continue
            expected = 1 - float(lost_share(self.compressor, spectra, [self._ratios[level]])[0])
            if expected > 0:
                name = rows.schemes[row].id.partition(":")[0]
                seen = math.log(own.gain / expected)
                before = self._kept.get(name, seen)
                self._kept[name] = before + _LEARN * (seen - before)

    def learn(self, told: Told) -> None:
        """See `Policy.learn`."""
        self._carriers.learn(told)
        self._time(told)
        if told.lr is not None:
            if self._highest is not None and told.lr <= _DROP * self._highest:
                self._age, self._highest = 0, told.lr
            self._highest = max(told.lr, self._highest or told.lr)
        for bucket, rows in told.surveys.items():
            spectra, before = Spectra(self._shapes[bucket].sizes, rows), self._spectra[bucket]
            self._spectra[bucket] = spectra if before is None else before.mixed(spectra, _MIX)
        if told.surveys and not any(spectra is None for spectra in self._spectra):
            self._solve()

    def state_dict(self) -> dict[str, Any]:
        """See `Policy.state_dict`."""
        return {"age": self._age, "highest_lr": self._highest, "kept": dict(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        """See `Policy.load_state_dict`."""
        self._age = int(state.get("age", 0))
        self._highest = state.get("highest_lr")
        self._kept = {str(name): float(own) for name, own in state.get("kept", {}).items()}
        self._since = 0
        self._carriers.give(cost)

    def _carries(self, named: Named) -> bool:
        """Tell whether the collective that was named carries the compressor; where it was not, it may carry dense."""
        if self._pinned is None:
            return True
        try:
            bind(self.compressor, self._pinned)
        except IncompatiblePairError:
            if named.compressor is not None:
                raise
            bind(Dense(), self._pinned)
            return False
        return True

    def _ladder(self, group: Group) -> list[tuple[Compressor, Sequence[str]]]:
        levels: list[tuple[Compressor, Sequence[str]]] = []
        for ratio in self._ratios:
            own = at_ratio(self.compressor, ratio)
            levels.append((own, [self._pinned] if self._pinned else names_for(own, group)))
        pinned = self._pinned is not None and collective_class(self._pinned.partition(":")[0]).carries(Dense())
        for dense in self._dense:
            levels.append((dense, [str(self._pinned)] if pinned else names_for(dense, group)))
        return levels

    def _dense_rows(self, bucket: int) -> NDArray[np.int64]:
        return np.flatnonzero(self._carriers.rows[bucket].levels >= len(self._ratios))

    def _time(self, told: Told) -> None:
        """Learn when buckets are ready, and what a step takes beside them."""
        ready, ends = told.times[:, :, 3].max(axis=0), told.times[:, :, 1].max(axis=0)
        last = float(ready[-1])
        apart = ready - last
        self._ready = apart if self._ready is None else self._ready + _SMOOTH * (apart - self._ready)
        exposed = float(ends[-1]) - last
        if self._before is not None and told.step > self._before[0]:
            beside = (last - self._before[1]) / (told.step - self._before[0]) - exposed
            beside = max(beside, 0.0)
            self._beside = beside if self._beside is None else self._beside + _SMOOTH * (beside - self._beside)
        self._before = told.step, last

    def _solve(self) -> None:
        """Seek the best plans with what is known now."""
        spectra = [own for own in self._spectra if own is not None]
        if len(spectra) < len(self._shapes) or self._dense_only or self.fidelity == 1:
            return
        energies = [float(own.energies.sum()) for own in spectra]
        energy = sum(energies)
        longest = (1 - self.fidelity) * self._age
        limit = energy * longest / (1 + longest)
        if energy <= 0 or limit <= 0:
            self._allowed = [self._dense_rows(bucket) for bucket in range(len(spectra))]
            return
        lost = [
            self._lost(bucket, own) * share for bucket, (own, share) in enumerate(zip(spectra, energies, strict=True))
        ]
        seconds = [self._carriers.seconds(bucket) for bucket in range(len(spectra))]
        best = [_undominated(errors, own) for errors, own in zip(lost, seconds, strict=True)]
        ready = [0.0] * len(spectra) if self._ready is None else self._ready.tolist()
        ends, solutions = least_makespan(
            [errors[places] for errors, places in zip(lost, best, strict=True)],
            [own[places] for own, places in zip(seconds, best, strict=True)],
            ready, limit, _BINS,
        )  # fmt: skip
        share = np.minimum(np.arange(ends.size) / _BINS, 1.0) * limit / energy
        delays = share / (1 - share)
        whole = (self._age + delays) * (ends + (self._beside or 0.0))
        place = int(whole.argmin())
        choice = solutions.at(place)
        for bucket, (places, own) in enumerate(zip(best, choice, strict=True)):
            budget = lost[bucket][places[own]]
            self._allowed[bucket] = np.flatnonzero(lost[bucket] <= budget * (1 + 1e-9))
        self._reason = f"delay {delays[place]:.2g} of at most {longest:.2g} steps"

    def _lost(self, bucket: int, spectra: Spectra) -> NDArray[np.float64]:
        """Give the share of a bucket's energy that each of its rows is expected to lose."""
        rows = self._carriers.rows[bucket]
        kept = np.ones(rows.kept.size)
        kept[: len(self._ratios)] = 1 - lost_share(self.compressor, spectra, self._ratios)
        names = [scheme.id.partition(":")[0] for scheme in rows.schemes]
        factor = np.array([math.exp(min(self._kept.get(name, 0.0), 0.0)) for name in names])
        factor[rows.levels >= len(self._ratios)] = 1.0
        lost: NDArray[np.float64] = 1 - kept[rows.levels] * factor
        return lost


def _undominated(errors: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Give the rows for which no other one is as fast and loses as little, from the fastest to the slowest."""
    order = np.lexsort((errors, seconds))
    lowest = np.minimum.accumulate(errors[order])
    better = np.concatenate(([True], errors[order][1:] < lowest[:-1]))
    return order[better]
