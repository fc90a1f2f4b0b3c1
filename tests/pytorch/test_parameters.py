"""Parameters unused, shared, frozen, added, of 16 bits; gradients sparse, strided, not finite; plain training."""

import numpy as np
import pytest
import torch
from replicas import (
    Branches,
    Pair,
    Words,
    adam,
    assert_equal,
    assert_replicas,
    batch,
    branches_loss,
    descent,
    distribute,
    network,
    sgd,
    train,
    words_loss,
)

import mpicomp
from mpicomp.mpi import LocalWorld


def decaying(model):
    return sgd(model, weight_decay=0.1)


def with_gradient(model):
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, False])
def test_unused_parameters_stay_and_used_ones_move(comm, overlap):
    """With momentum and decay a parameter that no rank used has to stay as it is; one that some rank used does not."""
    pair = Pair(comm, Branches(), decaying, branches_loss, overlap=overlap)
    for step in range(12):
        pair.step(step)
        assert with_gradient(pair.model) == with_gradient(pair.reference.model)
    pair.check()
    assert not pair.optimizer.reducer.last_step.agreed  # an unused parameter costs no agreement once it is known


@pytest.mark.mpi(max_size=3)
def test_residuals_of_unused_parameters_are_delivered(comm):
    model = Branches()
    optimizer = distribute(model, comm, descent(model), mpicomp.TopK(0.3), "allgather")
    model(batch(0, comm.rank), range(4)).square().mean().backward()
    optimizer.step()
    residuals = [optimizer.reducer.residual(f"branches.{place}.weight") for place in range(4)]
    assert any(residual.any() for residual in residuals)
    delivered = False
    for step in range(8):
        optimizer.zero_grad()
        model(batch(step, comm.rank), []).square().mean().backward()
        optimizer.step()
        delivered |= any(branch.weight.grad is not None for branch in model.branches)
    assert delivered
    assert_replicas(model, comm)


@pytest.mark.mpi
def test_shared_parameters_are_averaged_once(comm):
    model = network()
    model[2].weight = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
    model.append(torch.nn.Linear(2, 8))
    model.append(torch.nn.Linear(8, 8))
    model[6].weight = model[2].weight
    pair = Pair(comm, model)
    pair.run(range(5))
    pair.check()


@pytest.mark.mpi
def test_parameters_of_sixteen_bits(comm):
    def loss(model, step, rank):
        return model(batch(step, rank).to(torch.bfloat16)).float().square().mean()

    pair = Pair(comm, network().to(torch.bfloat16), sgd, loss)
    pair.run(range(4))
    assert pair.model[0].weight.grad.dtype == torch.bfloat16
    pair.check(rtol=0.05, atol=0.01)


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, False])
def test_sparse_gradients_are_made_dense_with_one_warning(comm, overlap, recwarn):
    def loss(model, step, rank):
        if step == 3 and rank == 0:
            return model.head(torch.ones(1, 3)).square().sum()  # this rank touches no word
        return words_loss(model, step, rank)

    settings = {"compressor": mpicomp.TopK(ratio=1.0), "collective": "allgather", "overlap": overlap}
    pair = Pair(comm, Words(), descent, loss, reference=Words(sparse=False), **settings)
    pair.run(range(6))
    pair.check()
    texts = [str(warning.message) for warning in recwarn]
    seen = [text for text in texts if "'words.weight' is sparse and is made dense" in text]
    assert len(seen) == (comm.rank == 0)


@pytest.mark.mpi(max_size=3)
def test_gradients_that_are_not_contiguous(comm):
    def loss(model, step, rank):
        images = torch.from_numpy(np.random.default_rng((step, rank)).normal(size=(2, 3, 6, 6)).astype(np.float32))
        return model(images.to(memory_format=torch.channels_last)).square().mean()

    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 2))
    pair = Pair(comm, model.to(memory_format=torch.channels_last), sgd, loss)
    pair.run(range(4))
    assert not pair.model[0].weight.grad.is_contiguous()
    pair.check()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize(
    ("make", "compressor", "wrapped"),
    [
        (adam, "dense", adam),
        (adamw, mpicomp.TopK(1.0), adamw),
        (sgd, mpicomp.DGC(1.0, momentum=0.9, masking=False), descent),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_one_rank_that_sends_all_is_the_plain_optimizer(make, compressor, wrapped):
    """DGC's momentum correction stands for the optimizer's momentum."""
    plain, model = network(), network()
    train(plain, make(plain), range(5), 0)
    optimizer = distribute(model, LocalWorld(1).transports[0], wrapped(model), compressor, "auto", overlap=None)
    train(model, optimizer, range(5), 0)
    if make is wrapped:
        assert_equal(plain, model)
    for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)
