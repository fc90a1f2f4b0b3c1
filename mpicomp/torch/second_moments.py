"""Second moments of the ranks' optimizers, averaged now and then and held in between."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mpicomp.reducer import Reducer
from mpicomp.rounds import Rounds
from mpicomp.torch.arguments import as_real
from mpicomp.torch.states import to_arrays

_BURST = 4  # a rank's moment counts where it is more than so many times the average; of text-gpt
DECAYS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "exp_avg_sq": lambda group: group["betas"][1],
    "square_avg": lambda group: group["alpha"],
}
"""Names under which optimizers keep second moments, and how these decay, by the settings of a group."""


class SharedMoments:
    """Second moments of some parameters, which ranks average now and then; by the averages they divide in between.

    Local moments, of what a rank alone has seen, continue in parallel and enter the next average: an average counts for
    all that has come before it, at the moment's decay. At step ``t`` a moment that began at zero stands at
    ``1 - decay**t`` of the mean square; means are of mean squares.

    ``reducer`` averages them without error feedback, ``key`` is their name in the optimizer's state, and ``sync_every``
    the most steps from one average to the next; early in training it is half of the steps made so far.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, reducer: Reducer, key: str, sync_every: int) -> None:
        self._optimizer, self._reducer, self._key, self._sync_every = optimizer, reducer, key, sync_every
        self._steps, self._next = 0, 1
        self._held: dict[str, torch.Tensor] = {}  # averages of mean squares, the same on all ranks
        self._ahead: dict[str, torch.Tensor] = {}  # local moments, less what stands in the optimizer's state
        self._squares: dict[str, torch.Tensor] = {}  # of this rank, in the current exchange
        self._means: dict[str, torch.Tensor] = {}  # received, and in force once the step is applied

    @property
    def progress(self) -> list[int]:
        """Steps that were made, and those at which the next average is due; the same on all ranks."""
        return [self._steps, self._next]

    @torch.no_grad()
    def after_step(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Update local moments after a step of the optimizer, with gradients as it saw them."""
        self._steps += 1
        for name, state, decay in self._states(parameters):
            if parameters[name].grad is None or name not in self._held:
                continue
            moment, ahead = as_real(state[self._key]), self._ahead.get(name)
            # The step has made b v + (1 - b) g^2 of the state's moment; so the difference to it fades by b.
            local = self._local(name, state) if ahead is None else torch.add(moment, ahead, alpha=decay, out=ahead)
            self._hold(name, state, decay, local)

    def prepare(self, parameters: Mapping[str, torch.Tensor], idle: bool) -> None:
        """Copy what is to be averaged in the exchange that begins, if it is time to.

        Names are the same on all ranks. Missing moments count as zeros, and all of an idle rank do.
        """
        self._squares, self._means = {}, {}
        if self._steps >= self._next:
            self._squares = {name: torch.zeros_like(_wide(p.detach())) for name, p in parameters.items()}
            for name, state, decay in () if idle else self._states(parameters):
                self._squares[name] += self._local(name, state).div_(_reached(state, decay))

    def average(self, scale: float) -> Rounds[bool]:
        """Average what was prepared, times a scale; return whether it is finite."""
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
        """Divide by the averages that were received, now that their exchange is applied."""
        if not self._means:
            return
        self._held, self._means, self._squares = self._means, {}, {}
        self._next = self._steps + min(self._sync_every, max(1, self._steps // 2))
        for name, state, decay in self._states(parameters):
            self._hold(name, state, decay, self._local(name, state))

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and this rank's local moments."""
        return {
            "steps": self._steps,
            "next": self._next,
            "held": {name: average.clone() for name, average in self._held.items()},
            "ahead": {name: ahead.clone() for name, ahead in self._ahead.items()},
            "reducer": self._reducer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None, parameters: Mapping[str, torch.Tensor]) -> None:
        """Load what `state_dict` returned; with None the next exchange averages. Not collective."""
        self._squares, self._means = {}, {}
        if state is None:
            self._next, self._held, self._ahead = self._steps, {}, {}
            return
        self._steps, self._next = int(state["steps"]), int(state["next"])
        self._held, self._ahead = (
            {name: values.to(parameters[name].device, copy=True) for name, values in state[key].items()}
            for key in ("held", "ahead")
        )
        self._reducer.load_state_dict(to_arrays(state["reducer"]))

    def close(self) -> None:
        """Release the reducer's resources."""
        self._reducer.close()

    def _states(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, Any], float]]:
        """Yield the name, the optimizer's state and the decay of each parameter that was in a step already."""
        names = {id(parameter): name for name, parameter in parameters.items()}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter)
                if state and id(parameter) in names:
                    yield names[id(parameter)], state, DECAYS[self._key](group)

    def _local(self, name: str, state: Mapping[str, Any]) -> torch.Tensor:
        """Return the moment of what this rank alone has seen, in a new array."""
        moment = _wide(state[self._key].detach())
        return (moment + self._ahead[name]).clamp_(min=0) if name in self._ahead else moment.clone()

    def _hold(self, name: str, state: Mapping[str, Any], decay: float, local: torch.Tensor) -> None:
        """Have the next step divide by the average, or by a part of this rank's local moment where that is more.

        Without that a gradient that was hardly ever seen before would be divided by next to nothing. Five sweeps of
        memory a step, with `after_step`.
        """
        moment = as_real(state[self._key])
        torch.mul(self._held[name], _reached(state, decay), out=moment)
        torch.maximum(moment, local / _BURST, out=moment)
        self._ahead[name] = local.sub_(moment)


def _reached(state: Mapping[str, Any], decay: float) -> torch.Tensor:
    """Return the share of the mean square that a moment from zero has reached; nothing leaves its device."""
    return 1 - decay ** torch.as_tensor(state["step"], dtype=torch.float64)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in reals of at least 32 bits."""
    tensor = as_real(tensor)
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
