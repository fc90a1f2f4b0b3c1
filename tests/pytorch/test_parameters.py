"""Parameters that are unused, shared, frozen, added, of 16 bits; gradients that are sparse, strided, not finite."""

import numpy as np
import pytest

import mpicomp
from mpicomp.errors import ConfigurationError, NonFiniteError

torch = pytest.importorskip("torch")

from replicas import Branches, Reference, assert_replicas, assert_same, batch, distribute, network, sgd, square, train  # noqa: E402

torch.set_num_threads(1)


@pytest.mark.mpi
@pytest.mark.parametrize("overlap", [True, False])
def test_parameters_that_some_or_all_ranks_do_not_use(comm, overlap):
    """With momentum and decay a parameter that nobody used has to stay as it is; one that somebody used does not."""

    def order(rank, step):
        return [place for place in range(4) if (step + place) % 3 and (rank + step * place) % 2]

    def loss(model, rank, step):
        return model(batch(step, rank), order(rank, step)).square().mean()

    def make(model):
        return sgd(model, weight_decay=0.1)

    model = Branches()
    reference = Reference(model, make, comm.size)
    optimizer = distribute(model, comm, make(model), overlap=overlap)
    for step in range(12):
        optimizer.zero_grad()
        loss(model, comm.rank, step).backward()
        optimizer.step()
        reference.step(lambda m, r, s=step: loss(m, r, s))
        used = {name for name, p in reference.model.named_parameters() if p.grad is not None}
        assert {name for name, p in model.named_parameters() if p.grad is not None} == used
    assert_same(model, reference)
    assert_replicas(model, comm)
    assert not optimizer.reducer.last_step.agreed  # what is known to be left out now and then costs no agreement
    optimizer.close()


@pytest.mark.mpi
def test_what_was_kept_back_is_delivered_to_parameters_that_nobody_uses_any_more(comm):
    model = Branches()
    optimizer = distribute(model, comm, torch.optim.SGD(model.parameters(), lr=0.1), mpicomp.TopK(0.3), "allgather")
    model(batch(0, comm.rank), range(4)).square().mean().backward()
    optimizer.step()
    kept = [optimizer.reducer.residual(f"branches.{place}.weight") for place in range(4)]
    assert any(residual.any() for residual in kept)
    delivered = False
    for step in range(8):
        optimizer.zero_grad()
        model(batch(step, comm.rank), []).square().mean().backward()
        optimizer.step()
        delivered |= any(branch.weight.grad is not None for branch in model.branches)
    assert delivered
    assert_replicas(model, comm)
    optimizer.close()


@pytest.mark.mpi
def test_shared_parameters(comm):
    def make():
        model = network()
        model[2].weight = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
        model.append(torch.nn.Linear(2, 8))
        model.append(torch.nn.Linear(8, 8))
        model[6].weight = model[2].weight
        return model

    model = make()
    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm)
    train(model, optimizer, reference, comm, 5)
    assert_same(model, reference)
    optimizer.close()


@pytest.mark.mpi
def test_frozen_then_unfrozen_and_a_group_added_later(comm):
    def freeze(model):
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        return model

    def make(model):
        return torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1, momentum=0.9)

    model = freeze(network())
    model[4].requires_grad_(False)
    reference = Reference(model, make, comm.size)
    optimizer = distribute(model, comm, make(model))
    for step in range(9):
        for each, own in ((model, optimizer), (reference.model, reference.optimizer)):
            if step == 3:
                each[0].requires_grad_(True)
            if step == 5:
                each[4].requires_grad_(True)
                own.add_param_group({"params": list(each[4].parameters()), "lr": 0.01})
            if step == 7:
                each[2].requires_grad_(False)
        optimizer.zero_grad()
        square(model, step, comm.rank).backward()
        optimizer.step()
        reference.step(lambda m, r, s=step: square(m, s, r))
        assert_same(model, reference)
    with pytest.raises(ConfigurationError, match="a parameter of the new group has no name"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 2
    optimizer.close()


@pytest.mark.mpi
def test_parameters_of_sixteen_bits(comm):
    model = network().to(torch.bfloat16)

    def loss(m, step, rank):
        return m(batch(step, rank).to(torch.bfloat16)).float().square().mean()

    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step, comm.rank).backward()
        assert model[0].weight.grad.dtype == torch.bfloat16
        optimizer.step()
        reference.step(lambda m, r, s=step: loss(m, s, r))
    assert_same(model, reference, rtol=0.05, atol=0.01)
    assert_replicas(model, comm)
    optimizer.close()


class Words(torch.nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(5)
        self.words = torch.nn.Embedding(50, 3, sparse=sparse)
        self.head = torch.nn.Linear(3, 1)

    def forward(self, tokens):
        return self.head(self.words(tokens).mean(1))


@pytest.mark.mpi
def test_sparse_gradients_go_row_by_row(comm):
    def loss(model, step, rank):
        rng = np.random.default_rng((step, rank))
        if step == 3 and rank == 0:
            return model.head(torch.ones(1, 3)).square().sum()  # this rank touches no word
        return model(torch.from_numpy(rng.integers(0, 50, (4, 5)))).square().sum()

    def make(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model, dense = Words(sparse=True), Words(sparse=False)
    reference = Reference(dense, make, comm.size)
    optimizer = distribute(model, comm, make(model), mpicomp.TopK(ratio=1.0), "allgather")
    for step in range(6):
        optimizer.zero_grad()
        loss(model, step, comm.rank).backward()
        optimizer.step()
        reference.step(lambda m, r, s=step: loss(m, s, r))
        gradient = model.words.weight.grad
        if comm.size == 1 and step == 3:
            assert gradient is None
            continue
        assert gradient.is_sparse
        touched = reference.model.words.weight.grad.abs().sum(1).nonzero()[:, 0]
        assert set(touched.tolist()) <= set(gradient.indices()[0].tolist())
        assert gradient.is_coalesced()
    assert_same(model, reference)
    assert_replicas(model, comm)
    optimizer.close()


@pytest.mark.mpi
@pytest.mark.parametrize("overlap", [True, False])
def test_sparse_gradients_stay_so_when_ranks_agree_anew_in_a_step_without_any(comm, overlap):
    model = Words(sparse=True)
    model.extra = torch.nn.Linear(1, 1)
    optimizer = distribute(model, comm, torch.optim.SGD(model.parameters(), lr=0.1), overlap=overlap)
    for step in range(5):
        optimizer.zero_grad()
        tokens = torch.from_numpy(np.random.default_rng((step, comm.rank)).integers(0, 50, (4, 5)))
        hidden = torch.ones(4, 1) if step == 2 else model(tokens)
        if step != 2:
            hidden = model.extra(hidden)
        (hidden + model.head(torch.ones(1, 3))).square().sum().backward()
        optimizer.step()
        assert optimizer.reducer.last_step.agreed == (step in (0, 2))
        assert model.words.weight.grad is None or model.words.weight.grad.is_sparse
        assert (model.words.weight.grad is None) == (step == 2)
    assert_replicas(model, comm)
    optimizer.close()


@pytest.mark.mpi
def test_gradients_that_are_not_contiguous(comm):
    def make_model():
        torch.manual_seed(2)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 2))
        return model.to(memory_format=torch.channels_last)

    def loss(model, step, rank):
        images = torch.from_numpy(np.random.default_rng((step, rank)).normal(size=(2, 3, 6, 6)).astype(np.float32))
        return model(images.to(memory_format=torch.channels_last)).square().mean()

    model = make_model()
    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step, comm.rank).backward()
        assert not model[0].weight.grad.is_contiguous()
        optimizer.step()
        reference.step(lambda m, r, s=step: loss(m, s, r))
    assert_same(model, reference)
    optimizer.close()


@pytest.mark.mpi
@pytest.mark.parametrize("sparse", [True, False])
def test_what_is_not_finite_on_one_rank_ends_the_step_on_all(comm, sparse):
    """Of the sparse model the embedding's gradient alone is not finite, which no bucket holds."""

    def loss(model, spoil):
        hidden = model.words(torch.arange(10).reshape(2, 5))
        if spoil:
            hidden.register_hook(lambda gradient: gradient * torch.nan)
        return model.head(hidden.mean(1)).sum()

    model = Words(sparse)
    optimizer = distribute(
        model, comm, torch.optim.SGD(model.parameters(), lr=0.1), mpicomp.TopK(ratio=0.2), "allgather"
    )
    loss(model, spoil=False).backward()
    optimizer.step()
    kept = optimizer.state_dict()["mpicomp"]["residuals"]
    for _ in range(2):
        model.zero_grad()
        loss(model, spoil=comm.rank == comm.size - 1).backward()
        with pytest.raises(NonFiniteError, match="gradients must be finite"):
            optimizer.step()
        after = optimizer.state_dict()["mpicomp"]["residuals"]
        assert all(np.array_equal(kept[name], after[name]) for name in kept)
    model.zero_grad()
    loss(model, spoil=False).backward()
    optimizer.step()
    optimizer.close()


@pytest.mark.mpi
def test_a_step_that_is_skipped_delivers_rows_of_zeros(comm):
    model = Words(sparse=True)
    optimizer = distribute(model, comm, torch.optim.SGD(model.parameters(), lr=0.1), nonfinite="skip")
    hidden = model.words(torch.arange(10).reshape(2, 5))
    if comm.rank == comm.size - 1:
        hidden.register_hook(lambda gradient: gradient * torch.nan)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.head(hidden.mean(1)).sum().backward()
    optimizer.step()
    assert optimizer.reducer.last_step.skipped
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.close()
