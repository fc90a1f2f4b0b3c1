"""The joint choice: ratio, collective and wire of every bucket, by predicted seconds and by what training loses."""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import bind
from mpicomp.compressors import Compressor, Dense
from mpicomp.cost import CostModel
from mpicomp.cost.formulas import ring
from mpicomp.errors import ConfigurationError, IncompatiblePairError
from mpicomp.policies.behind import behind_of_local_steps
from mpicomp.policies.elements import Elements, ElementSurvey
from mpicomp.policies.families import families
from mpicomp.policies.plan_selector import WORTH, PlanSelector, names_for
from mpicomp.policies.policy import BucketOutcome, Plan, Policy, Shape, StepReport, UserSettings, feedback_of
from mpicomp.policies.ratio_levels import at_ratio, check_adaptable, default_compressor, ladder
from mpicomp.policies.surveys import Survey
from mpicomp.policies.tradeoff import Balance
from mpicomp.registry import register
from mpicomp.rounds import Group, Rounds
from mpicomp.setting_checks import is_number
from mpicomp.transport.base import Transport

_LEAST = 0.001  # lowest ratio among the candidates: below it indices take more than values
_MOST = 0.25  # highest ratio among the candidates: above it four bits of all elements are fewer
_STEP = 2 ** (1 / 2)  # from one ratio to the next: the best one of them is within 5 % of the best of all
_OFTEN = 10  # steps between two looks at gradients, and the searches for better plans that follow, at first
_SELDOM = 0.1  # share of the steps done so far between them later: what is known changes as slowly as training does
_STRETCH = 2  # times the pause before where a search has changed nothing, up to all steps so far
_JUMP = 2.0  # times the learning rate of the last search, or a part of it, from which on gradients are looked at anew
_SMOOTH = 0.1  # share of a step in the moving average of when buckets are ready
_BITS = 8  # how many times fewer they are than bytes of dense exchange, where all elements travel in four bits
_WOKEN_S = 3e-3  # seconds that a thread waits for a core on which another one computes: a slice of Linux' scheduler
_BESIDES = 15  # steps whose median is the time beside exchanges: something else may come in between
_PAYS = 0.1  # how much better compressed plans have to be than dense ones, since what is known of harm is not exact


@register
@dataclass(eq=False)
class Joint(Policy):
    """Choose compressor, ratio, collective and wire of every bucket together, so that the model learns fastest.

    What a step keeps back arrives later and in bursts, so that training falls behind dense by a share of its steps
    (`mpicomp.policies.behind`). The plans minimise ``seconds of a step / (1 - behind)``, and ``behind`` is at most
    ``1 - fidelity``. It is told for every plan, those that do not run among them, from the scales of elements and from
    how much of their gradients is signal (`mpicomp.policies.elements`): ranks look at some elements now and then.

    Candidates are selections at many ratios, all elements in few bits, and dense. Seconds come from the cost model, in
    the order in which buckets become ready. A dynamic programme over what is lost (L-GreCo's, with the end of the last
    bucket in place of bytes) finds the best plans.

    Where ranks exchange what their own steps have changed, the steps between exchanges are chosen, too.

    Parameters
    ----------
    fidelity : float
        In (0, 1]. Training may fall behind by ``1 - fidelity`` of its steps; 1 is dense. docs/policies.md says what it
        costs.
    """

    id: ClassVar[str] = "auto"
    paper: ClassVar[str] = (
        "none; L-GreCo's dynamic programme with time in place of bytes, GraVAC's moving gain, Flexible Communication's "
        "collectives"
    )
    resumes: ClassVar[bool] = False

    fidelity: float = 0.7

    def check(self) -> None:
        """See `Policy.check`."""
        if not is_number(self.fidelity) or not 0 < self.fidelity <= 1:
            raise ConfigurationError(f"auto: fidelity must be in (0, 1], got {self.fidelity!r}")

    def configure(self, settings: UserSettings) -> None:
        """See `Policy.configure`. A compressor that was named gives all but the ratio, and dense stays a candidate."""
        self._pinned = None if settings.collective == "auto" else settings.collective
        self.compressor = settings.compressor or default_compressor()
        wires, quantisers = families(settings.compressor)
        self._wires = [own for own in wires if self._fits(own)]
        self._quantisers = [own for own in quantisers if self._fits(own)]
        compresses = bool(self._wires or self._quantisers)
        if not compresses:
            assert self._pinned is not None
            bind(Dense() if settings.compressor is None else self.compressor, self._pinned)  # says what does not fit
        dense_only = not compresses or self.compressor.message == "dense" or self.fidelity == 1
        if settings.feedback is False and not dense_only:
            if settings.compressor is not None:
                raise ConfigurationError(
                    "auto: lets gradients be late, which needs error feedback to keep them; leave feedback out, or use "
                    "policy='static'"
                )
            dense_only = True
        if not dense_only:
            check_adaptable("auto", self.compressor)
        self.feedback = feedback_of(self.compressor, settings.feedback)
        self._normalises = settings.normalises
        self._locals = list(settings.local_steps)
        self._local = self._locals[0]
        self._made = 1  # steps that ranks have made since the last exchange
        self._following: dict[int, int] = {}  # of exchanges since seconds were heard of, the steps made after each
        self._compresses = not dense_only
        self._chooses = False  # whether there is anything but dense: not where there is one rank
        self._ladder = self._ratios = np.array([])  # of a wire; of all levels that have one
        self._dense = [Dense()]
        self._selector = PlanSelector("auto", self.feedback, settings.cost)
        self._shapes: list[Shape] = []
        self._surveys: list[ElementSurvey] = []  # of each bucket
        self._elements: list[Elements] = []
        self._is_known = True  # whether enough is known of all of them
        self._restored: dict[str, Mapping[str, Any]] = {}
        self._allowed: list[NDArray[np.int64]] = []
        self._together: list[NDArray[np.bool_]] = []  # rows of collectives whose ranks all send the same elements
        self._reason = "dense until gradients have been looked at"
        self._age = self._trained = 0  # exchanges, and the steps that ranks have made
        self._forget()
        self._due = False  # whether better plans have to be sought at the next step
        self._beside: deque[float] = deque(maxlen=_BESIDES)  # seconds of steps beside what exchanges add to them
        self._ready: NDArray[np.float64] | None = None  # of buckets, against the last one's
        self._before: tuple[int, float] | None = None

    def _forget(self) -> None:
        self._step, self._next = 0, 0.0  # since buckets are what they are: now, and when to look at gradients again
        self._pause = 0.0  # steps from one look to the next
        self._looked = -1  # number of the step of the last pair of looks
        self._lr: float | None = None  # since when looks are as they are
        self._took = math.nan  # seconds that were predicted of plans at the last search

    @property
    def cost(self) -> CostModel | None:
        """See `Policy.cost`."""
        return self._selector.cost

    @property
    def local_steps(self) -> int:
        """See `Policy.local_steps`."""
        return self._local

    @property
    def wants_telemetry(self) -> bool:
        """See `Policy.wants_telemetry`."""
        return self._selector.wants_telemetry

    def survey(self, bucket: int) -> Survey | None:
        """See `Policy.survey`: some elements, until enough is known of them and then in two steps now and then."""
        looks = self._chooses and (self._step >= self._next or not self._is_known)
        return self._surveys[bucket] if looks else None

    def bucket_limit(self, nbytes: int, transport: Transport) -> Rounds[int | None]:
        """See `Policy.bucket_limit`: as many buckets as make what is left after backward least.

        Of k buckets, backward hides all but the last one's share 1/k of the time on the links, and each adds the time
        that does not shrink with it: ``T / k + k t`` is least for ``k = sqrt(T / t)``. T is that of four bits an
        element, which is about what any plan comes to that leaves time to hide.
        """
        cost = yield from self._selector.know(transport)
        if cost is None:
            return None
        latency, rate, ranks = cost.network.latency, cost.network.seconds_per_byte, transport.group.size
        whole = ring(ranks, nbytes / _BITS).seconds(0.0, rate)
        own = _WOKEN_S + ring(ranks, 0).seconds(latency, 0.0)
        return math.ceil(nbytes / max(1, round(math.sqrt(whole / own))))

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        """See `Policy.start`."""
        self._restored |= self._known()
        self._shapes = list(shapes)
        self._restore()
        self._forget()
        self._ready = self._before = None
        self._beside.clear()
        self._ranks = transport.group.size
        self._chooses = self._compresses and self._ranks > 1
        if self._chooses:
            self._ladder = np.array(ladder(_LEAST, _MOST, _STEP))
            self._ratios = np.tile(self._ladder, len(self._wires))
            narrow = any(getattr(own, "wire", None) == "bf16" for own in self._wires)
            self._dense = [Dense(wire="bf16"), Dense()] if narrow else [Dense()]
        levels = [self._levels(transport.group) for _ in shapes]
        yield from self._selector.start(levels, self._shapes, transport)
        self._together = [
            np.array([scheme.may_drop_selected for scheme in table.schemes]) for table in self._selector.tables
        ]
        self._allowed = [self._dense_rows(bucket) for bucket in range(len(shapes))]

    def refresh(self, transport: Transport) -> Rounds[None]:
        """See `Policy.refresh`. Better plans are sought after looks, and at once where the network has changed."""
        changed = yield from self._selector.refresh(transport)
        if changed or self._due:
            self._due = False
            before = self._allowed
            self._think()
            if changed or not all(map(np.array_equal, before, self._allowed)):
                before_next = self._next if self._next > self._step else math.inf
                self._wait(0)
                self._next = min(self._next, before_next)

    def plan(self, bucket: int) -> Plan:
        """See `Policy.plan`."""
        return self._selector.plan(bucket, self._allowed[bucket], self._reason)

    def _wait(self, pause: float) -> None:
        """Look at gradients again after so many steps, or as many as are usual now."""
        self._pause = min(max(_OFTEN, _SELDOM * self._age, pause), max(_OFTEN, self._age))
        self._next = self._step + self._pause

    def on_step_end(self, step: int, outcomes: Sequence[BucketOutcome]) -> None:
        """See `Policy.on_step_end`."""
        if self._is_known and self._step > self._next:  # the second look in a row
            self._looked = step
            self._wait(_STRETCH * self._pause)
        self._age += 1
        self._trained += self._made
        self._made = self._local
        if len(self._locals) > 1 and self._selector.measured:
            self._following[step] = self._local
        self._step += 1

    def on_telemetry(self, report: StepReport) -> None:
        """See `Policy.on_telemetry`. A step that was undone tells too, so that its number says nothing."""
        if self._selector.on_telemetry(report):
            self._time(report)
            takes = sum(float(self._selector.seconds(bucket)[own].min()) for bucket, own in enumerate(self._allowed))
            if math.isnan(self._took):
                self._took = takes
            self._due |= abs(takes - self._took) > _PAYS * (self._took + self._beside_s)
        if report.lr and not 1 / _JUMP < report.lr / (self._lr or report.lr) < _JUMP:
            self._pause, self._next, self._lr = 0.0, self._step, None
        self._lr = self._lr or report.lr
        if report.surveys:
            for bucket, surveys in report.surveys.items():
                self._elements[bucket].observe(surveys)
            known, self._is_known = self._is_known, all(own.known for own in self._elements)
            self._due |= self._is_known and (not known or report.step == self._looked)

    def state_dict(self) -> dict[str, Any]:
        """See `Policy.state_dict`."""
        return {
            "age": self._age,
            "trained": self._trained,
            "local_steps": self._local,
            "elements": self._known(),
        }

    def _known(self) -> dict[str, Mapping[str, Any]]:
        """Return what is known of each bucket, by the parameter that it begins with."""
        return {shape.names[0]: own.state() for shape, own in zip(self._shapes, self._elements, strict=True)}

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        """See `Policy.load_state_dict`."""
        self._age = int(state.get("age", 0))
        self._trained = int(state.get("trained", self._age))
        if state.get("local_steps") in self._locals:
            self._local = int(state["local_steps"])
        self._due = True
        self._restored = {str(name): own for name, own in state.get("elements", {}).items()}
        self._restore()
        self._selector.give(cost)

    def _restore(self) -> None:
        """Begin with what is known of buckets that begin with the same parameter, or with nothing."""
        self._surveys = [ElementSurvey(shape.numel, self._quantisers) for shape in self._shapes]
        tried = len(self._quantisers)
        self._elements = [Elements(shape.numel, tried, self._normalises) for shape in self._shapes]
        for shape, elements in zip(self._shapes, self._elements, strict=True):
            if shape.names[0] in self._restored:
                elements.give(self._restored.pop(shape.names[0]))
        self._is_known = all(own.known for own in self._elements)

    def _fits(self, compressor: Compressor) -> bool:
        """Return whether the collective that was named carries a compressor; any does where none was."""
        if self._pinned is not None:
            try:
                bind(compressor, self._pinned)
            except IncompatiblePairError:
                return False
        return True

    def _levels(self, group: Group) -> list[tuple[Compressor, Sequence[str]]]:
        levels: list[tuple[Compressor, Sequence[str]]] = []
        for wire, ratio in itertools.product(self._wires, self._ladder.tolist()):
            own = at_ratio(wire, ratio)
            # A second wire is for fast networks, where what matters is the time that own work takes.
            whole = wire is not self._wires[0]
            levels.append((own, [self._pinned] if self._pinned else names_for(own, group, whole)))
        if self._chooses:
            for own in self._quantisers:
                levels.append((own, self._names(own, group)))
        for dense in self._dense:
            levels.append((dense, self._names(dense, group) if self._fits(dense) else names_for(dense, group)))
        return levels

    def _dense_rows(self, bucket: int) -> NDArray[np.int64]:
        levels = self._selector.tables[bucket].levels
        return np.flatnonzero(levels > levels[-1] - len(self._dense))

    def _names(self, compressor: Compressor, group: Group) -> list[str]:
        """Return the collectives that may carry a compressor."""
        return [self._pinned] if self._pinned else names_for(compressor, group)

    def _fastest_dense(self, bucket: int) -> int:
        rows = self._dense_rows(bucket)
        return int(rows[self._selector.seconds(bucket)[rows].argmin()])

    def _time(self, told: StepReport) -> None:
        """Learn when buckets are ready, and the seconds of a step beside them."""
        ready, ends = told.latest[:, 3], told.latest[:, 1]
        last = float(ready[-1])
        apart = ready - last
        self._ready = apart if self._ready is None else self._ready + _SMOOTH * (apart - self._ready)
        if self._before is not None and told.step > self._before[0]:
            passed = [self._following.get(step, 1) for step in range(self._before[0], told.step)]
            between = (last - self._before[1]) - len(passed) * (float(ends[-1]) - last)
            self._beside.append(between / sum(passed))
        self._following = {step: steps for step, steps in self._following.items() if step >= told.step}
        self._before = told.step, last

    @property
    def _beside_s(self) -> float:
        """Seconds of a step beside what exchanges add to it."""
        return max(0.0, statistics.median(self._beside or [0.0]))

    def _think(self) -> None:
        """Search for better plans with the current state, and for the steps that ranks make between exchanges."""
        self._took = math.nan
        buckets = range(len(self._shapes))
        balance = self._balance(self._local)
        if balance is None:
            self._allowed = [self._dense_rows(bucket) for bucket in buckets]
            return
        choice = self._best(balance)
        least = (1 - WORTH) * balance.worth(choice)
        # What a step takes beside exchanges has to be known, or there is nothing that fewer of them would save.
        for steps in self._locals if self._selector.measured and self._beside else ():
            other = None if steps == self._local else self._balance(steps)
            if other is not None:
                best = self._best(other)
                if other.worth(best) < least:
                    self._local, balance, choice, least = steps, other, best, other.worth(best)
        self._allowed = [
            np.flatnonzero(own <= own[row] * (1 + 1e-9)) for own, row in zip(balance.behind, choice, strict=True)
        ]
        signal = sum(own.signal * share for own, share in zip(self._elements, balance.weights, strict=True))
        self._reason = (
            f"behind by {balance.lost(choice):.2g} of at most {balance.most:.2g} of its steps, {signal:.2g} of the "
            "energy is signal"
        )
        if len(self._locals) > 1:
            self._reason += f"; {self._local} steps from one exchange to the next"

    def _balance(self, steps: int) -> Balance | None:
        """Weigh all rows by the current state, with so many steps to an exchange; None where too little is known."""
        if not self._chooses or not self._is_known:
            return None
        buckets = range(len(self._shapes))
        if all(own.idle for own in self._elements):
            return None
        # An optimizer that divides by the root of a mean square moves all elements alike, whatever their scale.
        numel = sum(shape.numel for shape in self._shapes)
        return Balance(
            behind=[self._behind(bucket, self._trained / steps) for bucket in buckets],
            seconds=[self._selector.seconds(bucket) for bucket in buckets],
            weights=[shape.numel / numel for shape in self._shapes],
            ready=[0.0] * len(buckets) if self._ready is None else self._ready.tolist(),
            beside=self._beside_s,
            most=1 - self.fidelity,
            steps=steps,
            apart=behind_of_local_steps(steps, self._trained),
        )

    def _best(self, balance: Balance) -> list[int]:
        """Return the row of every bucket that is to run: others than those that run where it is worth it."""
        buckets = range(len(self._shapes))
        dense = [self._fastest_dense(bucket) for bucket in buckets]
        choice, now = balance.best(), [self._selector.row(bucket) for bucket in buckets]
        pays = (1 - _PAYS) * balance.worth(dense)
        if balance.worth(choice) > pays:
            choice = dense
        if balance.allows(now) and balance.worth(now) <= min(pays, (1 + WORTH) * balance.worth(choice)):
            choice = now
        return choice

    def _behind(self, bucket: int, age: float) -> NDArray[np.float64]:
        """Return the share of its steps by which each of a bucket's rows makes training fall behind, at an age."""
        table, elements, ranks = self._selector.tables[bucket], self._elements[bucket], self._ranks
        of_levels = np.zeros((2, table.kept.size))  # where ranks select apart, and together
        if self._ratios.size:
            both = elements.behind(self._ladder, ranks, age, self.compressor.by_magnitude)
            of_levels[:, : self._ratios.size] = np.tile(both, len(self._wires))
        whole = [elements.behind_with(place, ranks, age) for place in range(len(self._quantisers))]
        of_levels[:, self._ratios.size : self._ratios.size + len(whole)] = whole
        apart, together = of_levels[:, table.levels]
        behind: NDArray[np.float64] = np.where(self._together[bucket], together, apart)
        return behind
