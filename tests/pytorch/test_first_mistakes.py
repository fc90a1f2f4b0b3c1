"""Mistakes of a script, on all ranks or one, are one error on all ranks that names what to write."""

import pytest
import torch
from replicas import assert_replicas, close_at_end, distribute, network, sgd, train

import mpicomp
from mpicomp.errors import ConfigurationError, DisagreementError

wrap, update = mpicomp.torch.DistributedOptimizer, mpicomp.torch.UpdateOptimizer


def scale(model, **settings):
    optimizer, scaler = close_at_end(wrap(sgd(model), model, **settings)), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.full((1, 6), torch.inf)).sum()).backward()
    scaler.step(optimizer)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


TWICE = "applies momentum before the exchange, and the optimizer would apply another one, 0.5"
MISTAKES = {
    "parameters": (lambda m, **c: wrap(sgd(m), m.parameters(), **c), r"pass named_parameters=model.named_parameters\("),
    "ratio": (lambda m, **c: wrap(sgd(m), m, "topk", ratio=0.05, **c), r"mpicomp.TopK\(ratio=0.05\).*'id': 'topk'"),
    "spelling": (lambda m, **c: wrap(sgd(m), m, "topk", sede=1, **c), "unknown name 'sede'; did you mean 'seed'"),
    "other_model": (
        lambda m, **c: wrap(sgd(m), m[2:], **c),
        r"2 parameters of the optimizer have no name, the first of shape \(8, 6\)",
    ),
    "names": (lambda m, **c: wrap(sgd(m), [("w", p) for p in m.parameters()], **c), "two parameters are named 'w'"),
    "model": (lambda m, **c: wrap(m, m, **c), "a torch optimizer is needed, got Sequential"),
    "scaler": (scale, r"use torch\.autocast with bfloat16"),
    "momentum": (lambda m, **c: wrap(momentum(m), m, mpicomp.DGC(momentum=0.9), **c), TWICE),
    "sparse_adam": (
        lambda m, **c: wrap(torch.optim.SparseAdam(m.parameters()), m, **c),
        "SparseAdam takes no dense gradients",
    ),
    "lbfgs": (lambda m, **c: wrap(torch.optim.LBFGS(m.parameters()), m, **c), "use mpicomp.torch.UpdateOptimizer"),
}


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize(("make", "message"), MISTAKES.values(), ids=MISTAKES)
def test_first_mistake_names_what_to_write(comm, make, message):
    with pytest.raises(ConfigurationError, match=message):
        make(network(), comm=comm)


TRAINED = {
    "distributed": lambda p, c: wrap(torch.optim.SGD([p], lr=0.1), {"w": p}, comm=c),
    "updates": lambda p, c: update(torch.optim.SGD([p], lr=0.1), {"w": p}, comm=c),
}
KINDS = {
    "float8": (lambda: torch.ones(3, dtype=torch.float8_e4m3fn), r"is of float8_e4m3fn; .*complex128"),
    "meta": (lambda: torch.ones(3, device="meta"), "on the device 'meta'"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "has the layout torch.sparse_coo"),
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, "has no shape yet"),
    "conjugated": (lambda: torch.ones(3, dtype=torch.complex64).conj(), "conjugates or negates lazily"),
}


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("make", TRAINED.values(), ids=TRAINED)
@pytest.mark.parametrize(("parameter", "message"), KINDS.values(), ids=KINDS)
def test_unserved_parameter_is_refused_when_made(comm, make, parameter, message):
    bad = comm.rank == comm.size - 1  # all ranks raise what one of them finds
    tensor = parameter() if bad else torch.ones(3)
    tensor = tensor if isinstance(tensor, torch.nn.Parameter) else torch.nn.Parameter(tensor)
    with pytest.raises(ConfigurationError, match=message):
        make(tensor, comm)


class Renormed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows = torch.nn.Embedding(12, 4, max_norm=0.5)

    def forward(self, places):
        return self.rows(places).square().sum()


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize("make", [wrap, update])
def test_forward_that_writes_to_a_weight_is_named(comm, make):
    """Rows that a batch looks up are scaled, so that ranks with different batches hold different weights."""
    model = Renormed()
    with pytest.raises(ConfigurationError, match=r"'rows' has max_norm=0.5: forward .* writes to its weight.*renorm_"):
        make(sgd(model), model, comm=comm)
    optimizer = close_at_end(make(sgd(model), model.named_parameters(), comm=comm))
    with pytest.raises(DisagreementError, match=r"parameter 'rows.weight' has other values"):
        train(model, optimizer, range(2), comm.rank, lambda m, _, rank: m(torch.arange(3) + 3 * rank % 12))


def of_two_layers(model, **settings):
    return torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1, **settings)


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize(("compressor", "steps"), [("dense", 3), ("topk", 0)])
def test_group_added_on_one_rank_is_refused(comm, compressor, steps):
    model = network()
    plain = of_two_layers(model, momentum=0.9)
    collective = "allreduce" if compressor == "dense" else "allgather"
    optimizer = distribute(model, comm, plain, compressor, collective)
    train(model, optimizer, range(steps), comm.rank)
    if comm.rank == comm.size - 1:
        optimizer.add_param_group({"params": list(model[4].parameters())})
    message = rf"all ranks must pass the same names; '4.bias' is on rank {comm.size - 1} but not on rank 0"
    with pytest.raises(DisagreementError, match=message):
        train(model, optimizer, [7], comm.rank)
    # Mended, all go on.
    if comm.rank < comm.size - 1:
        optimizer.add_param_group({"params": list(model[4].parameters())})
    train(model, optimizer, range(8, 10), comm.rank)
    assert optimizer.reducer.last_step.step == steps + 1
    assert_replicas(model, comm)


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("whose", ["all", "one"])
def test_parameter_put_into_a_group_by_hand_is_refused(comm, whose):
    """It would be trained on each rank by itself."""
    model = network()
    plain = of_two_layers(model)
    optimizer = distribute(model, comm, plain)
    train(model, optimizer, range(2), comm.rank)
    if whose == "all" or comm.rank == 0:
        optimizer.param_groups[0]["params"].append(model[4].bias)
    with pytest.raises(ConfigurationError, match=r"holds a parameter of shape \(2,\) that is not exchanged"):
        train(model, optimizer, [2], comm.rank)
