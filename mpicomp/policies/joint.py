"""The joint choice: ratio, collective and wire of every bucket, by predicted seconds and delay."""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import bind
from mpicomp.compressors import Compressor, Dense, Learner
from mpicomp.cost import CostModel
from mpicomp.errors import ConfigurationError, IncompatiblePairError
from mpicomp.policies.codes import Codes, Rivals, late_under
from mpicomp.policies.families import families
from mpicomp.policies.plan_selector import PlanSelector, collective_of, names_for
from mpicomp.policies.policy import Delivered, Named, Plan, Policy, Shape, StepReport, feedback_of
from mpicomp.policies.ratio_levels import at_ratio, check_adaptable, default_compressor, ladder, lost_share
from mpicomp.policies.signal_share import Signal, SketchSurvey
from mpicomp.policies.staleness import Delays, Lateness, first_ratio, over
from mpicomp.policies.surveys import Both, LossSurvey, Spectra, SpectrumSurvey, Survey
from mpicomp.policies.tradeoff import Balance, delay_for
from mpicomp.registry import register
from mpicomp.rounds import Asked, Group
from mpicomp.transport.base import Transport

# All of these were set by hand, on `text-lstm` and `digits`.
_LEAST = 0.001  # lowest ratio among the candidates
_MOST = 0.25  # highest ratio among the candidates
_STEP = 2 ** (1 / 3)  # from one ratio to the next
_LOOKS = 100  # steps between two spectra
_STRIDE = 8  # a spectrum looks at one group of elements in so many
_SKETCHES = 5  # steps between two sketches
_THINKS = 5  # steps between two searches for better plans
_DOWN = 3  # levels that the ratio may go down at once: delays further off are not known well
_UNSEEN = 4.0  # factor on the delay of a collective that leaves something out, before it ran
_LEARN = 0.2  # share of a step in that factor, once the collective runs
_TAUGHT = 10  # steps of such a collective in a row that teach the factor; later ones teach the bucket's delay
_GRACE = 80  # steps that count as done when training begins: to be one step behind does no harm then
_DROP = 0.5  # a learning rate that falls to this share of its highest value begins training anew
_SMOOTH = 0.1  # share of a step in the moving average of when buckets are ready
_BESIDES = 15  # steps whose median is the time beside exchanges: something else may come in between
_WORTH = 0.03  # how much better other plans have to be than those that run
_PAYS = 0.1  # how much better compressed plans have to be than dense ones, in case late gradients cost more than known


@register
@dataclass(eq=False)
class Joint(Policy):
    """Choose compressor, ratio, collective and wire of every bucket together, so that the model learns fastest.

    What a step keeps back arrives later. A model whose gradients are late falls behind, as far as they are signal and
    not noise of a batch. So the plans minimise ``(age + behind) x seconds of a step``: ``age`` is the number of steps
    since training began or the learning rate dropped, ``behind`` the number of steps by which late gradients set
    training back (`mpicomp.policies.tradeoff`). At most ``(1 - fidelity) x (age + 80)`` steps are allowed. This is a
    gain of at least ``1 / (1 + delay)``: a high target at first, which falls as training goes on and less of the
    gradients is signal.

    Candidates are top-k at many ratios, signs, four bits an element, and dense. Now and then codes that have to be
    learnt first are weighed against them (`mpicomp.policies.codes`). Seconds come from the cost model, in the order in
    which buckets become ready. The delay under each ratio is learnt from the gains of earlier steps
    (`mpicomp.policies.staleness`), and so is the factor that each collective puts on it; the delay under a quantiser is
    at first what its rounding leaves out of a gradient. Small sketches tell how much of gradients is signal
    (`mpicomp.policies.signal_share`). A dynamic programme over the delay (L-GreCo's, with the end of the last bucket in
    place of bytes) finds the best plans. Ratios go down by little at a time and up by as much as is needed: when gains
    fall, delays grow.

    Parameters
    ----------
    fidelity : float
        In (0, 1]. Training may fall behind by ``1 - fidelity`` of the steps that it has done; 1 is dense.
        docs/policies.md says what it costs.
    """

    id: ClassVar[str] = "auto"
    paper: ClassVar[str] = (
        "none; L-GreCo's dynamic programme with time in place of bytes, GraVAC's moving gain, Flexible Communication's "
        "collectives"
    )
    resumes: ClassVar[bool] = False

    fidelity: float = 0.95

    def check(self) -> None:
        """See `Policy.check`."""
        number = isinstance(self.fidelity, int | float) and not isinstance(self.fidelity, bool)
        if not number or not 0 < self.fidelity <= 1:
            raise ConfigurationError(f"auto: fidelity must be in (0, 1], got {self.fidelity!r}")

    def adopt(self, named: Named) -> None:
        """See `Policy.adopt`. A compressor that was named gives all but the ratio, and dense stays a candidate.

        What learns a code gives its ratio too, and that is learnt where it is predicted to pay.
        """
        self._pinned = None if named.collective == "auto" else named.collective
        self.compressor = named.compressor or default_compressor()
        wires, quantisers, codes = families(named.compressor)
        self._wires = [own for own in wires if self._fits(own)]
        self._quantisers = [own for own in quantisers if self._fits(own)]
        codes = [own for own in codes if self._fits(own)]
        compresses = bool(self._wires or self._quantisers or codes)
        if not compresses:
            assert self._pinned is not None
            bind(Dense() if named.compressor is None else self.compressor, self._pinned)  # says what does not fit
        dense_only = not compresses or self.compressor.message == "dense" or self.fidelity == 1
        if named.feedback is False and not dense_only:
            if named.compressor is not None:
                raise ConfigurationError(
                    "auto: lets gradients be late, which needs error feedback to keep them; leave feedback out, or use "
                    "policy='static'"
                )
            dense_only = True
        if self.compressor.learns:
            cast(Learner, self.compressor).check_installed()
        elif not dense_only:
            check_adaptable("auto", self.compressor)
        self.feedback = feedback_of(self.compressor, named.feedback)
        self._compresses = not dense_only
        self._chooses = False  # whether there is anything but dense: not where there is one rank
        self._codes = Codes(codes)
        self._ladder = self._ratios = np.array([])  # of a wire; of all levels that have one
        self._dense = [Dense()]
        self._selector = PlanSelector("auto", self.feedback, named.cost)
        self._spectrum, self._sketch = SpectrumSurvey(_STRIDE), SketchSurvey()
        self._losses = LossSurvey(self._quantisers, _STRIDE)
        self._both = Both(self._spectrum, self._losses)
        self._signal = Signal()
        self._delay = 0.0  # of what runs, over all buckets
        self._shapes: list[Shape] = []
        self._delays: list[Delays] = []
        self._lateness: list[dict[str, Lateness]] = []  # of each bucket under each quantiser
        self._restored: dict[str, tuple[Delays, dict[str, Lateness]]] = {}
        self._allowed: list[NDArray[np.int64]] = []
        self._lossy: list[dict[str, NDArray[np.int64]]] = []  # rows of collectives that leave something out
        self._renewed = False  # whether there are other plans since the last step
        self._reason = "careful until gradients have been looked at"
        self._age = 0
        self._forget()
        self._due = False  # whether better plans have to be sought at the next step
        self._highest: float | None = None  # learning rate since training began anew
        self._factors: dict[str, float] = {}  # times the delay that a collective makes of that of its ratio
        self._in_a_row = 0  # steps of collectives that leave something out
        self._beside: deque[float] = deque(maxlen=_BESIDES)  # seconds of steps beside what exchanges add to them
        self._ready: NDArray[np.float64] | None = None  # of buckets, against the last one's
        self._before: tuple[int, float] | None = None

    def _forget(self) -> None:
        self._step = self._thought = self._sketched = 0  # since buckets are what they are: now, and when last done
        self._unseen = 0  # steps that were delivered and not looked at

    @property
    def cost(self) -> CostModel | None:
        """See `Policy.cost`."""
        return self._selector.cost

    @property
    def listens(self) -> bool:
        """See `Policy.listens`."""
        return self._selector.listens

    def survey(self, bucket: int) -> Survey | None:
        """See `Policy.survey`: sketches, and now and then spectra, of which the first are a bucket's first guess."""
        if not self._chooses:
            return None
        if self._step % _LOOKS == 0:
            return self._both
        due = self._step >= self._sketched + _SKETCHES and self._selector.awake
        return self._sketch if due or self._signal.share is None else None

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Generator[Asked, Any, None]:
        """See `Policy.start`."""
        known = zip(self._delays, self._lateness, strict=True)
        self._restored |= {shape.names[0]: own for shape, own in zip(self._shapes, known, strict=True)}
        self._shapes = list(shapes)
        self._codes.start(shapes)
        self._restore()
        self._forget()
        self._ready = self._before = None
        self._beside.clear()
        self._chooses = self._compresses and transport.group.size > 1
        if self._chooses:
            self._ladder = np.array(ladder(_LEAST, _MOST, _STEP))
            self._ratios = np.tile(self._ladder, len(self._wires))
            narrow = any(getattr(own, "wire", None) == "bf16" for own in self._wires)
            self._dense = [Dense(wire="bf16"), Dense()] if narrow else [Dense()]
        yield from self._begin(transport)

    def _begin(self, transport: Transport) -> Generator[Asked, Any, None]:
        """Set up all plans, from dense ones on. Collective, as rounds."""
        levels = [self._levels(transport.group, bucket) for bucket in range(len(self._shapes))]
        yield from self._selector.start(levels, self._shapes, transport)
        self._lossy = [table.lossy(self._ratios.size) for table in self._selector.tables]
        self._allowed = [self._dense_rows(bucket) for bucket in range(len(self._shapes))]
        self._renewed = False

    def refresh(self, transport: Transport) -> Generator[Asked, Any, None]:
        """See `Policy.refresh`. Better plans are sought now and then, and at once where the network has changed."""
        changed = yield from self._selector.refresh(transport)
        if self._renewed:
            yield from self._begin(transport)
            self._due = True
        if self._chooses and self._codes.due:
            self._due |= yield from self._ask_for_codes(transport)
        if changed or self._due or (self._selector.awake and self._step >= self._thought + _THINKS):
            self._due, self._thought = False, self._step
            self._think()

    def plan(self, bucket: int) -> Plan:
        """See `Policy.plan`."""
        reason = "learning a code that is predicted to pay" if self._codes.learns(bucket) else self._reason
        return self._selector.plan(bucket, self._allowed[bucket], reason)

    def deliver(self, step: int, delivered: Sequence[Delivered]) -> None:
        """See `Policy.deliver`."""
        if self.survey(0) is self._sketch:
            self._sketched = self._step
        self._age += 1
        self._step += 1
        self._unseen += 1
        self._codes.pass_step([bucket for bucket in range(len(delivered)) if self._learnt(bucket)])
        if not self._selector.awake:
            return
        steps, self._unseen = self._unseen, 0
        lossy = False
        for bucket, own in enumerate(delivered):
            table, row = self._selector.tables[bucket], self._selector.row(bucket)
            level = int(table.levels[row])
            if not 0 < own.gain <= 1:
                continue
            if level >= self._ratios.size:
                self._delays[bucket].observe(None, 1.0, own.energy, own.gain, steps)
                whole = self._lateness[bucket].get(table.schemes[row].compressor.id)
                if whole is not None and not self._codes.learns(bucket):
                    whole.observe(own.gain, steps)
                continue
            scheme = table.schemes[row]
            factor = self._factors.get(collective_of(scheme), _UNSEEN) if scheme.leaves_out else 1.0
            seen = self._delays[bucket].observe(float(self._ratios[level]), factor, own.energy, own.gain, steps)
            lossy |= scheme.leaves_out
            if scheme.leaves_out and seen is not None and self._in_a_row <= _TAUGHT:
                self._factors[collective_of(scheme)] = max(1.0, factor * (seen / factor) ** over(_LEARN, steps))
        self._in_a_row = self._in_a_row + steps if lossy else 0

    def learn(self, told: StepReport) -> None:
        """See `Policy.learn`."""
        self._selector.learn(told)
        if self._selector.measured:  # else seconds of steps have nothing to do with those of plans
            self._time(told)
        if told.lr is not None:
            if self._highest is not None and told.lr <= _DROP * self._highest:
                self._age, self._highest, self._due = 0, told.lr, True
            self._highest = max(told.lr, self._highest or told.lr)
        # A step that was undone tells too, so that its number says nothing; no spectrum is as wide as a sketch.
        if any(surveys.shape[1] == self._sketch.width(()) for surveys in told.surveys.values()):
            self._due |= self._signal.share is None
            self._signal.observe(told.surveys, self._delay)
            return
        for bucket, surveys in told.surveys.items():
            sizes = self._shapes[bucket].sizes
            spectra = Spectra(sizes, surveys[:, : self._spectrum.width(sizes)])
            shares = self._losses.shares(surveys[:, self._spectrum.width(sizes) :])
            for quantiser, share in zip(self._quantisers, shares, strict=True):
                self._lateness[bucket][quantiser.id].guess(share)
            self._due |= self._delays[bucket].ratio is None
            self._delays[bucket].guess(float(lost_share(self.compressor, spectra, [first_ratio()])[0]))

    def state_dict(self) -> dict[str, Any]:
        """See `Policy.state_dict`."""
        delays = {shape.names[0]: own.state() for shape, own in zip(self._shapes, self._delays, strict=True)}
        lateness = {
            shape.names[0]: {name: known.state() for name, known in own.items()}
            for shape, own in zip(self._shapes, self._lateness, strict=True)
        }
        known = {
            "factors": dict(self._factors),
            "delays": delays,
            "quantisers": lateness,
            "signal": self._signal.state(),
            "codes": self._codes.state(),
        }
        return {"age": self._age, "highest_lr": self._highest, **known}

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        """See `Policy.load_state_dict`."""
        self._age = int(state.get("age", 0))
        self._highest = state.get("highest_lr")
        self._factors = {str(name): float(own) for name, own in state.get("factors", {}).items()}
        self._due = True
        lateness = state.get("quantisers", {})
        self._restored = {
            str(name): (
                Delays.from_state(own),
                {str(kind): Lateness.from_state(known) for kind, known in lateness.get(name, {}).items()},
            )
            for name, own in state.get("delays", {}).items()
        }
        if "codes" in state:
            self._codes.give(state["codes"])
            self._renewed = any(self._codes.has(bucket) for bucket in range(len(self._shapes)))
        self._restore()
        self._signal.give(state.get("signal"))
        self._selector.give(cost)

    def _restore(self) -> None:
        """Begin with what is known of buckets that begin with the same parameter, or with nothing."""
        known = [self._restored.pop(shape.names[0], (Delays(), {})) for shape in self._shapes]
        self._delays = [delays for delays, _ in known]
        self._lateness = [
            {name: lateness.get(name, Lateness()) for name in self._whole(bucket)}
            for bucket, (_, lateness) in enumerate(known)
        ]

    def _whole(self, bucket: int) -> list[str]:
        """Name compressors without a ratio that delay gradients, in the order of levels."""
        return [own.id for own in self._quantisers] + [own.id for own in self._codes.forms(bucket)[1:]]

    def _learnt(self, bucket: int) -> bool:
        """Return whether the step that has just ended was one in which a bucket's code was learnt."""
        if not self._codes.learns(bucket):
            return False
        return self._selector.row(bucket) in self._learning_rows(bucket)

    def _learning_rows(self, bucket: int) -> NDArray[np.int64]:
        """Return the rows in which a bucket's code is learnt, if it has one."""
        return self._selector.tables[bucket].of(self._ratios.size + len(self._quantisers))

    def _fits(self, compressor: Compressor) -> bool:
        """Return whether the collective that was named carries a compressor; any does where none was."""
        if self._pinned is not None:
            try:
                bind(compressor, self._pinned)
            except IncompatiblePairError:
                return False
        return True

    def _levels(self, group: Group, bucket: int) -> list[tuple[Compressor, Sequence[str]]]:
        levels: list[tuple[Compressor, Sequence[str]]] = []
        for wire, ratio in itertools.product(self._wires, self._ladder.tolist()):
            own = at_ratio(wire, ratio)
            # A second wire is for fast networks, where what matters is the time that own work takes.
            whole = wire is not self._wires[0]
            levels.append((own, [self._pinned] if self._pinned else names_for(own, group, whole)))
        if self._chooses:
            for own in (*self._quantisers, *self._codes.forms(bucket)):
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
        ready, ends = told.times[:, :, 3].max(axis=0), told.times[:, :, 1].max(axis=0)
        last = float(ready[-1])
        apart = ready - last
        self._ready = apart if self._ready is None else self._ready + _SMOOTH * (apart - self._ready)
        if self._before is not None and told.step > self._before[0]:
            between = (last - self._before[1]) / (told.step - self._before[0])
            self._beside.append(between - (float(ends[-1]) - last))
        self._before = told.step, last

    def _think(self) -> None:
        """Search for better plans with the current state."""
        buckets = range(len(self._shapes))
        balance = self._balance()
        if balance is None:
            self._allowed, self._delay = [self._dense_rows(bucket) for bucket in buckets], 0.0
            return
        choice = self._best(balance)
        self._allowed = [
            np.flatnonzero(own <= own[row] * (1 + 1e-9)) for own, row in zip(balance.delays, choice, strict=True)
        ]
        delays = [float(own[row]) for own, row in zip(balance.delays, choice, strict=True)]
        for bucket in filter(self._codes.learns, buckets):
            self._allowed[bucket] = self._learning_rows(bucket)
            delays[bucket] = self._late_values(bucket, self._codes.code)
        self._delay = sum(own * weight for own, weight in zip(delays, balance.weights, strict=True))
        signal = f"{balance.signal:.2g} of the energy is signal"
        self._reason = f"delay {self._delay:.2g} of at most {balance.longest:.2g} steps, {signal}"

    def _balance(self) -> Balance | None:
        """Weigh all rows by the current state; None where too little is known."""
        longest = self._longest()
        inflow = sum(own.inflow for own in self._delays)
        if not self._chooses or longest <= 0 or inflow <= 0 or any(own.ratio is None for own in self._delays):
            return None
        buckets = range(len(self._shapes))
        return Balance(
            delays=[self._late(bucket) for bucket in buckets],
            seconds=[self._selector.seconds(bucket) for bucket in buckets],
            weights=[own.inflow / inflow for own in self._delays],
            ready=[0.0] * len(buckets) if self._ready is None else self._ready.tolist(),
            beside=max(0.0, statistics.median(self._beside or [0.0])),
            age=self._age,
            longest=longest,
            signal=self._signal.share or 1.0,
        )

    def _best(self, balance: Balance) -> list[int]:
        """Return the row of every bucket that is to run: others than those that run where it is worth it."""
        buckets = range(len(self._shapes))
        dense = [self._fastest_dense(bucket) for bucket in buckets]
        choice, now = balance.best(), [self._selector.row(bucket) for bucket in buckets]
        pays = (1 - _PAYS) * balance.worth(dense)
        if balance.worth(choice) > pays:
            choice = dense
        if balance.allows(now) and balance.worth(now) <= min(pays, (1 + _WORTH) * balance.worth(choice)):
            choice = now
        return choice

    def _ask_for_codes(self, transport: Transport) -> Generator[Asked, Any, bool]:
        """Take up a learned code where it pays; return whether one was. Collective, as rounds."""
        balance, cost = self._balance(), self._selector.cost
        if balance is None or cost is None or not self._selector.measured:
            return False
        worth = (1 - _PAYS) * balance.worth(self._best(balance))

        def names(code: Learner) -> list[str]:
            return self._names(code, transport.group)

        rivals = Rivals(balance, worth, self._late_values, names, cost)
        taken: bool = yield from self._codes.ask(rivals, transport)
        if taken:
            for lateness in self._lateness:
                lateness.setdefault(self._codes.code.id, Lateness())
            yield from self._begin(transport)
        return taken

    def _longest(self) -> float:
        """Return the longest delay allowed, in steps; 0 until the share of signal is known."""
        if self._signal.share is None:
            return 0.0
        return delay_for((1 - self.fidelity) * (self._age + _GRACE), self._signal.share)

    def _late(self, bucket: int) -> NDArray[np.float64]:
        """Return the delay of each of a bucket's rows; infinite where it is too far below the ratio that is known."""
        table, known = self._selector.tables[bucket], self._delays[bucket]
        delays = np.zeros(table.kept.size)
        delays[: self._ratios.size] = known.at(self._ratios)
        delays[: self._ratios.size][self._ratios < self._lowest(bucket)] = math.inf
        whole = [self._lateness[bucket][own.id].delay for own in self._quantisers]
        if self._codes.has(bucket):
            whole += [math.inf, self._late_code(bucket)]  # one that learns runs when it has to
        delays[self._ratios.size : self._ratios.size + len(whole)] = whole
        late: NDArray[np.float64] = delays[table.levels]
        for kind, own in self._lossy[bucket].items():
            late[own] *= self._factors.get(kind, _UNSEEN)
        return late

    def _lowest(self, bucket: int) -> float:
        """Return the lowest ratio whose delay is known well enough; where none ever runs, there is no better guess."""
        if not self._ratios.size:
            return 0.0
        known = self._delays[bucket]
        down = _DOWN if known.steady else 0
        return float(self._ladder[max(0, int(np.searchsorted(self._ladder, (known.ratio or 0) * (1 - 1e-6))) - down)])

    def _late_values(self, bucket: int, code: Learner) -> float:
        """Return the delay where the values that a code selects travel as they are; infinite where it is not known.

        Until the collective ran that delivers them it is taken to be as that of anything that leaves something out.
        """
        late = float(self._delays[bucket].at(np.array(code.ratio))) * self._factors.get(code.selects_as, _UNSEEN)
        return late if code.ratio >= self._lowest(bucket) else math.inf

    def _late_code(self, bucket: int) -> float:
        """Return the delay under a bucket's learned code; infinite before it was learnt."""
        if self._codes.learns(bucket):
            return math.inf
        known = self._lateness[bucket][self._codes.code.id]
        return known.delay if known.ran else late_under(self._late_values(bucket, self._codes.code))
