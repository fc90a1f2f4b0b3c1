"""Advice, once, to exchange updates of Muon where gradients take long, by seconds that are measured anyway."""

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mpicomp.collectives import Scheme, bind
from mpicomp.compressors import get_compressor
from mpicomp.cost import ADVICE_RATIO, sample_views
from mpicomp.errors import ConfigurationError
from mpicomp.reducer import Reducer
from mpicomp.torch.arguments import members_of
from mpicomp.torch.combined_optimizer import CombinedOptimizer
from mpicomp.torch.local_muon import COMPRESSOR, SYNC_EVERY, muon_and_adamw, orthogonalize
from mpicomp.torch.shards import is_sharded

_STEPS = 100  # after which plans have settled, most often
_LEAST_SHARE = 0.01  # of all work in a matrix that is timed for all of them
# Of all ranks at once: where these share cores, a product shorter than a turn on a core measured 0.4 of what it takes.
_TIMED_S = 0.1
_log = logging.getLogger("mpicomp.watch")


class MuonAdvice:
    """Names LocalMuon in the log of rank 0, once, where a step of it is predicted to take clearly less.

    That is a step without exchange, as telemetry of the slowest rank has it, with Newton-Schulz, which all ranks time
    at once, and a share of an exchange: of one bit on links, and of what exchanges take now beyond those.
    """

    def __init__(self, reducer: Reducer, parameters: Mapping[str, torch.Tensor]) -> None:
        self._reducer, self._parameters = reducer, parameters
        self._is_done = reducer.transport.group.hosts == 1

    def consider(self) -> None:
        """Log the advice if it is time to, and if it would pay; called after a step."""
        reducer = self._reducer
        if self._is_done or reducer.count < _STEPS:
            return
        self._is_done = True
        cost, times = reducer.cost, getattr(reducer.policy, "step_times", None)
        matrices = _muon_matrices(self._parameters)
        if cost is None or times is None or not times.are_many or not matrices:
            return
        views, network = sample_views(reducer.transport.group), cost.network

        def link_s(scheme: Scheme[Any], numel: int, dtype: np.dtype[Any]) -> float:
            rounds = [scheme.rounds(numel, dtype, view) for view in views]
            return network.seconds(network.coefficients(rounds, views))

        buckets = [(bucket, reducer.plans[bucket.index].scheme) for bucket in reducer.layout.buckets]
        now_s = sum(link_s(scheme, bucket.numel, bucket.dtype) for bucket, scheme in buckets)
        numel = sum(bucket.numel for bucket, _ in buckets)
        bit_s = link_s(bind(get_compressor(COMPRESSOR), "two-phase"), numel, np.dtype(np.float32))
        step_s = times.compute_s + times.exchange_s
        muon_s = times.compute_s + (max(0.0, times.exchange_s - now_s) + bit_s) / SYNC_EVERY
        if ADVICE_RATIO * muon_s < step_s:
            muon_s += _products_s(matrices)
        if ADVICE_RATIO * muon_s < step_s and reducer.transport.group.rank == 0:
            _log.warning(
                "mpicomp: links are slow for gradients: a step takes %.3g s, to which the exchange adds %.3g s; with "
                "mpicomp.torch.LocalMuon in place of this optimizer, which exchanges one bit an element every %d "
                "steps, it is predicted to take %.3g s (step %d). Its learning rates differ: see docs/updates.md",
                step_s, times.exchange_s, SYNC_EVERY, muon_s, reducer.count,
            )  # fmt: skip


def steps_most(both: CombinedOptimizer) -> bool:
    """Return whether the first of two optimizers, which is Muon, steps most of the parameters."""
    numels = [sum(parameter.numel() for parameter in members_of(optimizer)) for optimizer in both.optimizers]
    return 2 * numels[0] > sum(numels)


def _muon_matrices(parameters: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the matrices that LocalMuon would step by Muon, if these are most of the model."""
    try:
        both = muon_and_adamw(list(parameters.items()))
    except ConfigurationError:
        return []
    matrices = list(members_of(both.optimizers[0]))
    return matrices if steps_most(both) and not any(map(is_sharded, matrices)) else []


def _products_s(matrices: list[torch.Tensor]) -> float:
    """Return seconds of making updates of matrices orthogonal; one of them is timed, and stands for all by its work."""

    def work(matrix: torch.Tensor) -> float:
        rows, columns = sorted((len(matrix), math.prod(matrix.shape[1:])))
        return float(rows * rows * (columns + rows / 2))

    total = sum(map(work, matrices))
    timed = min((matrix for matrix in matrices if work(matrix) >= _LEAST_SHARE * total), key=work, default=matrices[0])
    # Any values do; random ones would change what the script draws next.
    update = torch.ones(len(timed), math.prod(timed.shape[1:]), device=timed.device)
    float(orthogonalize(update)[0, 0])  # the first one allocates; a read waits for a device
    begin, count, seconds = time.perf_counter(), 0, 0.0
    while seconds < _TIMED_S:
        float(orthogonalize(update)[0, 0])
        count, seconds = count + 1, time.perf_counter() - begin
    return seconds / count * total / work(timed)
