"""Ranks with different numbers of batches."""

import numpy as np
import pytest
from marks import slow

import mpicomp
from mpicomp.errors import DisagreementError

torch = pytest.importorskip("torch")

from replicas import Branches, assert_replicas, assert_same, batch, distribute, network, sgd, square  # noqa: E402
from uneven import BATCHES, Uneven, assert_same_state, loop, steps_of  # noqa: E402

torch.set_num_threads(1)


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, slow(False)])
@pytest.mark.parametrize("batches", [BATCHES, [0, 0, 3, 1], [3, 3, 3, 3], [0, 0, 0, 0]], ids=str)
def test_means_are_of_the_ranks_that_have_batches(comm, batches, overlap):
    model = network()
    batches = batches[: comm.size]
    reference = Uneven(model, sgd, batches)
    optimizer = distribute(model, comm, overlap=overlap)
    loop(model, optimizer, comm, batches[comm.rank])
    if any(batches):
        reference.run(square)
    assert steps_of(optimizer) == max(batches)
    assert_same(model, reference)
    assert_replicas(model, comm)
    assert_same_state(optimizer, comm)
    optimizer.close()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, slow(False)])
def test_one_context_after_another_and_steps_between(comm, overlap):
    model = network()
    optimizer = distribute(model, comm, overlap=overlap)
    reference = Uneven(model, sgd, BATCHES[: comm.size])
    joined, first = optimizer.join(), 0
    for batches in (BATCHES, BATCHES[::-1], [2, 1, 1, 3]):
        reference.batches = batches[: comm.size]
        with joined:
            for step in range(reference.batches[comm.rank]):
                optimizer.zero_grad()
                square(model, first + step, comm.rank).backward()
                optimizer.step()
        reference.run(square, first)
        assert_same(model, reference)
        # All have batches again.
        first += 10
        reference.batches = [1] * comm.size
        optimizer.zero_grad()
        square(model, first, comm.rank).backward()
        optimizer.step()
        reference.run(square, first)
        assert_same(model, reference)
        assert_replicas(model, comm)
        first += 1
    optimizer.close()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, slow(False)])
@pytest.mark.parametrize("batches", [BATCHES, [0, 3, 6, 1]], ids=str)
def test_nothing_is_lost(comm, batches, overlap):
    """With top-k: scaled gradients and residuals before are the ranks' means and residuals after, at every step."""
    batches = batches[: comm.size]
    model = torch.nn.Linear(8, 1, bias=False).double()
    torch.nn.init.constant_(model.weight, 0.5)
    optimizer = distribute(
        model,
        comm,
        torch.optim.SGD(model.parameters(), lr=0.25),
        mpicomp.TopK(ratio=0.25),
        "allgather",
        overlap=overlap,
    )

    def loss(step, rank):
        return (model(batch(step, rank, 8).double()) ** 2).sum() * (1 + rank)

    weight, residuals = np.full(8, 0.5), np.zeros((comm.size, 8))
    seen = []

    def look(*_):
        seen.append((model.weight.detach().numpy()[0].copy(), optimizer.reducer.residual("weight")[0]))

    optimizer.register_step_post_hook(look)
    with optimizer.join():
        for step in range(batches[comm.rank]):
            optimizer.zero_grad()
            loss(step, comm.rank).backward()
            optimizer.step()
    assert len(seen) == max(batches)
    for step in range(max(batches)):
        active = [rank for rank in range(comm.size) if step < batches[rank]]
        given = np.zeros((comm.size, 8))
        for rank in active:
            inputs = batch(step, rank, 8).double().numpy()
            given[rank] = 2 * (1 + rank) * (inputs @ weight) @ inputs * comm.size / len(active)
        before = residuals.copy()
        residuals += given
        mean = np.zeros(8)
        for rank in range(comm.size):
            top = np.argsort(-np.abs(residuals[rank]))[:2]
            mean[top] += residuals[rank][top] / comm.size
            residuals[rank][top] = 0
        np.testing.assert_allclose((given + before).sum(0), comm.size * mean + residuals.sum(0), atol=1e-12)
        weight = weight - 0.25 * mean
        np.testing.assert_allclose(seen[step][0], weight, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(seen[step][1], residuals[comm.rank], rtol=1e-9, atol=1e-9)
    assert_replicas(model, comm)
    optimizer.close()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, slow(False)])
def test_clipping_of_the_mean(comm, overlap):
    def clip(model):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    model, norms = network(), []
    reference = Uneven(model, sgd, BATCHES[: comm.size])
    optimizer = distribute(model, comm, overlap=overlap)
    with optimizer.join():
        for step in range(BATCHES[comm.rank]):
            optimizer.zero_grad()
            square(model, step, comm.rank).backward()
            optimizer.synchronize()
            norms.append(clip(model))
            optimizer.step()
    assert all(norm > 0.05 for norm in norms)
    reference.run(square, before_step=clip)
    assert_same(model, reference)
    assert_replicas(model, comm)
    assert_same_state(optimizer, comm)
    optimizer.close()


@pytest.mark.mpi(max_size=3)
def test_a_mean_that_the_loop_replaces_or_drops(comm):
    """With decay a parameter whose gradient was dropped has to stay as it is, also on ranks that are done."""

    def change(model):
        model[0].bias.grad = None
        model[2].bias.grad = torch.ones(8) - model[2].bias.grad

    def make(model):
        return sgd(model, weight_decay=0.1)

    model = network()
    reference = Uneven(model, make, BATCHES[: comm.size])
    optimizer = distribute(model, comm, make(model))
    with optimizer.join():
        for step in range(BATCHES[comm.rank]):
            optimizer.zero_grad()
            square(model, step, comm.rank).backward()
            optimizer.synchronize()
            change(model)
            optimizer.step()
    reference.run(square, before_step=change)
    assert_same(model, reference)
    assert_replicas(model, comm)
    optimizer.close()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, slow(False)])
def test_a_learning_rate_that_changes_in_the_loop(comm, overlap):
    """In whatever place: before forward, between the mean and the step, after the step."""

    def rate(step):
        return 0.1 / (1 + step % 3)

    for place in ("forward", "mean", "step"):
        model = network()
        reference = Uneven(model, sgd, BATCHES[: comm.size])
        taken = iter(range(100))
        optimizer = distribute(model, comm, overlap=overlap)
        with optimizer.join():
            for step in range(BATCHES[comm.rank]):
                if place == "forward":
                    optimizer.param_groups[0]["lr"] = rate(step)
                optimizer.zero_grad()
                square(model, step, comm.rank).backward()
                if place == "mean":
                    optimizer.synchronize()
                    optimizer.param_groups[0]["lr"] = rate(step)
                optimizer.step()
                if place == "step":
                    optimizer.param_groups[0]["lr"] = rate(step + 1)

        def change(_, reference=reference, taken=taken):
            reference.optimizer.param_groups[0]["lr"] = rate(next(taken))

        reference.run(square, before_step=change)
        assert_same(model, reference)
        assert_replicas(model, comm)
        optimizer.close()


@pytest.mark.mpi(max_size=3)
def test_a_scheduler_in_a_hook_steps_on_all_ranks(comm):
    model = network()
    own = sgd(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 1 / (1 + step))
    optimizer = distribute(model, comm, own)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    batches = BATCHES[: comm.size]
    for epoch in range(2):
        loop(model, optimizer, comm, batches[comm.rank], 10 * epoch)
    assert schedule.last_epoch == 2 * max(batches)
    assert comm.allgather(schedule.get_last_lr()) == [[0.1 / (1 + 2 * max(batches))]] * comm.size
    assert_replicas(model, comm)
    optimizer.close()


@pytest.mark.mpi(min_size=2, max_size=3)
def test_rates_that_have_come_apart_are_found_at_the_next_context(comm):
    model = network()
    optimizer = distribute(model, comm)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loop(model, optimizer, comm, 1 + comm.rank, after_step=schedule.step)
    assert_replicas(model, comm)
    with pytest.raises(DisagreementError, match=r"param_groups\[0\]\['lr'\] must be the same on all ranks"):
        loop(model, optimizer, comm, 1)
    optimizer.close()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, slow(False)])
def test_accumulation(comm, overlap):
    model = network()
    reference = Uneven(model, sgd, BATCHES[: comm.size])
    optimizer = distribute(model, comm, overlap=overlap)
    with optimizer.join():
        for step in range(BATCHES[comm.rank]):
            optimizer.zero_grad()
            with optimizer.accumulate():
                square(model, 3 * step, comm.rank).backward()
                square(model, 3 * step + 1, comm.rank).backward()
            square(model, 3 * step + 2, comm.rank).backward()
            optimizer.step()
        optimizer.zero_grad()
        with optimizer.accumulate():  # a last window that is not full, and goes on after the context
            square(model, 99, comm.rank).backward()
        left = [parameter.grad.clone() for parameter in model.parameters()]
    reference.run(lambda m, s, r: [square(m, 3 * s + part, r) for part in range(3)])
    assert_same(model, reference)
    assert all(torch.equal(own.grad, grad) for own, grad in zip(model.parameters(), left, strict=True))
    assert_replicas(model, comm)
    optimizer.close()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, slow(False)])
@pytest.mark.parametrize("clips", [False, True], ids=["plain", "clips"])
def test_a_gradient_scaler(comm, clips, overlap):
    """Also where a gradient overflows while some rank has no batches, and where a rank never had a loss to scale."""

    def clip(model):
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    batches = BATCHES[: comm.size]
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    reference = Uneven(model, sgd, batches)
    optimizer = distribute(model, comm, scaler=scaler, overlap=overlap)
    last = max(batches) - 1
    with optimizer.join():
        for step in range(batches[comm.rank]):
            optimizer.zero_grad()
            loss = square(model, step, comm.rank)
            if step == last:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                clip(model)
            scaler.step(optimizer)
            scaler.update()
    reference.batches = [min(own, last) for own in batches]
    reference.run(square, before_step=clip)
    assert_same(model, reference)
    assert_replicas(model, comm)
    scales = comm.allgather(scaler.get_scale())
    assert scales == [1024.0 * 2 ** (last // 2) / 2] * comm.size
    optimizer.close()


class Words(torch.nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(5)
        self.words = torch.nn.Embedding(30, 3, sparse=sparse)
        self.head = torch.nn.Linear(3, 1)

    def loss(self, step, rank):
        tokens = torch.from_numpy(np.random.default_rng((step, rank)).integers(0, 30, (4, 5)))
        return self.head(self.words(tokens).mean(1)).square().sum()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, slow(False)])
@pytest.mark.parametrize("changes", [False, True], ids=["plain", "changes"])
def test_sparse_gradients(comm, changes, overlap):
    def halve(model):
        if changes:
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)

    def make(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model = Words(sparse=True)
    reference = Uneven(Words(sparse=False), make, BATCHES[: comm.size])
    optimizer = distribute(model, comm, make(model), overlap=overlap)
    with optimizer.join():
        for step in range(BATCHES[comm.rank]):
            optimizer.zero_grad()
            model.loss(step, comm.rank).backward()
            optimizer.synchronize()
            assert model.words.weight.grad.is_sparse
            halve(model)
            optimizer.step()
    reference.run(lambda m, s, r: m.loss(s, r), before_step=halve)
    assert_same(model, reference)
    assert_replicas(model, comm)
    optimizer.close()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, slow(False)])
def test_parameters_that_nobody_uses(comm, overlap):
    """With momentum and decay a parameter that no rank with batches used has to stay as it is."""

    def order(rank, step):
        return [place for place in range(4) if (step + place) % 3 and (rank + step * place) % 2]

    def loss(model, step, rank):
        return model(batch(step, rank), order(rank, step)).square().mean()

    def make(model):
        return sgd(model, weight_decay=0.1)

    model = Branches()
    batches = [9, 5, 2, 7][: comm.size]
    reference = Uneven(model, make, batches)
    optimizer = distribute(model, comm, make(model), overlap=overlap)
    with optimizer.join():
        for step in range(batches[comm.rank]):
            optimizer.zero_grad()
            loss(model, step, comm.rank).backward()
            optimizer.step()
    reference.run(loss)
    assert_same(model, reference)
    assert_replicas(model, comm)
    optimizer.close()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, slow(False)])
def test_closures(comm, overlap):
    model = network()
    reference = Uneven(model, sgd, BATCHES[: comm.size])
    optimizer = distribute(model, comm, overlap=overlap)
    with optimizer.join():
        for step in range(BATCHES[comm.rank]):

            def closure(step=step):
                optimizer.zero_grad()
                loss = square(model, step, comm.rank)
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0
    reference.run(square)
    assert_same(model, reference)
    assert_replicas(model, comm)
    optimizer.close()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop], ids=lambda m: m.__name__)
def test_other_optimizers_and_wrapped_steps(comm, make):
    def own(model):
        return make(model.parameters(), lr=torch.tensor(0.01) if make is not torch.optim.RMSprop else 0.01)

    model = network()
    reference = Uneven(model, own, BATCHES[: comm.size])
    plain = own(model)
    torch.optim.lr_scheduler.StepLR(plain, 100)
    optimizer = distribute(model, comm, plain)
    with optimizer.join():
        for step in range(BATCHES[comm.rank]):
            optimizer.zero_grad()
            square(model, step, comm.rank).backward()
            optimizer.step()
            if step == 2:
                optimizer.param_groups[0]["lr"] *= 0.5
    rates = iter([0.01] * 3 + [0.005] * 10)

    def change(_):
        rate = next(rates)
        held = reference.optimizer.param_groups[0]["lr"]
        if isinstance(held, torch.Tensor):
            held.fill_(rate)
        else:
            reference.optimizer.param_groups[0]["lr"] = rate

    reference.run(square, before_step=change)
    assert_same(model, reference, rtol=2e-4, atol=2e-5)
    assert_replicas(model, comm)
    assert_same_state(optimizer, comm)
    optimizer.close()


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize("overlap", [True, slow(False)])
@pytest.mark.parametrize("policy", ["accordion", "lgreco", "gravac", "flexible", "schedule", "auto"])
def test_policies_leave_plans_as_they_are(comm, monkeypatch, policy, overlap):
    monkeypatch.setenv("MPICOMP_PROBE", "0")
    model = network()
    named = None if policy == "auto" else mpicomp.TopK(ratio=0.1)
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = distribute(
        model, comm, plain, named, "auto" if policy == "auto" else "allgather", policy=policy, overlap=overlap
    )
    own = optimizer.reducer.policy
    calls = []
    for name in ("deliver", "learn", "refresh", "plan", "survey"):
        inner = getattr(own, name)
        monkeypatch.setattr(
            own, name, lambda *args, name=name, inner=inner: calls.append(name) or inner(*args), raising=False
        )
    records = []
    optimizer.register_step_post_hook(lambda *_: records.append((optimizer.reducer.last_step, list(calls))))
    full, most = 6, 12
    loop(model, optimizer, comm, most if comm.rank == 0 else full)
    assert len(records) == most
    plans = [[(own.compressor, own.collective) for own in record.buckets] for record, _ in records]
    assert plans[full:] == [plans[full - 1]] * (most - full)
    assert records[-1][1] == records[full - 1][1]  # nobody asked it, and it was told nothing
    assert "since some rank has no gradients of its own" in records[-1][0].buckets[0].reason
    assert "since some rank" not in records[full - 1][0].buckets[0].reason
    assert_replicas(model, comm)
    # It goes on when all have batches again.
    for step in range(3):
        optimizer.zero_grad()
        square(model, step, comm.rank).backward()
        optimizer.step()
    assert len(calls) > len(records[full - 1][1])
    assert_replicas(model, comm)
    optimizer.close()
