"""Ranks that run out of batches at different times."""

from typing import Any

import torch

from mpicomp.rounds import Rounds
from mpicomp.rounds.reports import from_one
from mpicomp.torch.arguments import members_of
from mpicomp.torch.broadcast import from_root
from mpicomp.torch.gradients import Gradients
from mpicomp.torch.replica_checks import settings_of


def run_empty_steps(optimizer: Any, gradients: Gradients, scaler: torch.amp.GradScaler | None) -> None:
    """Take part in the steps of ranks that have batches left, until none has."""
    parameters = list(members_of(optimizer))
    before = [parameter.grad for parameter in parameters]
    try:
        while gradients.step_without_batch():
            for parameter in parameters:
                parameter.grad = None
            if scaler is None:
                optimizer.step()
            else:
                scaler.scale(torch.zeros((), device=parameters[0].device))  # it may never have had a loss
                scaler.step(optimizer)
                scaler.update()
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def copy_active_step(optimizer: Any, gradients: Gradients) -> Rounds[None]:
    """Copy the first active rank's settings and changed means to idle ranks, such as learning rates and clipping."""
    root = gradients.first_active
    is_root = gradients.group.rank == root
    changed = gradients.changed_gradients() if is_root else {}
    content = {
        "groups": settings_of(optimizer),
        "changed": {name: gradient is not None for name, gradient in changed.items()},
    }
    received = yield from from_one(content, gradients.group, "join", root)
    if gradients.idle:
        for group, settings in zip(optimizer.param_groups, received["groups"], strict=True):
            _set_settings(group, settings)
    for name, has_gradient in received["changed"].items():
        parameter = gradients.parameter(name)
        gradient = None
        if has_gradient:
            gradient = changed[name] if is_root else torch.empty_like(parameter)
            assert gradient is not None
            yield from from_root(gradient, root, gradients.group)
        if gradients.idle:
            parameter.grad = gradient


def _set_settings(group: dict[str, Any], settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        present = group.get(key)
        if isinstance(present, list | tuple):
            group[key] = type(present)(_like(old, new) for old, new in zip(present, value, strict=True))
        else:
            group[key] = _like(present, value)


def _like(present: Any, value: Any) -> Any:
    """Return a value as a setting; one in a tensor is written to that tensor."""
    if isinstance(present, torch.Tensor):
        with torch.no_grad():
            return present.copy_(torch.tensor(value, dtype=present.dtype))
    return value
