"""Top-k as one writes it by hand, for comparison: torch.topk of each gradient, 64-bit indices, two allgathers."""

import time
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, distributed

from mpicomp.rounds import Round
from mpicomp.transport import Transport

Gather = Callable[[Tensor], list[Tensor]]
"""Hands every rank everyone's arrays of one length, in the order of ranks."""


class PlainTopK:
    """Averages gradients by the largest magnitudes of each rank, with error feedback, a parameter at a time."""

    def __init__(self, ratio: float, gather: Gather) -> None:
        self._ratio = ratio
        self._gather = gather
        self._residuals: dict[int, Tensor] = {}
        self.sent_bytes = 0
        self.phases_s = np.zeros(3)

    def average(self, parameters: Iterable[Tensor]) -> None:
        """Write the mean into each ``grad``. Collective.

        Leaves what it took in ``phases_s``, seconds up to the exchange, in it and after it, and the payload of a rank
        in ``sent_bytes``.
        """
        self.sent_bytes = 0
        self.phases_s = np.zeros(3)
        for place, parameter in enumerate(parameters):
            if parameter.grad is None:
                continue
            start = time.perf_counter()
            accumulated = parameter.grad.reshape(-1)
            if place in self._residuals:
                accumulated = accumulated + self._residuals[place]
            count = max(1, int(accumulated.numel() * self._ratio))
            _, indices = torch.topk(accumulated.abs(), count, sorted=False)
            values = accumulated[indices]
            residual = accumulated.clone()
            residual[indices] = 0
            self._residuals[place] = residual
            compressed = time.perf_counter()
            everyones_values, everyones_indices = self._gather(values), self._gather(indices)
            gathered = time.perf_counter()
            mean = torch.zeros_like(accumulated)
            for their_values, their_indices in zip(everyones_values, everyones_indices, strict=True):
                mean.index_add_(0, their_indices, their_values)
            mean /= len(everyones_values)
            parameter.grad.copy_(mean.view_as(parameter.grad))
            self.sent_bytes += values.nbytes + indices.nbytes
            self.phases_s += [compressed - start, gathered - compressed, time.perf_counter() - gathered]


def over_gloo(array: Tensor) -> list[Tensor]:
    """Gather by torch.distributed's default group."""
    everyones = [torch.empty_like(array) for _ in range(distributed.get_world_size())]
    distributed.all_gather(everyones, array)
    return everyones


def over_mpi(transport: Transport) -> Gather:
    """Return an allgather of MPI among a transport's ranks."""
    ranks = transport.group.size

    def gather(array: Tensor) -> list[Tensor]:
        send = array.numpy()
        recv = np.empty(ranks * send.size, send.dtype)
        task = Round("allgatherv", [send.size] * ranks, send.dtype, send=send, recv=recv)
        return list(torch.from_numpy(transport.perform(task)).view(ranks, -1))

    return gather
