import numpy as np
import pytest

import mpicomp
from mpicomp.errors import ConfigurationError
from mpicomp.transport import LocalWorld

torch = pytest.importorskip("torch")


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def alone(optimizer, model, *args, **settings):
    end = LocalWorld(1).transports[0]
    return mpicomp.torch.DistributedOptimizer(optimizer, model.named_parameters(), *args, comm=end, **settings)


def backward(model, seed):
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(4, 6, generator=generator)).square().sum().backward()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    ],
    ids=["sgd", "adam", "adamw"],
)
@pytest.mark.parametrize("compressor", [mpicomp.Dense(), mpicomp.TopK(ratio=1.0)], ids=str)
def test_one_rank_that_sends_everything_is_the_plain_optimizer(make, compressor):
    plain, wrapped = network(), network()
    one = make(plain.parameters())
    two = alone(make(wrapped.parameters()), wrapped, compressor)
    for step in range(5):
        for model, optimizer in ((plain, one), (wrapped, two)):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    for left, right in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(left, right)


def test_it_is_the_same_optimizer_to_everyone_else():
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = alone(inner, model)
    assert isinstance(optimizer, torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
    for _ in range(2):
        backward(model, 0)
        optimizer.step()
        scheduler.step()
    assert seen == [0.1, 0.05]
    assert optimizer.reducer.last_step.lr == 0.05
    assert optimizer.param_groups is inner.param_groups
    state = optimizer.state_dict()
    other = network()
    fresh = alone(torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), other)
    fresh.load_state_dict(state)
    assert fresh.param_groups[0]["lr"] == 0.025


def test_a_parameter_without_a_gradient_takes_part_with_zeros():
    model = network()
    optimizer = alone(torch.optim.SGD(model.parameters(), lr=1.0), model, mpicomp.TopK(ratio=0.01))
    backward(model, 0)
    model[0].weight.grad = None
    optimizer.step()
    assert model[0].weight.grad is None  # on no rank, and nothing was kept back of it
    assert model[0].bias.grad is not None
    assert optimizer.reducer.last_step.buckets[0].numel == sum(p.numel() for p in model.parameters())


def test_synchronize_then_clip_then_step_exchanges_once():
    model = network()
    optimizer = alone(torch.optim.SGD(model.parameters(), lr=1.0), model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    backward(model, 0)
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, model.parameters(), strict=True)]).norm()
    np.testing.assert_allclose(moved.item(), 1e-3, rtol=1e-3)
    assert optimizer.reducer.last_step.step == 0
    optimizer.step()
    assert optimizer.reducer.last_step.step == 1


def test_a_closure_is_called_once_and_its_gradients_are_exchanged():
    model = network()
    optimizer = alone(torch.optim.SGD(model.parameters(), lr=0.1), model)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 6)).sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == calls[0]
    assert len(calls) == 1


def test_what_cannot_be_served_is_refused():
    model = network()
    with pytest.raises(ConfigurationError, match="LBFGS asks for gradients many times"):
        alone(torch.optim.LBFGS(model.parameters()), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ConfigurationError, match=r"2 parameters of the optimizer have no name, the first of shape \(8, 6\)"
    ):
        mpicomp.torch.DistributedOptimizer(optimizer, model[2].named_parameters())
    with pytest.raises(ConfigurationError, match="two parameters are named 'w'"):
        mpicomp.torch.DistributedOptimizer(optimizer, [("w", model[0].weight), ("w", model[0].bias)])
    with pytest.raises(ConfigurationError, match="a torch optimizer is needed, got Sequential"):
        mpicomp.torch.DistributedOptimizer(model, model.named_parameters())
    with pytest.raises(ConfigurationError, match="did you mean 'topk'"):
        alone(optimizer, model, "topkk")
    with pytest.raises(ConfigurationError, match="OneBitAdam exchanges by itself"):
        alone(mpicomp.torch.OneBitAdam(model.parameters(), comm=LocalWorld(1).transports[0]), model)
    with pytest.raises(ConfigurationError, match="is distributed already"):
        alone(alone(optimizer, model), model)


def test_a_gradient_scaler_is_refused_and_does_not_leave_ranks_out():
    model = network()
    optimizer = alone(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.full((1, 6), torch.inf)).sum()).backward()
    with pytest.raises(ConfigurationError, match=r"use torch\.autocast with bfloat16"):
        scaler.step(optimizer)


def test_shared_frozen_and_sixteen_bit_parameters():
    model = network()
    model[2].weight.requires_grad_(False)
    tied = torch.nn.ModuleDict({"a": model, "b": model[0]}).to(torch.bfloat16)
    optimizer = alone(torch.optim.SGD(tied.parameters(), lr=0.1), tied, mpicomp.TopK(ratio=0.5))
    tied["a"](torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    numel = sum(parameter.numel() for parameter in tied.parameters() if parameter.requires_grad)
    assert optimizer.reducer.last_step.buckets[0].numel == numel
    assert optimizer.reducer.residual("a.0.weight").dtype == np.float32


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    inputs = torch.from_numpy(rng.normal(size=(4, 6)).astype(np.float32))
    return inputs, torch.from_numpy(rng.normal(size=(4, 2)).astype(np.float32))


@pytest.mark.mpi
@pytest.mark.parametrize("compressor", ["dense", "topk"])  # whose first steps are dense
def test_ranks_together_are_one_large_batch(comm, compressor):
    torch.set_num_threads(1)
    model, reference = network(seed=comm.rank), network(seed=0)
    mpicomp.torch.broadcast_parameters(model, comm=comm)
    optimizer = mpicomp.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compressor=compressor, comm=comm
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(10):
        optimizer.zero_grad()
        inputs, targets = batch(step, comm.rank)
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        plain.zero_grad()
        batches = [batch(step, rank) for rank in range(comm.size)]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        torch.nn.functional.mse_loss(reference(inputs), targets).backward()
        plain.step()
    for left, right in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    optimizer.close()


@pytest.mark.mpi
@pytest.mark.parametrize("collective", ["allgather", "star-topk"])
def test_replicas_stay_equal_and_learn(comm, collective):
    torch.set_num_threads(1)
    model = network(seed=comm.rank)
    mpicomp.torch.broadcast_parameters(model, comm=comm)
    optimizer = mpicomp.torch.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01),
        model.named_parameters(),
        mpicomp.TopK(ratio=0.1),
        collective,
        comm=comm,
    )
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        inputs, _ = batch(0, comm.rank)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs[:, :2])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()
    everyones = np.empty((comm.size, mine.size), np.float32)
    comm.Allgather(mine, everyones)
    assert all(other.tobytes() == mine.tobytes() for other in everyones)
    optimizer.close()


@pytest.mark.mpi
def test_broadcast_of_all_kinds_of_tensors(comm):
    for root in range(comm.size):
        scale = 1.0 if comm.rank == root else -7.0
        model = torch.nn.BatchNorm1d(3)
        model.weight.data.fill_(scale)
        model.num_batches_tracked.fill_(int(scale * 5))
        extra = {
            "half": torch.full((2, 3), scale, dtype=torch.bfloat16).T,
            "flag": torch.tensor(scale > 0),
            "empty": torch.empty(0, 4),
            "odd": torch.full((1, 6), scale)[:, ::6],
            "wide": torch.full((5,), scale, dtype=torch.float64),
        }
        mpicomp.torch.broadcast_parameters(model, root=root, comm=comm)
        mpicomp.torch.broadcast_parameters(extra, root=root, comm=comm)
        assert model.weight.tolist() == [1, 1, 1]
        assert model.num_batches_tracked.item() == 5
        assert extra["half"].tolist() == [[1, 1]] * 3
        assert extra["flag"].item() is True
        assert extra["odd"].tolist() == [[1]]
        assert extra["wide"].tolist() == [1] * 5


@pytest.mark.mpi
def test_broadcast_of_models_that_differ(comm):
    if comm.size == 1:
        return
    model = torch.nn.Linear(3, 4 if comm.rank == 0 else 5)
    with pytest.raises(
        mpicomp.errors.DisagreementError, match="broadcast_parameters: 'weight' must have the same shape"
    ):
        mpicomp.torch.broadcast_parameters(model, comm=comm)
    with pytest.raises(ConfigurationError, match=f"root must be a rank from 0 to {comm.size - 1}, got 9"):
        mpicomp.torch.broadcast_parameters(torch.nn.Linear(2, 2), root=9, comm=comm)


def test_momentum_is_not_applied_twice():
    corrected, model = mpicomp.DGC(momentum=0.9), network()
    with pytest.raises(ConfigurationError, match="applies momentum before the exchange, and the optimizer would apply"):
        alone(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model, corrected)
    with pytest.raises(ConfigurationError, match="applies momentum before the exchange"):
        alone(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model, {"id": "dgc", "momentum": 0.9})
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())):
        alone(optimizer, model, corrected).close()
    alone(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model, mpicomp.DGC()).close()


def test_momentum_correction_that_sends_everything_is_momentum_sgd():
    plain, wrapped = network(), network()
    one = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    two = alone(torch.optim.SGD(wrapped.parameters(), lr=0.1), wrapped, mpicomp.DGC(1.0, momentum=0.9, masking=False))
    for step in range(5):
        for model, optimizer in ((plain, one), (wrapped, two)):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    for expected, parameter in zip(plain.parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)
