"""Learned codes in the joint choice: taken up where they are predicted to pay for all that they cost."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, cast

import numpy as np

from mpicomp.collectives import bind
from mpicomp.compressors import Learner, get_compressor
from mpicomp.cost import CostModel, measure_kernels, sample_views
from mpicomp.places import HOST
from mpicomp.policies.policy import Shape, model_of
from mpicomp.policies.tradeoff import Balance
from mpicomp.rounds import Group, Rounds, gather_rows
from mpicomp.transport.base import Transport

_LATER = 3.5  # times the delay of the values themselves, under either code: 2.6 to 4.3 on digits
_LEARN = 0.15  # share of a step in the running average of how late a code is
_FIRST = 2  # times the steps in which a code learns, before it is first considered
_AGAIN = 2  # times the steps done so far, before it is considered again


@dataclass(frozen=True)
class Rivals:
    """The other plans that a learned code has to beat, and the measures by which it is judged.

    Attributes
    ----------
    balance : Balance
        All other plans.
    worth : float
        Value that a plan with a code has to be below; see `Balance.worth`.
    behind : callable
        Returns, for a bucket and a code, the share of its steps by which training falls behind with it.
    names : callable
        Returns the collectives that may carry a code.
    cost : CostModel
        The cost model of this network.
    """

    balance: Balance
    worth: float
    behind: Callable[[int, Learner], float]
    names: Callable[[Learner], Sequence[str]]
    cost: CostModel


class Codes:
    """The learned code of a run, if there is one: its buckets, and the number of steps that it has been learnt for.

    A code saves nothing until it was learnt and given to all ranks, and how long a training will still go on nobody
    says. It is taken to go on for as many steps as it has gone on so far: over these a code has to pay for the steps in
    which it is learnt, for the broadcast and for its own work. It is asked for when twice as many steps were done as it
    takes to learn one, and again whenever they have doubled; one at most is taken up. When it was learnt it is one of
    the plans, no more: how late it makes gradients is seen then, and what is worse than others is not run.

    Parameters
    ----------
    templates : sequence of Learner
        Which may be taken up, without dense steps, since gradients have been looked at by then; possibly none.
    """

    def __init__(self, templates: Sequence[Learner]) -> None:
        self._templates = list(templates)
        self._agreed = False  # whether those are left that every rank can learn
        self._on_device = False  # whether own work is that of a device: as rank 0 says
        self._code: Learner | None = None
        self._learnt: dict[str, int] = {}  # steps, by the first parameter of each bucket that has it
        self._late: dict[str, float] = {}  # steps, by the first parameter of each bucket whose code ran
        self._steps = 0
        self._ask = _FIRST * max((own.training_steps for own in templates), default=0)
        self._shapes: list[Shape] = []

    @property
    def due(self) -> bool:
        """Whether it is time to ask for a code."""
        return bool(self._templates) and self._code is None and self._steps >= self._ask

    @property
    def taken(self) -> bool:
        """Whether a code was taken up."""
        return self._code is not None

    @property
    def code(self) -> Learner:
        """The code that was taken up; only where one was."""
        assert self._code is not None
        return self._code

    def start(self, shapes: Sequence[Shape]) -> None:
        """Take up new buckets: others than before have to learn anew, if they are to."""
        if self._shapes and list(shapes) != self._shapes:
            self._code, self._learnt, self._late = None, {}, {}
        self._shapes = list(shapes)

    def has(self, bucket: int) -> bool:
        """Return whether a bucket has a code, learnt or not."""
        return self._shapes[bucket].names[0] in self._learnt

    def learns(self, bucket: int) -> bool:
        """Return whether a bucket's code is being learnt."""
        if not self.has(bucket):
            return False
        assert self._code is not None
        return self._learnt[self._shapes[bucket].names[0]] < self._code.training_steps

    def forms(self, bucket: int) -> list[Learner]:
        """Return the compressors of a bucket that has a code: one that learns, and one whose code is learnt."""
        if not self.has(bucket):
            return []
        assert self._code is not None
        return [self._placed(own, self._shapes[bucket]) for own in (self._code.learning, self._code)]

    def pass_step(self, learning: Sequence[int] = ()) -> None:
        """Count a step that was delivered, in which the codes of some buckets were learnt."""
        self._steps += 1
        for bucket in learning:
            self._learnt[self._shapes[bucket].names[0]] += 1

    def observe(self, bucket: int, gain: float) -> None:
        """Learn how long energy waits under a bucket's code, from the gain of a step in which it ran."""
        if 0 < gain <= 1:
            name, seen = self._shapes[bucket].names[0], (1 - gain) / gain
            known = self._late.get(name, seen)
            self._late[name] = known + _LEARN * (seen - known)

    def late(self, bucket: int) -> float:
        """Return the steps that energy waits under a bucket's code; 0 before it ran."""
        return self._late.get(self._shapes[bucket].names[0], 0.0)

    def ask(self, rivals: Rivals, transport: Transport) -> Rounds[bool]:
        """Take up the code that is predicted to pay most, if one does; return whether it was. Collective, as rounds.

        Own work is measured only where a code would pay if it took none.
        """
        if not self._agreed:
            yield from self._agree(transport)
        group = transport.group
        best = self._best(rivals, group)
        if best is not None:
            forms = [form for code in self._templates for form in (code.learning, code)]
            schemes = [bind(form, name) for form in forms for name in rivals.names(form)]
            place = next((shape.place for shape in self._shapes if shape.place is not HOST), HOST)
            yield from measure_kernels(rivals.cost, schemes, True, transport, True, place, self._on_device)
            best = self._best(rivals, group)
        self._ask = _AGAIN * self._steps
        if best is not None:
            self._code, buckets = best
            self._learnt = {self._shapes[bucket].names[0]: 0 for bucket in buckets}
        return best is not None

    def state(self) -> dict[str, Any]:
        """Return the state that has to survive a restart, JSON-able. What was learnt is in the memory of buckets."""
        config = None if self._code is None else self._code.get_config()
        return {
            "steps": self._steps,
            "ask": self._ask,
            "code": config,
            "learnt": dict(self._learnt),
            "late": dict(self._late),
        }

    def give(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned."""
        self._steps, self._ask = int(state["steps"]), int(state["ask"])
        code = None if state["code"] is None else get_compressor(state["code"])
        assert code is None or code.learns
        self._code = cast("Learner | None", code)
        self._learnt = {str(name): int(steps) for name, steps in state["learnt"].items()}
        self._late = {str(name): float(steps) for name, steps in state.get("late", {}).items()}

    def _agree(self, transport: Transport) -> Rounds[None]:
        """Leave out codes that need packages, where some rank lacks one. Collective: a round of two bytes."""
        there = all(find_spec(name) is not None for code in self._templates for name in code.needs)
        own = np.array([there, any(shape.place is not HOST for shape in self._shapes)], np.uint8)
        everyones = yield from gather_rows(own, transport.group)
        if not everyones[:, 0].all():
            self._templates = [own for own in self._templates if not own.needs]
        self._on_device = bool(everyones[0, 1])
        self._agreed = True

    def _best(self, rivals: Rivals, group: Group) -> tuple[Learner, list[int]] | None:
        """Return the best code and the buckets that it pays for; None where none is good enough."""
        best, worth, balance = None, rivals.worth, rivals.balance
        buckets = range(len(self._shapes))
        for code in self._templates:
            behind = [rivals.behind(bucket, code) for bucket in buckets]
            seconds = [
                self._seconds(code, bucket, rivals.names, rivals.cost, group) if behind[bucket] < 1 else math.inf
                for bucket in buckets
            ]
            with_it = replace(
                balance,
                behind=[np.append(*own) for own in zip(balance.behind, behind, strict=True)],
                seconds=[np.append(*own) for own in zip(balance.seconds, seconds, strict=True)],
            )
            choice = with_it.best()
            own = [bucket for bucket in buckets if choice[bucket] == balance.behind[bucket].size]
            if own and with_it.worth(choice) < worth:
                best, worth = (code, own), with_it.worth(choice)
        return best

    def _seconds(
        self, code: Learner, bucket: int, names: Callable[[Learner], Sequence[str]], cost: CostModel, group: Group
    ) -> float:
        """Return the mean seconds of a code over as many steps as were done; infinite for a bucket with too few values.

        In the first of these steps it is learnt and in one it is given to all ranks. Own work that was not measured
        takes none.
        """
        shape, taught = self._shapes[bucket], code.training_steps
        placed = self._placed(code, shape)
        if not placed.has_enough(shape.numel):
            return math.inf
        views = sample_views(group)
        seconds = math.inf
        for name in names(code):
            scheme, learning = bind(placed, name), bind(placed.learning, name)

            def rounds_s(step: int, scheme: Any = scheme) -> float:
                of_ranks = [scheme.rounds(shape.numel, shape.dtype, view, step) for view in views]
                return cost.network.seconds(cost.network.coefficients(of_ranks, views))

            learning_s = rounds_s(0) + cost.kernel_seconds(learning, shape.numel, self._on_device)
            giving_s = rounds_s(taught) - rounds_s(taught + 1)
            coded_s = rounds_s(taught + 1) + cost.kernel_seconds(scheme, shape.numel, self._on_device)
            mean_s = (taught * learning_s + giving_s + (self._steps - taught) * coded_s) / self._steps
            seconds = min(seconds, mean_s)
        return seconds

    def _placed(self, code: Learner, shape: Shape) -> Learner:
        placed = code.bind(shape.names, shape.sizes, shape.shapes, model=model_of(self._shapes))
        return cast(Learner, placed)


def as_late_as(ratio: float) -> float:
    """Return the ratio at which values by themselves arrive as late as those at a ratio do in a learned code."""
    return ratio / _LATER
