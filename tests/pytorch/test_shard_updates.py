"""Optimizers that exchange changes of shards, and clipping by the norm of all shards."""

import math
from functools import partial

import pytest
import torch
from replicas import adam, descent, network, sgd, square
from sharded_models import Hybrid, TwoReplicas, assert_alike, shards

from mpicomp.errors import ConfigurationError, NonFiniteError
from mpicomp.torch import LocalMuon, UpdateOptimizer, clip_grad_norm_

pytestmark = pytest.mark.mpi(min_size=4, max_size=4)


def muon(_, named, **settings):
    return LocalMuon(named, lr=0.02, **settings)


UPDATES = {
    "every step": {},
    "diloco": {"sync_every": 2, "outer": {"lr": 0.7, "momentum": 0.9, "nesterov": True}},
}


@pytest.mark.parametrize("settings", UPDATES.values(), ids=UPDATES)
def test_changes_of_shards_are_those_of_whole_parameters(comm, settings):
    with shards(comm) as mesh:
        reference = partial(TwoReplicas, **settings)
        hybrid = Hybrid(comm, mesh, make=adam, wrap=UpdateOptimizer, reference=reference, **settings)
        hybrid.run(range(8))
        hybrid.optimizer.synchronize()
        hybrid.reference.world.run([optimizer.synchronizing() for optimizer in hybrid.reference.optimizers])
        hybrid.check(most=2e-5)


def test_muon_of_shards_is_that_of_whole_matrices(comm):
    with shards(comm) as mesh:
        settings = {"wrap": muon, "sync_every": 2}
        hybrid = Hybrid(comm, mesh, reference=partial(TwoReplicas, **settings), **settings)
        hybrid.run(range(4))
        hybrid.check(most=1e-3)


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_changes_of_all_shards_are_kept_or_none(comm, policy):
    """A NaN in one shard of one replica: both of its ranks skip their steps, or nobody's changes are kept."""
    with shards(comm) as mesh:
        reference = partial(TwoReplicas, nonfinite="skip")
        hybrid = Hybrid(comm, mesh, wrap=UpdateOptimizer, nonfinite=policy, reference=reference)
        hybrid.run([0])
        before = [parameter.full_tensor().tolist() for parameter in hybrid.model.parameters()]
        hybrid.backward(1)
        if comm.rank == 1:
            hybrid.model[0].weight.grad.to_local()[0, 0] = math.nan
        if policy == "raise":
            with pytest.raises(NonFiniteError):
                hybrid.optimizer.step()
            assert [parameter.full_tensor().tolist() for parameter in hybrid.model.parameters()] == before
        else:
            hybrid.optimizer.step()
            hybrid.reference.step(square, 1, spoilt=0)
            hybrid.check()
            hybrid.run([2])
            hybrid.check()
        assert_alike(hybrid.model, hybrid.replicas)


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
def test_norm_for_clipping_is_of_the_whole_model(comm, order):
    with shards(comm) as mesh:
        hybrid = Hybrid(comm, mesh, network())
        for step in range(3):
            hybrid.backward(step)
            norm = clip_grad_norm_(hybrid.optimizer, 0.1, order)
            hybrid.optimizer.step()
            hybrid.reference.gradients(square, step)
            expected = torch.nn.utils.clip_grad_norm_(hybrid.reference.model.parameters(), 0.1, order)
            hybrid.reference.optimizer.step()
            assert norm == pytest.approx(float(expected), rel=1e-5)
            assert len(set(comm.allgather(norm))) == 1
        hybrid.check(most=2e-6)
        with pytest.raises(ConfigurationError, match="max_norm must be above 0"):
            clip_grad_norm_(hybrid.optimizer, 0)
        with pytest.raises(ConfigurationError, match="DistributedOptimizer is needed, got SGD"):
            clip_grad_norm_(sgd(network()), 1.0)


def test_overflow_in_one_shard_skips_steps_of_its_replica(comm):
    """Both ranks of the replica skip the step and scale down; the changes of the other one count by half."""
    with shards(comm) as mesh:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        hybrid = Hybrid(comm, mesh, make=descent, wrap=UpdateOptimizer)
        before = {name: p.detach().clone() for name, p in hybrid.reference.model.named_parameters()}
        hybrid.optimizer.zero_grad()
        scaler.scale(square(hybrid.model, 0, comm.rank)).backward()
        if comm.rank == 1:
            hybrid.model[0].weight.grad.to_local()[0, 0] = math.inf
        scaler.step(hybrid.optimizer)
        scaler.update()
        hybrid.reference.step(square, 0, ranks=(2, 3))
        with torch.no_grad():
            for name, parameter in hybrid.reference.model.named_parameters():
                parameter.add_(before[name]).div_(2)
        hybrid.check()
        assert comm.allgather(scaler.get_scale()) == [4.0, 4.0, 8.0, 8.0]
