"""Ranks that run out of batches at different times."""

from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpicomp.rounds import Round, Rounds
from mpicomp.rounds.reports import from_one
from mpicomp.torch.broadcast import as_bytes
from mpicomp.torch.gradients import Gradients
from mpicomp.torch.replica_checks import settings_of

_BYTE = np.dtype(np.uint8)


class Join:
    """The context of ``with optimizer.join():``.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        From `mpicomp.torch.DistributedOptimizer`.
    gradients : Gradients
        Its.
    scaler : torch.amp.GradScaler or None
        Its.
    """

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
                self._go_along()
        finally:
            self._gradients.leave()

    def _go_along(self) -> None:
        """Make the steps of those that have batches left, until none has."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        before = [parameter.grad for parameter in parameters]
        try:
            while self._gradients.goes_on():
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


def follow(optimizer: Any, gradients: Gradients) -> Rounds[None]:
    """Have ranks without batches step as the first one that has some is about to. As rounds.

    Loops change settings, such as learning rates, and what was averaged, such as by clipping; ranks that are done with
    theirs take over both.
    """
    root = gradients.first_active
    leads = gradients.group.rank == root
    changed = gradients.changed() if leads else {}
    parts = {name: _parts(gradient) for name, gradient in changed.items()}
    shapes = {name: [list(part.shape) for part in own] for name, own in parts.items()}
    said = {"groups": settings_of(optimizer), "shapes": shapes}
    told = yield from from_one(said, gradients.group, "join", root)
    if gradients.idle:
        for group, settings in zip(optimizer.param_groups, told["groups"], strict=True):
            _put(group, settings)
    for name, own in told["shapes"].items():
        parameter = gradients.parameter(name)
        dtypes = [torch.int64, parameter.dtype] if len(own) == 2 else [parameter.dtype]
        empty = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(own, dtypes, strict=False)]
        arrived = parts[name] if leads else empty
        for part in arrived:
            if part.numel():
                yield from _from_root(root, leads, as_bytes(part))
        if gradients.idle:
            parameter.grad = _whole(arrived, parameter)


def _from_root(root: int, leads: bool, own: NDArray[np.uint8]) -> Rounds[None]:
    """Make these bytes those of one rank."""
    recv = np.empty_like(own) if leads else own
    yield Round("bcast", (own.size,), _BYTE, root=root, send=own if leads else None, recv=recv)


def _parts(gradient: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the tensors of a gradient: none, itself, or the indices and values of a sparse one."""
    if gradient is None:
        return []
    if not gradient.is_sparse:
        return [gradient.detach().cpu().contiguous()]
    whole = gradient.detach().coalesce()
    return [whole.indices().cpu().contiguous(), whole.values().cpu().contiguous()]


def _whole(parts: list[torch.Tensor], parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that consists of these parts."""
    if not parts:
        return None
    moved = [part.to(parameter.device) for part in parts]
    if len(moved) == 1:
        return moved[0]
    return torch.sparse_coo_tensor(moved[0], moved[1], parameter.shape, is_coalesced=True, check_invariants=True)


def _put(group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Replace a group's settings by these, and keep the types of its values."""
    for key, value in settings.items():
        own = group.get(key)
        if isinstance(own, list | tuple):
            group[key] = type(own)(_like(old, new) for old, new in zip(own, value, strict=True))
        else:
            group[key] = _like(own, value)


def _like(own: Any, value: Any) -> Any:
    """Return a setting as the kind that another one is; a tensor stays the same one."""
    if isinstance(own, torch.Tensor):
        with torch.no_grad():
            return own.copy_(torch.tensor(value, dtype=own.dtype))
    return value
