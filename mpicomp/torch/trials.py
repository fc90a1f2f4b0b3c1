"""What a trial of a policy begins from: parameters and the optimizer's state, copied and put back."""

import copy
import weakref
from typing import Any

import torch

Kept = list[tuple[torch.Tensor, torch.Tensor, dict[str, Any] | None]]
"""A parameter, a copy of it and one of its state, for each."""


def trial_hooks(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return ``checkpoint`` and ``restore`` of an optimizer, as `mpicomp.Reducer` takes them.

    Settings of its groups, such as the learning rate, are left as they are: they follow their schedule.
    """
    owner = weakref.ref(optimizer)  # which has the reducer that these are given to

    def checkpoint() -> Kept:
        own = owner()
        assert own is not None
        parameters = [parameter for group in own.param_groups for parameter in group["params"]]
        return [(one, one.detach().clone(), copy.deepcopy(own.state.get(one))) for one in parameters]

    @torch.no_grad()
    def restore(kept: Kept) -> None:
        own = owner()
        assert own is not None
        for parameter, value, state in kept:
            parameter.copy_(value)
            if state is not None:
                own.state[parameter] = copy.deepcopy(state)
            else:
                own.state.pop(parameter, None)

    return {"checkpoint": checkpoint, "restore": restore}
