"""DistributedOptimizer on one rank is the plain optimizer, and on several it is one large batch."""

import numpy as np
import pytest

import mpicomp
from mpicomp.errors import ConfigurationError
from mpicomp.transport import LocalWorld

torch = pytest.importorskip("torch")

from replicas import adam, assert_equal, assert_replicas, close_at_end, descent, network, square, train  # noqa: E402


def alone(optimizer, model, *args, **settings):
    end = LocalWorld(1).transports[0]
    named = model.named_parameters()
    return close_at_end(mpicomp.torch.DistributedOptimizer(optimizer, named, *args, comm=end, **settings))


def momentum_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize(
    ("make", "compressor", "wrapped"),
    [
        *((make, send_all, make) for make in (momentum_sgd, adam, adamw) for send_all in ("dense", mpicomp.TopK(1.0))),
        (momentum_sgd, mpicomp.DGC(1.0, momentum=0.9, masking=False), descent),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_one_rank_that_sends_all_is_the_plain_optimizer(make, compressor, wrapped):
    """DGC's momentum correction stands for the optimizer's momentum."""
    plain, model = network(), network()
    train(plain, make(plain), range(5), 0)
    train(model, alone(wrapped(model), model, compressor), range(5), 0)
    if make is wrapped:
        assert_equal(plain, model)
    for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)


def test_wrapped_optimizer_is_the_same_object():
    model = network()
    inner = momentum_sgd(model)
    optimizer = alone(inner, model)
    assert isinstance(optimizer, torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
    for _ in range(2):
        square(model, 0, 0).backward()
        optimizer.step()
        scheduler.step()
    assert seen == [0.1, 0.05]
    assert optimizer.reducer.last_step.lr == 0.05
    assert optimizer.param_groups is inner.param_groups
    state = optimizer.state_dict()
    other = network()
    fresh = alone(momentum_sgd(other), other)
    fresh.load_state_dict(state)
    assert fresh.param_groups[0]["lr"] == 0.025


def test_parameter_without_a_gradient_sends_zeros():
    model = network()
    optimizer = alone(descent(model, 1.0), model, mpicomp.TopK(ratio=0.01))
    square(model, 0, 0).backward()
    model[0].weight.grad = None
    optimizer.step()
    assert model[0].weight.grad is None  # on no rank, and without a residual
    assert model[0].bias.grad is not None
    assert optimizer.reducer.last_step.buckets[0].numel == sum(p.numel() for p in model.parameters())


def test_synchronize_then_clip_then_step_exchanges_once():
    model = network()
    optimizer = alone(descent(model, 1.0), model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    square(model, 0, 0).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, model.parameters(), strict=True)]).norm()
    np.testing.assert_allclose(moved.item(), 1e-3, rtol=1e-3)
    assert optimizer.reducer.last_step.step == 0
    optimizer.step()
    assert optimizer.reducer.last_step.step == 1


def test_closure_is_called_once_before_the_exchange():
    model = network()
    optimizer = alone(descent(model), model)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 6)).sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == calls[0]
    assert len(calls) == 1


def test_unserved_optimizers_are_refused():
    model = network()
    with pytest.raises(ConfigurationError, match="LBFGS asks for gradients many times"):
        alone(torch.optim.LBFGS(model.parameters()), model)
    optimizer = descent(model)
    with pytest.raises(
        ConfigurationError, match=r"2 parameters of the optimizer have no name, the first of shape \(8, 6\)"
    ):
        mpicomp.torch.DistributedOptimizer(optimizer, torch.nn.Sequential(*model[2:]).named_parameters())
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


def test_unknown_gradient_scaler_is_refused_in_the_step():
    model = network()
    optimizer = alone(descent(model), model)
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
def test_ranks_equal_one_large_batch(comm, compressor):
    model, plain = network(seed=comm.rank), network(seed=0)
    mpicomp.torch.broadcast_parameters(model, comm=comm)
    optimizer = close_at_end(mpicomp.torch.DistributedOptimizer(descent(model), model, compressor, comm=comm))
    reference = descent(plain)
    for step in range(10):
        batches = zip(*(batch(step, rank) for rank in range(comm.size)), strict=True)
        for member, stepped, (inputs, targets) in (
            (model, optimizer, batch(step, comm.rank)),
            (plain, reference, map(torch.cat, batches)),
        ):
            stepped.zero_grad()
            torch.nn.functional.mse_loss(member(inputs), targets).backward()
            stepped.step()
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.mpi
@pytest.mark.parametrize("collective", ["allgather", "star-topk"])
def test_replicas_stay_equal_and_learn(comm, collective):
    model = network(seed=comm.rank)
    mpicomp.torch.broadcast_parameters(model, comm=comm)
    settings = {"compressor": mpicomp.TopK(ratio=0.1), "collective": collective, "comm": comm}
    optimizer = close_at_end(mpicomp.torch.DistributedOptimizer(adam(model), model, **settings))
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        inputs, _ = batch(0, comm.rank)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs[:, :2])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert_replicas(model, comm)


def test_momentum_is_not_applied_twice():
    corrected, model = mpicomp.DGC(momentum=0.9), network()
    with pytest.raises(ConfigurationError, match="applies momentum before the exchange, and the optimizer would apply"):
        alone(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model, corrected)
    with pytest.raises(ConfigurationError, match="applies momentum before the exchange"):
        alone(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model, {"id": "dgc", "momentum": 0.9})
    for optimizer in (descent(model), torch.optim.Adam(model.parameters())):
        alone(optimizer, model, corrected).close()
    alone(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model, mpicomp.DGC()).close()
