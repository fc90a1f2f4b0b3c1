"""Second moments of the ranks' optimizers, averaged now and then and kept in between."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mpicomp.reducer import Reducer
from mpicomp.rounds import Rounds
from mpicomp.torch.arguments import as_real, members_of
from mpicomp.torch.shards import local_of, whole_of
from mpicomp.torch.states import to_arrays

_BURST = 4  # a rank's moment counts where it is more than so many times the average; of text-gpt
# Names of second moments in an optimizer's state, and their decays by the settings of a group.
DECAYS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "exp_avg_sq": lambda group: group["betas"][1],
    "square_avg": lambda group: group["alpha"],
}


class SharedMoments:
    """Second moments, called ``key`` in the optimizer's state, that ``reducer`` averages without error feedback.

    Ranks divide by the average until the next one, at most ``sync_every`` steps later; early in training after half of
    the steps made so far. Local moments, of a rank's gradients alone, continue in parallel and enter the next average.
    At step ``t`` a moment that began at zero is ``1 - decay**t`` of the mean square; means are of mean squares.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, reducer: Reducer, key: str, sync_every: int) -> None:
        self._optimizer, self._reducer, self._key, self._sync_every = optimizer, reducer, key, sync_every
        self._steps, self._next = 0, 1
        self._averages: dict[str, torch.Tensor] = {}  # of mean squares, the same on all ranks
        self._local_excess: dict[str, torch.Tensor] = {}  # local moments, less the moments in the optimizer's state
        self._squares: dict[str, torch.Tensor] = {}  # of this rank, in the current exchange
        self._means: dict[str, torch.Tensor] = {}  # received, and used once the step is applied

    @property
    def progress(self) -> list[int]:
        """Number of steps so far, and at the next average; the same on all ranks."""
        return [self._steps, self._next]

    @torch.no_grad()
    def after_step(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Update local moments after a step of the optimizer."""
        self._steps += 1
        for name, state, decay in self._states(parameters):
            if parameters[name].grad is None or name not in self._averages:
                continue
            moment, excess = as_real(local_of(state[self._key])), self._local_excess.get(name)
            # The step has made b v + (1 - b) g^2 of the state's moment, so the difference to it decays by b.
            local = self._local(name, state) if excess is None else torch.add(moment, excess, alpha=decay, out=excess)
            self._set_moment(name, state, decay, local)

    def prepare(self, parameters: Mapping[str, torch.Tensor], idle: bool) -> None:
        """Copy moments for the exchange that begins, if an average is due; missing and idle ones are zeros."""
        self._squares, self._means = {}, {}
        if self._steps >= self._next:
            ids = {id(parameter) for parameter in members_of(self._optimizer)}
            self._squares = {
                n: torch.zeros_like(_wide(p.detach())) for n, p in parameters.items() if id(whole_of(p)) in ids
            }
            for name, state, decay in () if idle else self._states(parameters):
                self._squares[name] += self._local(name, state).div_(_reached(state, decay))

    def average(self, scale: float) -> Rounds[bool]:
        """Average the copied moments, times a scale; return whether they are finite."""
        if not self._squares:
            return True
        means = yield from self._reducer.rounds(self._squares, scale=scale)
        record = self._reducer.last_step
        if record is not None and record.skipped:
            return False
        self._means = {name: mean.clone() for name, mean in means.items()}
        return True

    @torch.no_grad()
    def apply(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Divide by the received averages from now on."""
        if not self._means:
            return
        self._averages, self._means, self._squares = self._means, {}, {}
        self._next = self._steps + min(self._sync_every, max(1, self._steps // 2))
        for name, state, decay in self._states(parameters):
            self._set_moment(name, state, decay, self._local(name, state))

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "next": self._next,
            "averages": {name: average.clone() for name, average in self._averages.items()},
            "local_excess": {name: excess.clone() for name, excess in self._local_excess.items()},
            "reducer": self._reducer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None, parameters: Mapping[str, torch.Tensor]) -> None:
        """Load a state; with None the next exchange averages. Not collective."""
        self._squares, self._means = {}, {}
        if state is None:
            self._next, self._averages, self._local_excess = self._steps, {}, {}
            return
        self._steps, self._next = int(state["steps"]), int(state["next"])
        self._averages, self._local_excess = (
            {name: values.to(parameters[name].device, copy=True) for name, values in state[key].items()}
            for key in ("averages", "local_excess")
        )
        self._reducer.load_state_dict(to_arrays(state["reducer"]))

    def close(self) -> None:
        self._reducer.close()

    def _states(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, Any], float]]:
        """Yield name, optimizer's state and decay of each parameter that was stepped."""
        names = {id(whole_of(parameter)): name for name, parameter in parameters.items()}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter)
                if state and id(parameter) in names:
                    yield names[id(parameter)], state, DECAYS[self._key](group)

    def _local(self, name: str, state: Mapping[str, Any]) -> torch.Tensor:
        """Return the moment of this rank's gradients alone, in a new array."""
        moment = _wide(local_of(state[self._key]).detach())
        if name not in self._local_excess:
            return moment.clone()
        return (moment + self._local_excess[name]).clamp_(min=0)

    def _set_moment(self, name: str, state: Mapping[str, Any], decay: float, local: torch.Tensor) -> None:
        """Make the next step divide by the average, or, for rare gradients, by a part of the local moment."""
        moment = as_real(local_of(state[self._key]))
        torch.mul(self._averages[name], _reached(state, decay), out=moment)
        torch.maximum(moment, local / _BURST, out=moment)
        self._local_excess[name] = local.sub_(moment)


def _reached(state: Mapping[str, Any], decay: float) -> torch.Tensor:
    """Return the share of the mean square that a moment from zero has reached, on the device of its step."""
    return 1 - decay ** torch.as_tensor(state["step"], dtype=torch.float64)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in reals of at least 32 bits."""
    tensor = as_real(tensor)
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
