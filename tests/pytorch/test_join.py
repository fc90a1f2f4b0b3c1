"""Ranks with different numbers of batches."""

import numpy as np
import pytest
import torch
from replicas import (
    BATCHES,
    Branches,
    UnevenPair,
    assert_replicas,
    assert_same_state,
    batch,
    branches_loss,
    descent,
    distribute,
    loop,
    network,
    sgd,
    square,
    steps_of,
    train,
)

import mpicomp
from mpicomp.errors import ConfigurationError, DisagreementError
from mpicomp.mpi import LocalWorld


def decaying(model):
    return sgd(model, weight_decay=0.1)


def clip(model):
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.05


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, False])
def test_means_are_of_the_ranks_that_have_batches(comm, overlap):
    """In several contexts, and in steps between them."""
    pair, first = UnevenPair(comm, overlap=overlap), 0
    for batches in (BATCHES, [0, 0, 3, 1], [0, 0, 0, 0], BATCHES[::-1], [3, 3, 3, 3]):
        pair.batches = batches[: comm.size]
        before = steps_of(pair.optimizer) if first else 0
        pair.join(first=first)
        pair.follow(first=first)
        assert steps_of(pair.optimizer) == before + max(pair.batches)
        pair.check()
        pair.step(first + 10)  # all have batches again
        pair.check()
        first += 11
    assert_same_state(pair.optimizer, comm)


@pytest.mark.mpi(max_size=3)
def test_nothing_is_lost_with_uneven_batches(comm):
    """With top-k: scaled gradients and residuals before are the ranks' means and residuals after, at every step."""
    batches = BATCHES[: comm.size]
    model = torch.nn.Linear(8, 1, bias=False).double()
    torch.nn.init.constant_(model.weight, 0.5)
    optimizer = distribute(model, comm, descent(model, 0.25), mpicomp.TopK(ratio=0.25), "allgather", overlap=True)
    seen = []

    def look(*_):
        seen.append((model.weight.detach().numpy()[0].copy(), optimizer.reducer.residual("weight")[0]))

    optimizer.register_step_post_hook(look)
    with optimizer.join():
        for step in range(batches[comm.rank]):
            optimizer.zero_grad()
            ((model(batch(step, comm.rank, 8).double()) ** 2).sum() * (1 + comm.rank)).backward()
            optimizer.step()
    assert len(seen) == max(batches)
    weight, residuals = np.full(8, 0.5), np.zeros((comm.size, 8))
    for step in range(max(batches)):
        active = [rank for rank in range(comm.size) if step < batches[rank]]
        gradients = np.zeros((comm.size, 8))
        for rank in active:
            inputs = batch(step, rank, 8).double().numpy()
            gradients[rank] = 2 * (1 + rank) * (inputs @ weight) @ inputs * comm.size / len(active)
        before = residuals.copy()
        residuals += gradients
        mean = np.zeros(8)
        for rank in range(comm.size):
            top = np.argsort(-np.abs(residuals[rank]))[:2]
            mean[top] += residuals[rank][top] / comm.size
            residuals[rank][top] = 0
        np.testing.assert_allclose((gradients + before).sum(0), comm.size * mean + residuals.sum(0), atol=1e-12)
        weight = weight - 0.25 * mean
        np.testing.assert_allclose(seen[step][0], weight, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(seen[step][1], residuals[comm.rank], rtol=1e-9, atol=1e-9)
    assert_replicas(model, comm)


def replace(model):
    """Drop a gradient, whose parameter has to stay as it is in spite of decay, and write another one."""
    model[0].bias.grad = None
    model[2].bias.grad = torch.ones(8) - model[2].bias.grad


def branches_pair(comm, **settings):
    """With momentum and decay a parameter that no rank with batches used has to stay as it is."""
    return UnevenPair(comm, Branches(), decaying, branches_loss, batches=[9, 5, 2, 7], **settings)


CHANGES = {
    "clipped": (UnevenPair, clip),
    "replaced": (lambda comm, **settings: UnevenPair(comm, None, decaying, **settings), replace),
    "unused": (branches_pair, None),
}


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_changed_means_reach_idle_ranks(comm, make, change):
    pair = make(comm, overlap=True)
    pair.join(change)
    pair.follow(change)
    pair.check()
    assert_same_state(pair.optimizer, comm)


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("place", ["before the step", "after the step"])
def test_changed_learning_rates_reach_idle_ranks(comm, place):
    pair = UnevenPair(comm, overlap=True)
    [group] = pair.optimizer.param_groups

    def rate(step):
        return 0.1 / (1 + step % 3)

    def body(step):
        pair.backward(step)
        if place == "before the step":
            pair.optimizer.synchronize()
            group["lr"] = rate(step)
        pair.optimizer.step()
        if place == "after the step":
            group["lr"] = rate(step + 1)

    pair.join(body=body)
    steps = iter(range(100))
    pair.follow(lambda _: pair.reference.optimizer.param_groups[0].update(lr=rate(next(steps))))
    pair.check()


@pytest.mark.mpi(min_size=2, max_size=3)
def test_policies_leave_plans_while_a_rank_is_idle(comm):
    model = network()
    settings = {"policy": {"id": "gravac", "every": 2, "window": 2, "warmup": 0}, "overlap": True}
    optimizer = distribute(model, comm, descent(model, 0.01), mpicomp.TopK(ratio=0.1), "allgather", **settings)
    records = []
    optimizer.register_step_post_hook(lambda *_: records.append(optimizer.reducer.last_step))
    loop(model, optimizer, comm, 12 if comm.rank == 0 else 6)
    plans = [[(bucket.compressor, bucket.collective) for bucket in record.buckets] for record in records]
    assert plans[6:] == [plans[5]] * 6
    assert ["since some rank has no gradients" in record.buckets[0].reason for record in records] == 6 * [0] + 6 * [1]
    assert_replicas(model, comm)
    train(model, optimizer, range(3), comm.rank)  # it chooses when all have batches again
    assert "since some rank" not in optimizer.reducer.last_step.buckets[0].reason
    assert_replicas(model, comm)


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize(("steps", "some"), [(0, 2), (2, 0)])
def test_rank_that_steps_without_join_is_refused(comm, steps, some):
    """At the first step of all, or later; the others may have no batches."""
    model = network()
    optimizer = distribute(model, comm, overlap=True)
    train(model, optimizer, range(steps), comm.rank)

    def run():
        if comm.rank < comm.size - 1:
            loop(model, optimizer, comm, some)
        else:
            optimizer.zero_grad()
            square(model, 9, comm.rank).backward()
            optimizer.step()

    with pytest.raises(DisagreementError, match=r"join\(\) must be the same on all ranks, got True on rank 0 and Fal"):
        run()
    # All ranks have raised it, and continue.
    optimizer.zero_grad()
    with optimizer.accumulate():
        square(model, 5, comm.rank).backward()
    optimizer.step()
    assert_replicas(model, comm)


@pytest.mark.mpi(min_size=2, max_size=3)
def test_error_that_leaves_the_context_sends_nothing(comm):
    model = network()
    optimizer = distribute(model, comm, overlap=True)
    square(model, 0, comm.rank).backward()
    optimizer.step()
    sent = []
    transport = optimizer.reducer.transport
    inner = transport.run
    transport.run = lambda exchange: sent.append(1) or inner(exchange)

    def fail():
        with optimizer.join():
            optimizer.zero_grad()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not sent
    del transport.run
    loop(model, optimizer, comm, 1 + comm.rank)
    assert_replicas(model, comm)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_loop_that_ends_before_its_step_is_refused(comm):
    model = network()
    optimizer = distribute(model, comm)

    def run():
        with optimizer.join():
            for step in range(3):
                optimizer.zero_grad()
                square(model, step, comm.rank).backward()
                if comm.rank == 0 and step == 1:
                    break
                optimizer.step()

    with pytest.raises(ConfigurationError, match=r"ended between backward\(\) and step\(\).*\(on rank 0\)"):
        run()


def test_nested_contexts_are_refused():
    def alone(model):
        return distribute(model, LocalWorld(1).transports[0])

    one, two = network(), network(1)
    first, second = alone(one), alone(two)
    with first.join():
        for other in (first, second):
            with pytest.raises(ConfigurationError, match=r"one optimizer's join\(\) at a time"), other.join():
                pass
        square(one, 0, 0).backward()
        first.step()
    with second.join():
        square(two, 0, 0).backward()
        second.step()
    assert steps_of(first) == steps_of(second) == 1


@pytest.mark.mpi(min_size=2, max_size=2)
def test_another_optimizer_in_the_loop_is_refused(comm):
    one, two = network(), network(1)
    first, second = distribute(one, comm, overlap=True), distribute(two, comm, overlap=True)

    def run():
        with first.join():
            square(two, 0, comm.rank).backward()
            second.step()

    with pytest.raises(ConfigurationError, match="another optimizer than the one that joins"):
        run()
