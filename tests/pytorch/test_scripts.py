"""What real training scripts do: accumulate, clip, scale, clear, compile, change rates, use several optimizers."""

import numpy as np
import pytest

import mpicomp

torch = pytest.importorskip("torch")

from replicas import Reference, assert_same, batch, distribute, network, sgd, square  # noqa: E402

torch.set_num_threads(1)


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, False])
def test_accumulation_with_a_short_last_window(comm, overlap):
    model = network()
    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm, overlap=overlap)
    window, pieces = 3, 8
    for piece in range(pieces):
        last = piece % window == window - 1 or piece == pieces - 1
        if last:
            square(model, piece, comm.rank).backward()
            before = optimizer.reducer.last_step
            optimizer.step()
            assert optimizer.reducer.last_step is not before
            optimizer.zero_grad()
            start = piece - piece % window
            reference.step(lambda m, r, a=start, b=piece: [square(m, s, r) for s in range(a, b + 1)])
        else:
            with optimizer.accumulate():
                square(model, piece, comm.rank).backward()
    # All backward passes inside: nothing was under way when step() comes.
    with optimizer.accumulate():
        square(model, 99, comm.rank).backward()
    optimizer.step()
    reference.step(lambda m, r: square(m, 99, r))
    assert_same(model, reference)
    optimizer.close()


@pytest.mark.mpi(max_size=3)
def test_clipping_of_the_mean(comm):
    def clip(model):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    model = network()
    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm)
    for step in range(5):
        optimizer.zero_grad()
        square(model, step, comm.rank).backward()
        optimizer.synchronize()
        norm = clip(model)
        assert norm > 0.05
        optimizer.step()
        reference.step(lambda m, r, s=step: square(m, s, r), clip)
    assert_same(model, reference)
    optimizer.close()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("unscale", [True, False])
def test_a_gradient_scaler_and_an_overflow_on_one_rank(comm, overlap, unscale):
    model = network()
    reference = Reference(model, sgd, comm.size)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    optimizer = distribute(model, comm, scaler=scaler, overlap=overlap)
    bad = comm.size - 1
    for step in range(10):
        optimizer.zero_grad()
        loss = square(model, step, comm.rank)
        if step == 5 and comm.rank == bad:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step != 5:
            reference.step(lambda m, r, s=step: square(m, s, r))
        assert_same(model, reference)
    scales = comm.allgather(scaler.get_scale())
    assert scales == [2048.0] * comm.size  # doubled after four steps, halved by the overflow, doubled again
    optimizer.close()


@pytest.mark.mpi(max_size=3)
def test_residuals_are_in_units_of_the_unscaled_gradient(comm):
    """Whatever the scaler does to the scale, the run is the one without a scaler."""
    runs = []
    for scaled in (False, True):
        model = network()
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=scaled)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = distribute(
            model, comm, plain, mpicomp.TopK(ratio=0.1), "allgather", scaler=scaler if scaled else None
        )
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(square(model, step, comm.rank)).backward()
            scaler.step(optimizer)
            scaler.update()
        runs.append(model)
        optimizer.close()
    for one, two in zip(*(model.parameters() for model in runs), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(comm, set_to_none):
    model = network()
    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm)
    for step in range(4):
        square(model, step, comm.rank).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert all((p.grad is None) == set_to_none for p in model.parameters())
        reference.step(lambda m, r, s=step: square(m, s, r))
    assert_same(model, reference)
    optimizer.close()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_mean_that_was_not_used(comm, overlap):
    """Whoever averages and then does not step has not averaged what backward brings next."""
    model = network()
    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm, overlap=overlap)
    square(model, 0, comm.rank).backward()
    optimizer.synchronize()
    model.zero_grad()
    square(model, 1, comm.rank).backward()
    optimizer.step()
    reference.step(lambda m, r: square(m, 1, r))
    assert_same(model, reference)
    optimizer.close()


@pytest.mark.mpi(max_size=3)
def test_several_models_and_optimizers_in_one_script(comm):
    """As a GAN has them: each backward goes through both, one optimizer steps."""

    def adam(model):
        return torch.optim.Adam(model.parameters(), lr=0.01)

    one, two = network(1), torch.nn.Linear(2, 1)
    torch.nn.init.constant_(two.weight, 0.3)
    torch.nn.init.zeros_(two.bias)
    references = [Reference(one, sgd, comm.size), Reference(two, adam, comm.size)]
    optimizers = [distribute(one, comm), distribute(two, comm, adam(two))]

    def first(model, other, step, rank):
        return other(model(batch(step, rank))).square().mean()

    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        two.requires_grad_(False)
        first(one, two, step, comm.rank).backward()
        optimizers[0].step()
        two.requires_grad_(True)
        references[0].step(lambda m, r, s=step: first(m, references[1].model, s, r))
        with torch.no_grad():
            hidden = one(batch(step, comm.rank))
        (two(hidden) - 1).square().mean().backward()
        optimizers[1].step()
        references[1].step(lambda m, r, s=step: (m(references[0].model(batch(s, r)).detach()) - 1).square().mean())
    assert_same(one, references[0])
    assert_same(two, references[1])
    for optimizer in optimizers:
        optimizer.close()


@pytest.mark.slow
@pytest.mark.mpi(max_size=3)
def test_a_compiled_model(comm):
    model = network()
    reference = Reference(model, sgd, comm.size)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = distribute(model, comm)
    for step in range(4):
        optimizer.zero_grad()
        square(compiled, step, comm.rank).backward()
        optimizer.step()
        reference.step(lambda m, r, s=step: square(m, s, r))
    assert_same(model, reference)
    optimizer.close()


@pytest.mark.mpi(max_size=3)
def test_learning_rates_change_with_a_residual_in_hand(comm):
    """Residuals are of gradients: a rate applies to what is delivered, whenever it was held back."""
    model = torch.nn.Linear(6, 1, bias=False)
    torch.nn.init.constant_(model.weight, 0.5)
    optimizer = distribute(
        model, comm, torch.optim.SGD(model.parameters(), lr=1.0), mpicomp.TopK(ratio=0.34), "allgather"
    )
    weight, residuals = np.full(6, 0.5), np.zeros((comm.size, 6))
    for step in range(12):
        lr = 0.1 / (1 + step % 4)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        model(batch(step, comm.rank)).sum().backward()
        optimizer.step()
        mean = np.zeros(6)
        for rank in range(comm.size):
            residuals[rank] += batch(step, rank).sum(0).numpy()
            top = np.argsort(-np.abs(residuals[rank]))[:2]
            mean[top] += residuals[rank][top] / comm.size
            residuals[rank][top] = 0
        weight -= lr * mean
    np.testing.assert_allclose(model.weight.detach().numpy()[0], weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(optimizer.reducer.residual("weight")[0], residuals[comm.rank], rtol=1e-4, atol=1e-5)
    optimizer.close()
