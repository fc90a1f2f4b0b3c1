"""Ranks with different numbers of batches."""

import numpy as np
import pytest
import torch
from marks import slow
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
from mpicomp.errors import DisagreementError

each_overlap = pytest.mark.parametrize("overlap", [True, slow(False)])


def decaying(model):
    return sgd(model, weight_decay=0.1)


def clip(model):
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.05


@pytest.mark.mpi(max_size=3)
@each_overlap
@pytest.mark.parametrize("batches", [BATCHES, [0, 0, 3, 1], [3, 3, 3, 3], [0, 0, 0, 0]], ids=str)
def test_means_are_of_the_ranks_that_have_batches(comm, batches, overlap):
    pair = UnevenPair(comm, batches=batches, overlap=overlap)
    pair.join()
    pair.follow()
    assert steps_of(pair.optimizer) == max(pair.batches)
    pair.check()
    assert_same_state(pair.optimizer, comm)


@pytest.mark.mpi(max_size=3)
@each_overlap
def test_contexts_and_steps_between_them_follow_the_reference(comm, overlap):
    pair, first = UnevenPair(comm, overlap=overlap), 0
    for batches in (BATCHES, BATCHES[::-1], [2, 1, 1, 3]):
        pair.batches = batches[: comm.size]
        pair.join(first=first)
        pair.follow(first=first)
        pair.check()
        pair.step(first + 10)  # all have batches again
        pair.check()
        first += 11


@pytest.mark.mpi(max_size=3)
@each_overlap
@pytest.mark.parametrize("batches", [BATCHES, [0, 3, 6, 1]], ids=str)
def test_nothing_is_lost_with_uneven_batches(comm, batches, overlap):
    """With top-k: scaled gradients and residuals before are the ranks' means and residuals after, at every step."""
    batches = batches[: comm.size]
    model = torch.nn.Linear(8, 1, bias=False).double()
    torch.nn.init.constant_(model.weight, 0.5)
    optimizer = distribute(model, comm, descent(model, 0.25), mpicomp.TopK(ratio=0.25), "allgather", overlap=overlap)
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
@each_overlap
@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_changed_means_reach_idle_ranks(comm, make, change, overlap):
    pair = make(comm, overlap=overlap)
    pair.join(change)
    pair.follow(change)
    pair.check()
    assert_same_state(pair.optimizer, comm)


@pytest.mark.mpi(max_size=3)
@each_overlap
@pytest.mark.parametrize("place", ["forward", "mean", "step"])
def test_changed_learning_rates_reach_idle_ranks(comm, overlap, place):
    """Before forward, between the mean and the step, after the step."""

    def rate(step):
        return 0.1 / (1 + step % 3)

    pair = UnevenPair(comm, overlap=overlap)
    [group] = pair.optimizer.param_groups

    def body(step):
        if place == "forward":
            group["lr"] = rate(step)
        pair.backward(step)
        if place == "mean":
            pair.optimizer.synchronize()
            group["lr"] = rate(step)
        pair.optimizer.step()
        if place == "step":
            group["lr"] = rate(step + 1)

    pair.join(body=body)
    steps = iter(range(100))
    pair.follow(lambda _: pair.reference.optimizer.param_groups[0].update(lr=rate(next(steps))))
    pair.check()


@pytest.mark.mpi(max_size=2)
def test_scheduler_in_a_hook_steps_on_all_ranks(comm):
    model = network()
    plain = sgd(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1 / (1 + step))
    optimizer = distribute(model, comm, plain)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    batches = BATCHES[: comm.size]
    for epoch in range(2):
        loop(model, optimizer, comm, batches[comm.rank], 10 * epoch)
    assert schedule.last_epoch == 2 * max(batches)
    assert comm.allgather(schedule.get_last_lr()) == [[0.1 / (1 + 2 * max(batches))]] * comm.size
    assert_replicas(model, comm)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_rates_that_differ_are_found_at_the_next_context(comm):
    model = network()
    optimizer = distribute(model, comm)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loop(model, optimizer, comm, 1 + comm.rank, after_step=schedule.step)
    assert_replicas(model, comm)
    with pytest.raises(DisagreementError, match=r"param_groups\[0\]\['lr'\] must be the same on all ranks"):
        loop(model, optimizer, comm, 1)


@pytest.mark.mpi(max_size=3)
@each_overlap
def test_accumulation_ends_with_a_window_that_is_not_full(comm, overlap):
    pair = UnevenPair(comm, overlap=overlap)
    optimizer = pair.optimizer

    def loss(model, step, rank):
        return [square(model, 3 * step + part, rank) for part in range(3)]

    with optimizer.join():
        for step in range(pair.batches[comm.rank]):
            optimizer.zero_grad()
            *first, last = loss(pair.model, step, comm.rank)
            with optimizer.accumulate():
                for part in first:
                    part.backward()
            last.backward()
            optimizer.step()
        optimizer.zero_grad()
        with optimizer.accumulate():  # the window continues after the context
            square(pair.model, 99, comm.rank).backward()
        left = [parameter.grad.clone() for parameter in pair.model.parameters()]
    pair.follow(loss=loss)
    pair.check()
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(pair.model.parameters(), left, strict=True))


@pytest.mark.mpi(max_size=3)
@each_overlap
@pytest.mark.parametrize("clips", [False, True], ids=["plain", "clips"])
def test_gradient_scaler_with_uneven_batches(comm, clips, overlap):
    """Also where a gradient overflows while some rank has no batches, and where a rank never had a loss to scale."""

    def change(model):
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    pair = UnevenPair(comm, scaler=scaler, overlap=overlap)
    last = max(pair.batches) - 1

    def body(step):
        pair.optimizer.zero_grad()
        loss = square(pair.model, step, comm.rank)
        scaler.scale(loss * torch.inf if step == last else loss).backward()
        if clips:
            scaler.unscale_(pair.optimizer)
            change(pair.model)
        scaler.step(pair.optimizer)
        scaler.update()

    pair.join(body=body)
    pair.batches = [min(count, last) for count in pair.batches]
    pair.follow(change)
    pair.check()
    assert comm.allgather(scaler.get_scale()) == [1024.0 * 2 ** (last // 2) / 2] * comm.size


@pytest.mark.mpi(max_size=3)
@each_overlap
def test_closures_with_uneven_batches(comm, overlap):
    pair = UnevenPair(comm, overlap=overlap)

    def body(step):
        assert pair.optimizer.step(lambda: pair.backward(step)).item() > 0

    pair.join(body=body)
    pair.follow()
    pair.check()


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop], ids=lambda m: m.__name__)
def test_other_optimizers_and_wrapped_steps_join(comm, kind):
    def make(model):
        optimizer = kind(model.parameters(), lr=torch.tensor(0.01) if kind is not torch.optim.RMSprop else 0.01)
        torch.optim.lr_scheduler.StepLR(optimizer, 100)
        return optimizer

    pair = UnevenPair(comm, None, make)

    def body(step):
        pair.step_as_usual(step)
        if step == 2:
            pair.optimizer.param_groups[0]["lr"] *= 0.5

    pair.join(body=body)
    rates = iter([0.01] * 3 + [0.005] * 10)

    def change(_):
        rate, [group] = next(rates), pair.reference.optimizer.param_groups
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate

    pair.follow(change)
    pair.check(rtol=2e-4, atol=2e-5)
    assert_same_state(pair.optimizer, comm)


@pytest.mark.mpi(min_size=2, max_size=3)
@each_overlap
@pytest.mark.parametrize("policy", ["lgreco", "gravac", "auto", *map(slow, ("accordion", "flexible", "schedule"))])
def test_policies_leave_plans_while_a_rank_is_idle(comm, monkeypatch, policy, overlap):
    monkeypatch.setenv("MPICOMP_PROBE", "0")
    model, is_auto = network(), policy == "auto"
    named = None if is_auto else mpicomp.TopK(ratio=0.1)
    collective = "auto" if is_auto else "allgather"
    optimizer = distribute(model, comm, descent(model, 0.01), named, collective, policy=policy, overlap=overlap)
    chosen_policy = optimizer.reducer.policy
    calls = []
    for name in ("on_step_end", "on_telemetry", "refresh", "plan", "survey"):
        inner = getattr(chosen_policy, name)
        monkeypatch.setattr(
            chosen_policy, name, lambda *args, name=name, inner=inner: calls.append(name) or inner(*args), raising=False
        )
    records = []
    optimizer.register_step_post_hook(lambda *_: records.append((optimizer.reducer.last_step, list(calls))))
    full, most = 6, 12
    loop(model, optimizer, comm, most if comm.rank == 0 else full)
    assert len(records) == most
    plans = [[(bucket.compressor, bucket.collective) for bucket in record.buckets] for record, _ in records]
    assert plans[full:] == [plans[full - 1]] * (most - full)
    assert records[-1][1] == records[full - 1][1]  # no method of it was called
    assert "since some rank has no gradients of its own" in records[-1][0].buckets[0].reason
    assert "since some rank" not in records[full - 1][0].buckets[0].reason
    assert_replicas(model, comm)
    train(model, optimizer, range(3), comm.rank)  # it chooses when all have batches again
    assert len(calls) > len(records[full - 1][1])
    assert_replicas(model, comm)
