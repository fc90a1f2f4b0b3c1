"""What a trial of a policy begins from: parameters and the optimizer's state, copied and put back."""

import copy
import weakref
from typing import Any

import torch

Kept = tuple[list[tuple[torch.Tensor, torch.Tensor, dict[str, Any] | None]], list[tuple[torch.Tensor, torch.Tensor]]]
"""A parameter, a copy of it and one of its state, for each; and a buffer and a copy of it, for each."""


def trial_hooks(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None = None) -> dict[str, Any]:
    """Return ``checkpoint`` and ``restore`` of an optimizer, as `mpicomp.Reducer` takes them.

    `DistributedOptimizer` has those of its optimizer. Where a model has buffers, such as the averages of a batch norm,
    give it those of the model too: ``DistributedOptimizer(..., **trial_hooks(optimizer, model))``.

    Settings of groups, such as the learning rate, are left as they are: they follow their schedule.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Its parameters and their state are put back.
    model : torch.nn.Module, optional
        Its buffers are put back, too.
    """
    owner = weakref.ref(optimizer)  # which has the reducer that these are given to

    def checkpoint() -> Kept:
        own = owner()
        assert own is not None
        parameters = [parameter for group in own.param_groups for parameter in group["params"]]
        buffers = [] if model is None else [(one, one.detach().clone()) for one in model.buffers()]
        return [(one, one.detach().clone(), copy.deepcopy(own.state.get(one))) for one in parameters], buffers

    @torch.no_grad()
    def restore(kept: Kept) -> None:
        own = owner()
        assert own is not None
        parameters, buffers = kept
        for parameter, value, state in parameters:
            parameter.copy_(value)
            if state is not None:
                own.state[parameter] = copy.deepcopy(state)
            else:
                own.state.pop(parameter, None)
        for buffer, value in buffers:
            buffer.copy_(value)

    return {"checkpoint": checkpoint, "restore": restore}
