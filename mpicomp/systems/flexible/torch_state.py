"""The driver of trials for PyTorch: it copies parameters, an optimizer's state and a model's buffers."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from mpicomp.errors import ConfigurationError
from mpicomp.systems.flexible.trials import TrialDriver


def drive_trials(optimizer: Any, model: torch.nn.Module | None = None) -> TrialDriver:
    """Return the driver of a `DistributedOptimizer`; call its ``after_step()`` after each ``optimizer.step()``.

    ``optimizer.join()`` is refused from then on: a trial that goes on after it would undo steps of its last batches.

    Parameters
    ----------
    optimizer, model
        See `copies_of`.
    """
    driver = TrialDriver(optimizer.reducer, *copies_of(optimizer, model))

    def join() -> Any:
        if optimizer.reducer is driver.reducer:
            raise ConfigurationError(
                f"join: trials of policy '{driver.reducer.policy.id}' would undo steps of the last batches; leave "
                "join() out, or take another policy"
            )
        return type(optimizer).join(optimizer)  # it was wrapped again

    optimizer.join = join
    return driver


def copies_of(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module | None = None
) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return ``checkpoint`` and ``restore`` of an optimizer, as `TrialDriver` takes them.

    Settings of groups, such as the learning rate, are left as they are: they follow their schedule.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Its parameters and their state are copied.
    model : torch.nn.Module, optional
        Its buffers, such as the averages of a batch norm, are copied too.
    """

    def checkpoint() -> Any:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        buffers = [] if model is None else list(model.buffers())
        tensors = [(tensor, tensor.detach().clone()) for tensor in [*parameters, *buffers]]
        states = [(parameter, copy.deepcopy(optimizer.state.get(parameter))) for parameter in parameters]
        return tensors, states

    @torch.no_grad()
    def restore(kept: Any) -> None:
        tensors, states = kept
        for tensor, values in tensors:
            tensor.copy_(values)
        for parameter, state in states:
            if state is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter] = copy.deepcopy(state)

    return checkpoint, restore
