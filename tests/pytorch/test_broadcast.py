"""Broadcast of models of every kind, and of the state of optimizers."""

import contextlib
import copy

import pytest
import torch
from replicas import assert_equal, assert_replicas, close_at_end, distribute, network, sgd, square, train

import mpicomp
from mpicomp.errors import ArrayTypeError, ConfigurationError, DisagreementError

broadcast, broadcast_state = mpicomp.torch.broadcast_parameters, mpicomp.torch.broadcast_optimizer_state


@pytest.mark.mpi
def test_broadcast_of_all_kinds_of_tensors(comm):
    for root in range(comm.size):
        rank = (comm.rank - root) % comm.size
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        model.register_buffer("turned", torch.full((2,), 1j * (1 + rank), dtype=torch.complex64).conj())
        model.register_buffer("expanded", torch.full((1,), 1.0 + rank).expand(4))
        model.register_buffer("thin", torch.full((2, 3), 1.0 + rank, dtype=torch.bfloat16).T)
        model.register_buffer("flag", torch.tensor(rank == 0))
        model.register_buffer("empty", torch.empty(0, 4))
        model.register_buffer("odd", torch.full((1, 6), 1.0 + rank)[:, ::6])
        broadcast(model, root=root, comm=comm)
        assert model.turned.tolist() == [-1j, -1j]
        assert model.expanded.tolist() == [1] * 4
        assert (model.thin.tolist(), model.flag.item(), model.odd.tolist()) == ([[1, 1]] * 3, True, [[1]])
        assert_replicas(model, comm)


@pytest.mark.mpi(min_size=2, max_size=3)
def test_broadcast_of_models_that_differ_is_refused(comm):
    model = torch.nn.Linear(3, 4 if comm.rank == 0 else 5)
    with pytest.raises(DisagreementError, match="broadcast_parameters: 'weight' must have the same shape"):
        broadcast(model, comm=comm)
    with pytest.raises(ConfigurationError, match=f"root must be a rank from 0 to {comm.size - 1}, got 9"):
        broadcast(torch.nn.Linear(2, 2), root=9, comm=comm)


def unregistered():
    model = torch.nn.Module()
    model.layers = [torch.nn.Linear(2, 2)]
    return model


def used_up():
    named = network().named_parameters()
    list(named)
    return named


REFUSED = {
    "lazy": (lambda: torch.nn.LazyLinear(2), "'weight' has no shape yet; run one batch"),
    "meta": (lambda: torch.nn.Linear(2, 2, device="meta"), r"'weight' is on the device 'meta'.*to_empty"),
    "unregistered": (unregistered, "there is no tensor to send; models in a plain list .*ModuleList"),
    "used_up": (used_up, r"no tensor to send; an iterator such as model.named_parameters\(\) is used up"),
    "list": (lambda: list(network().parameters()), "got a parameter without a name; pass the model"),
    "optimizer": (lambda: sgd(network()), r"got SGD; call mpicomp.torch.broadcast_optimizer_state\(optimizer\)"),
    "state": (lambda: sgd(network()).state_dict(), r"got the state of an optimizer; call .*broadcast_optimizer_state"),
    "sparse": (lambda: {"w": torch.eye(3).to_sparse()}, "'w' has the layout torch.sparse_coo; send its indices"),
    "twice": (lambda: [("w", torch.ones(1)), ("w", torch.ones(1))], "two tensors have the same name"),
    "number": (lambda: 5, "got int; pass the model"),
}


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_broadcast_without_values_to_send_is_refused(comm, make, message):
    with pytest.raises(ConfigurationError, match=message):
        broadcast(make(), comm=comm)
    wrong = make() if comm.rank == 0 else torch.nn.Linear(2, 2)
    if comm.size > 1:
        with pytest.raises((ConfigurationError, DisagreementError, ArrayTypeError)):
            broadcast(wrong, comm=comm)


OPTIMIZERS = {
    "rate": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01)),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2),
}


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("started", [False, True])
def test_state_resumed_on_one_rank_reaches_all(comm, make, started):
    """All ranks continue as one that never stopped, whether or not they had state before."""
    model = network()
    optimizer = make(model)
    other = network(seed=1 + comm.rank)
    fresh = make(other)
    if started:
        step_all(other, fresh, 2, comm.rank)
    step_all(model, optimizer, 3, 0)
    optimizer.param_groups[0]["lr"] *= 0.5
    root = comm.size - 1
    received, received_state = (model, optimizer) if comm.rank == root else (other, fresh)
    broadcast(received, root=root, comm=comm)
    broadcast_state(received_state, root=root, comm=comm)
    assert str(received_state.state_dict()) == str(optimizer.state_dict())
    step_all(model, optimizer, 2, 0)
    if received is not model:
        step_all(received, received_state, 2, 0)
    assert_equal(received, model)


def step_all(model, optimizer, steps, rank):
    for step in range(steps):

        def closure(step=step):
            optimizer.zero_grad()
            loss = square(model, step, rank)
            loss.backward()
            return loss

        optimizer.step(closure)


OUTER = {"lr": 0.7, "momentum": 0.9}
WRAPPERS = {
    "overlap": lambda model, comm: distribute(model, comm, sgd(model), "topk", "allgather"),
    "updates": lambda model, comm: close_at_end(
        mpicomp.torch.UpdateOptimizer(sgd(model), model, 1, "topk", "allgather", warmup=0, outer=OUTER, comm=comm)
    ),
}


def residuals_of(optimizer):
    state = optimizer.state_dict()["mpicomp"]
    return state.get("reducer", state)["residuals"]


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_state_that_one_rank_has_loaded_is_resumed_without_residuals(comm, wrap):
    model = network()
    optimizer = wrap(model, comm)
    train(model, optimizer, range(3), comm.rank)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    optimizer.close()
    model = network()
    optimizer = wrap(model, comm)
    if comm.rank == 0:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    broadcast(model, comm=comm)
    if not hasattr(optimizer, "sync_every"):
        with pytest.raises(DisagreementError, match=r"call mpicomp\.torch\.broadcast_optimizer_state"):
            train(model, optimizer, [3], comm.rank)
    warned = pytest.warns(UserWarning, match=f"on 1 of {comm.size} ranks, is left out, and residuals start at zero")
    with warned if comm.rank == 0 else contextlib.nullcontext():
        broadcast_state(optimizer, comm=comm)
    assert all((residual == 0).all() for residual in optimizer.reducer.state_dict()["residuals"].values())
    train(model, optimizer, range(3, 6), comm.rank)
    assert_replicas(model, comm)
    # What each rank has loaded stays.
    optimizer.load_state_dict(optimizer.state_dict())
    before = residuals_of(optimizer)
    broadcast_state(optimizer, comm=comm)
    after = residuals_of(optimizer)
    assert any(residual.any() for residual in before.values())
    assert all(torch.equal(after[name], residual) for name, residual in before.items())


class WithEntry(torch.nn.Linear):
    def state_dict(self, *arguments, **settings):
        return super().state_dict(*arguments, **settings) | {"_about": {"in_features": 2}, "made": "here"}


@pytest.mark.mpi(max_size=2)
def test_entries_that_are_no_tensors_are_passed_over(comm):
    model = WithEntry(2, 2)
    model.register_buffer("seen", torch.full((2,), float(comm.rank)))
    warned = pytest.warns(UserWarning, match="passed over, since they are no tensors: '_about', 'made'")
    with warned if comm.rank == 0 else contextlib.nullcontext():
        broadcast(model, comm=comm)
    assert not model.seen.any()


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.Adam(model.parameters()),
        lambda model: torch.optim.SGD([{"params": [parameter]} for parameter in model.parameters()], lr=0.1),
        lambda model: torch.optim.SGD(list(model.parameters())[1:], lr=0.1),
    ],
    ids=["class", "groups", "parameters"],
)
def test_states_of_optimizers_that_differ_are_refused(comm, make):
    model = network()
    optimizer = make(model) if comm.rank == 1 else sgd(model)
    with pytest.raises(DisagreementError, match="broadcast_optimizer_state"):
        broadcast_state(optimizer, comm=comm)
    with pytest.raises(ConfigurationError, match="a torch optimizer is needed, got Sequential"):
        broadcast_state(model, comm=comm)
