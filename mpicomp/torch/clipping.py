"""Clipping by the norm of the whole model, the same on all ranks."""

import math
from typing import Any

import numpy as np
import torch

from mpicomp.errors import ConfigurationError
from mpicomp.mpi.rounds import Group, Round, Rounds
from mpicomp.torch.parameters import members_of
from mpicomp.torch.shards import ShardGroup, exchanged, local_of

_WHO = "clip_grad_norm_"
_NORM_EPSILON = 1e-6  # that is added to the norm, as by torch


def clip_grad_norm_(optimizer: Any, max_norm: float, norm_type: float = 2.0) -> float:
    """Average gradients, scale them so that the norm of all is at most ``max_norm``, and return their norm before.

    Collective. The norm is of the mean gradients, of all shards where the model is sharded: their sums are added once
    inside each replica, and one number crosses between replicas, so that all ranks scale by the same bits. Call it
    between ``backward()`` and ``step()``, before the step only.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        One of `mpicomp.torch.DistributedOptimizer`. With a GradScaler call ``scaler.unscale_(optimizer)`` first. For an
        `UpdateOptimizer`, whose ranks step on their gradients, `torch.nn.utils.clip_grad_norm_` does it.
    max_norm : float
        The norm that gradients have afterwards where they had more.
    norm_type : float
        The order of the norm, at least 1; ``math.inf`` is the largest magnitude.

    Returns
    -------
    float
        The norm, in float64; NaN or infinite where gradients are, which are then not scaled.

    Raises
    ------
    ConfigurationError
        For another optimizer, or a norm that is none.

    Examples
    --------
    >>> import torch
    >>> from mpicomp.torch import DistributedOptimizer
    >>> from mpicomp.mpi import LocalWorld
    >>> model = torch.nn.Linear(3, 1, bias=False)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = DistributedOptimizer(sgd, model, comm=LocalWorld(1).transports[0])
    >>> model(torch.tensor([[2.0, 3.0, 6.0]])).sum().backward()
    >>> clip_grad_norm_(optimizer, 1.0)
    7.0
    >>> round(float(model.weight.grad.norm()), 3)
    1.0
    """
    gradients: Any = getattr(getattr(optimizer, "_mpicomp", None), "gradients", None)
    if gradients is None:
        raise ConfigurationError(
            f"{_WHO}: an optimizer of DistributedOptimizer is needed, got {type(optimizer).__name__}; where each rank "
            "steps on its gradients, use torch.nn.utils.clip_grad_norm_"
        )
    if not (max_norm > 0 and norm_type >= 1):
        raise ConfigurationError(
            f"{_WHO}: max_norm must be above 0 and norm_type at least 1, got {max_norm!r} and {norm_type!r}"
        )
    if not gradients.averaged:
        optimizer.synchronize()
    held = [local_of(parameter.grad) for parameter in members_of(optimizer) if parameter.grad is not None]
    shards = ShardGroup(exchanged(parameter) for parameter in members_of(optimizer))
    norm: float = gradients.reducer.transport.run(_norm(held, norm_type, shards, gradients.group))
    if math.isfinite(norm):
        for gradient in held:
            gradient.mul_(min(1.0, max_norm / (norm + _NORM_EPSILON)))
    return norm


def _norm(gradients: list[torch.Tensor], order: float, shards: ShardGroup, group: Group) -> Rounds[float]:
    norms = [_wide_norm(values, order).cpu() for values in gradients if values.numel()]
    total = float(_wide_norm(torch.stack(norms), order)) if norms else 0.0
    norm = float(_wide_norm(torch.tensor(shards.gather(total), dtype=torch.float64), order))
    send = np.array([norm])
    received = yield Round("bcast", (1,), send.dtype, send=send, recv=np.empty_like(send))  # the first replica's
    return float(received[0])


def _wide_norm(values: torch.Tensor, order: float) -> Any:
    return torch.linalg.vector_norm(values, order, dtype=torch.complex128 if values.is_complex() else torch.float64)
