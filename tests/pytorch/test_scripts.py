"""What real training scripts do: accumulate, clip, scale, clear, compile, change rates, use several optimizers."""

from functools import partial

import pytest
import torch
from replicas import (
    Pair,
    Reference,
    adam,
    assert_replicas,
    assert_same,
    batch,
    descent,
    distribute,
    network,
    sgd,
    square,
)
from script_shapes import bits, by_hand, exchanging, images, stopped_and_resumed

import mpicomp


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, False])
def test_accumulation_with_a_short_last_window(comm, overlap):
    pair = Pair(comm, overlap=overlap)
    optimizer, window, pieces = pair.optimizer, 3, 8
    for piece in range(pieces):
        if piece % window == window - 1 or piece == pieces - 1:
            square(pair.model, piece, comm.rank).backward()
            before = optimizer.reducer.last_step
            optimizer.step()
            assert optimizer.reducer.last_step is not before
            optimizer.zero_grad()
            parts = range(piece - piece % window, piece + 1)
            pair.reference.step(lambda m, _, rank, parts=parts: [square(m, part, rank) for part in parts], piece)
        else:
            with optimizer.accumulate():
                square(pair.model, piece, comm.rank).backward()
    # All backward passes inside: no exchange has begun when step() is called.
    with optimizer.accumulate():
        square(pair.model, 99, comm.rank).backward()
    optimizer.step()
    pair.reference.step(square, 99)
    pair.check()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize(("overlap", "unscale"), [(True, False), (False, True)])
def test_gradient_scaler_and_an_overflow_on_one_rank(comm, overlap, unscale):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    pair = Pair(comm, scaler=scaler, overlap=overlap)
    for step in range(10):
        pair.optimizer.zero_grad()
        loss = square(pair.model, step, comm.rank)
        if step == 5 and comm.rank == comm.size - 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(pair.optimizer)
        scaler.step(pair.optimizer)
        scaler.update()
        if step != 5:
            pair.reference.step(square, step)
        assert_same(pair.model, pair.reference)
    scales = comm.allgather(scaler.get_scale())
    assert scales == [2048.0] * comm.size  # doubled after four steps, halved by the overflow, doubled again


@pytest.mark.mpi(max_size=2)
def test_residuals_are_in_units_of_the_unscaled_gradient(comm):
    """Whatever the scaler does to the scale, the run is the one without a scaler."""
    models = network(), network()
    for model, scaled in zip(models, (False, True), strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=scaled)
        settings = {"scaler": scaler} if scaled else {}
        optimizer = distribute(model, comm, descent(model), mpicomp.TopK(ratio=0.1), "allgather", **settings)
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(square(model, step, comm.rank)).backward()
            scaler.step(optimizer)
            scaler.update()
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


@pytest.mark.mpi(max_size=2)
def test_several_models_and_optimizers_in_one_script(comm):
    """As a GAN has them: each backward goes through both, one optimizer steps."""
    one, two = network(1), torch.nn.Linear(2, 1)
    torch.nn.init.constant_(two.weight, 0.3)
    torch.nn.init.zeros_(two.bias)
    references = [Reference(one, sgd, comm.size), Reference(two, adam, comm.size)]
    optimizers = [distribute(one, comm), distribute(two, comm, adam(two))]

    def generator_loss(model, step, rank, critic):
        return critic(model(batch(step, rank))).square().mean()

    def critic_loss(model, step, rank, generator):
        return (model(generator(batch(step, rank)).detach()) - 1).square().mean()

    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        two.requires_grad_(False)
        generator_loss(one, step, comm.rank, two).backward()
        optimizers[0].step()
        two.requires_grad_(True)
        references[0].step(lambda *args: generator_loss(*args, references[1].model), step)
        critic_loss(two, step, comm.rank, one).backward()
        optimizers[1].step()
        references[1].step(lambda *args: critic_loss(*args, references[0].model), step)
    assert_same(one, references[0])
    assert_same(two, references[1])


@pytest.mark.mpi(max_size=3)
def test_resumed_script_equals_whole_run(comm, tmp_path):
    settings = {"overlap": True, "compressor": "topk", "collective": "allgather", "warmup": 0}
    whole, resumed = stopped_and_resumed(comm, tmp_path, settings)
    assert_replicas(whole, comm)
    assert bits(resumed) == bits(whole)


@pytest.mark.mpi(max_size=3)
def test_script_averages_gradients_as_by_hand(comm, tmp_path):
    reference, _ = images(comm, tmp_path, partial(by_hand, comm), epochs=2)
    settings = {"compressor": "dense", "collective": "allreduce"}
    model, optimizer = images(comm, tmp_path, partial(exchanging, comm, settings), epochs=2)
    optimizer.close()
    torch.testing.assert_close(
        dict(model.named_parameters()), dict(reference.named_parameters()), rtol=1e-9, atol=1e-12
    )


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("overlap", [True, False])
def test_closure_that_synchronizes_exchanges_once(comm, overlap):
    """Lightning calls the clipping of docs/examples/with_lightning.py inside the optimizer's closure."""
    models = []
    for inside in (True, False):
        model = network()
        optimizer = distribute(model, comm, None, mpicomp.TopK(ratio=0.1), "allgather", overlap=overlap)

        def clipped(step, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = square(model, step, comm.rank)
            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            return loss

        for step in range(4):
            if inside:
                optimizer.step(partial(clipped, step))
            else:
                clipped(step)
                optimizer.step()
        assert optimizer.reducer.last_step.step == 3
        models.append(bits(model))
    assert models[0] == models[1]
