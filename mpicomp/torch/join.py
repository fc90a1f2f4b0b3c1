"""Ranks that run out of batches at different times."""

from types import TracebackType
from typing import Any

import torch

from mpicomp.rounds import Rounds
from mpicomp.rounds.reports import from_one
from mpicomp.torch.arguments import members_of
from mpicomp.torch.broadcast import from_root
from mpicomp.torch.gradients import Gradients
from mpicomp.torch.replica_checks import settings_of
from mpicomp.torch.sparse_tensors import gradient_of_parts, gradient_parts


class Join:
    """The context of ``with optimizer.join():``."""

    def __init__(self, optimizer: Any, gradients: Gradients, scaler: torch.amp.GradScaler | None) -> None:
        self._optimizer = optimizer
        self._gradients = gradients
        self._scaler = scaler

    def __enter__(self) -> None:
        self._gradients.join()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:  # an error must not wait for other ranks
                self._run_empty_steps()
        finally:
            self._gradients.leave_join()

    def _run_empty_steps(self) -> None:
        """Take part in the steps of ranks that have batches left, until none has."""
        parameters = list(members_of(self._optimizer))
        before = [parameter.grad for parameter in parameters]
        try:
            while self._gradients.step_without_batch():
                for parameter in parameters:
                    parameter.grad = None
                if self._scaler is None:
                    self._optimizer.step()
                else:
                    self._scaler.scale(torch.zeros((), device=parameters[0].device))  # it may never have had a loss
                    self._scaler.step(self._optimizer)
                    self._scaler.update()
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient


def copy_active_step(optimizer: Any, gradients: Gradients) -> Rounds[None]:
    """Have ranks without batches step as the first one that has some is about to.

    Loops change settings, such as learning rates, and means, such as by clipping; both are copied to idle ranks.
    """
    root = gradients.first_active
    is_root = gradients.group.rank == root
    changed = gradients.changed_gradients() if is_root else {}
    parts = {name: gradient_parts(gradient) for name, gradient in changed.items()}
    shapes = {name: [list(part.shape) for part in tensors] for name, tensors in parts.items()}
    content = {"groups": settings_of(optimizer), "shapes": shapes}
    received = yield from from_one(content, gradients.group, "join", root)
    if gradients.idle:
        for group, settings in zip(optimizer.param_groups, received["groups"], strict=True):
            _set_settings(group, settings)
    for name, part_shapes in received["shapes"].items():
        parameter = gradients.parameter(name)
        dtypes = [torch.int64, parameter.dtype] if len(part_shapes) == 2 else [parameter.dtype]
        empty = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(part_shapes, dtypes, strict=False)]
        tensors = parts[name] if is_root else empty
        for tensor in tensors:
            yield from from_root(tensor, root, gradients.group)
        if gradients.idle:
            parameter.grad = gradient_of_parts(tensors, parameter)


def _set_settings(group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Replace a group's settings, and keep the types of its values."""
    for key, value in settings.items():
        present = group.get(key)
        if isinstance(present, list | tuple):
            group[key] = type(present)(_like(old, new) for old, new in zip(present, value, strict=True))
        else:
            group[key] = _like(present, value)


def _like(present: Any, value: Any) -> Any:
    """Return a setting as the kind that the present one is; a tensor stays the same one."""
    if isinstance(present, torch.Tensor):
        with torch.no_grad():
            return present.copy_(torch.tensor(value, dtype=present.dtype))
    return value
