"""UpdateOptimizer: what scripts do to models and optimizers, and what is refused."""

import numpy as np
import pytest
import torch
from local_replicas import ByHand, Updates, adam, loss_of, network

import mpicomp
from mpicomp.errors import ConfigurationError, DisagreementError
from mpicomp.mpi import LocalWorld


def test_writes_of_all_ranks_are_copied_to_the_shared_ones():
    ranks = Updates(2, compressor="topk")
    for number in range(3):
        if number == 2:
            for model in ranks.models:
                with torch.no_grad():
                    model[0].weight.data.mul_(0.5)  # torch counts no version of that
                    model[2].bias.zero_()
            before = ranks.values()[0]
        ranks.step(number)
    shared = ranks.optimizers[0].shared()
    assert torch.equal(shared["0.weight"], ranks.models[0][0].weight)
    assert ranks.same()
    # It was not sent as a change, of which topk selects one element.
    assert (ranks.values()[0] != before).sum() <= 2 * 4


def test_write_of_one_rank_is_refused_on_all():
    ranks = Updates(3)
    ranks.step(0)
    with torch.no_grad():
        ranks.models[2][0].bias.add_(1)
    with pytest.raises(
        DisagreementError,
        match=r"parameter '0.bias' has other values on rank 2 .* write the same to parameters on all ranks",
    ):
        ranks.step(1)


def test_rank_skips_its_nonfinite_step():
    ranks, plain = Updates(2, nonfinite="skip", compressor="dense"), ByHand(2)
    for number in range(4):
        ranks.backward(number)
        if number == 1:
            ranks.models[0][0].weight.grad[0, 0] = torch.inf
        ranks.exchange()
        plain.step(number, left_out=[0] if number == 1 else [])
        plain.move_by_mean()
    np.testing.assert_allclose(ranks.values()[0], plain.shared, rtol=1e-9, atol=1e-12)


def test_grad_scaler_of_each_rank():
    """A loss that overflows on one rank skips that rank's step alone; scales may differ then."""
    make = lambda: network(torch.float32)  # noqa: E731
    ranks, plain = Updates(2, compressor="dense", make=make), ByHand(2, make=make)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    for number in range(3):
        ranks.scaled_step(scalers, number, clips=number == 2)
        plain.step(number, left_out=[1] if number == 1 else [])
        plain.set_all((plain.shared + np.mean(plain.changes(), axis=0)).astype(np.float32).astype(np.float64))
    assert [scaler.get_scale() for scaler in scalers] == [2.0**10, 2.0**9]
    np.testing.assert_allclose(ranks.values()[0], plain.shared, rtol=2e-4, atol=1e-5)


def test_16_bit_parameters_are_shared_in_32_bits():
    """Steps that are too small for 16 bits add up in the shared parameters."""
    ranks = Updates(2, lambda model: torch.optim.SGD(model.parameters(), lr=1e-3), lambda: network(torch.bfloat16))
    for number in range(6):
        ranks.step(number)
        assert ranks.same()
    shared = ranks.optimizers[0].shared()
    assert {values.dtype for values in shared.values()} == {torch.float32}
    for name, parameter in ranks.models[0].named_parameters():
        assert torch.equal(parameter, shared[name].to(torch.bfloat16))


def test_sparse_gradients_move_their_rows():
    def make():
        torch.manual_seed(0)
        return torch.nn.Embedding(20, 4, sparse=True)

    ranks = Updates(2, lambda model: torch.optim.SparseAdam(model.parameters(), lr=0.1), make, compressor="dense")
    before = ranks.values()[0]
    for rank, model in enumerate(ranks.models):
        model(torch.tensor([rank, 5])).sum().backward()
    ranks.exchange()
    moved = (ranks.values()[0] != before).reshape(20, 4).any(axis=1)
    assert np.flatnonzero(moved).tolist() == [0, 1, 5]


def test_closures_that_are_called_many_times():
    settings = {"max_iter": 25, "tolerance_change": 0, "tolerance_grad": 0}
    ranks = Updates(2, lambda model: torch.optim.LBFGS(model.parameters(), **settings), same_batches=True)
    calls = []

    def closure_of(rank):
        def closure():
            calls.append(rank)
            ranks.optimizers[rank].zero_grad()
            loss = loss_of(ranks.models[rank], 0, 0)
            loss.backward()
            return loss

        return closure

    losses = []
    for _ in range(3):
        steps = [optimizer.rounds(closure_of(rank)) for rank, optimizer in enumerate(ranks.optimizers)]
        losses.append(ranks.world.run(steps)[0].item())
    assert losses[2] < losses[1] < losses[0]
    assert calls.count(0) > 60  # more than are warned of without a step
    assert ranks.same()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"sync_every": 0}, "sync_every must be an integer of at least 1, got 0"),
        ({"sync_every": "auto", "policy": "static"}, "sync_every='auto' is policy 'interval', got policy='static'"),
        ({"outer": {"rate": 1}}, "outer must have some of lr, momentum"),
        ({"outer": {"sign": 1.0}}, r"outer\['sign'\] must be True or False, got 1.0"),
        ({"outer": {"sign": True, "momentum": 0.9}}, "outer has momentum and takes the sign of changes"),
        ({"outer": {"lr": -1}}, "outer: Invalid learning rate"),
        ({"compressor": {"id": "dgc", "momentum": 0.9}}, "applies momentum to gradients"),
        ({"feedback_decay": 1.5, "compressor": "topk"}, "feedback_decay must be a number from 0 to 1, got 1.5"),
    ],
)
def test_impossible_settings_are_refused(settings, match):
    with pytest.raises(ConfigurationError, match=match):
        Updates(1, **settings)


def test_optimizers_that_exchange_already_are_refused():
    model, alone = network(), {"comm": LocalWorld(1).transports[0]}
    optimizer = mpicomp.torch.UpdateOptimizer(adam(model), model, **alone)
    with pytest.raises(ConfigurationError, match="exchanges already"):
        mpicomp.torch.UpdateOptimizer(optimizer, model, **alone)
    with pytest.raises(ConfigurationError, match="exchanges by itself"):
        mpicomp.torch.DistributedOptimizer(optimizer, model, **alone)
    optimizer.close()
    mpicomp.torch.UpdateOptimizer(optimizer, model, **alone)
