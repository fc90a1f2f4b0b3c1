"""What replicas must have in common is compared, and what must differ: settings, parameters, states, batches."""

import copy
import pickle
import warnings

import pytest
import torch
from replicas import (
    adam,
    assert_equal,
    assert_replicas,
    batch,
    close_at_end,
    distribute,
    gloo,
    network,
    sgd,
    square,
    train,
)

import mpicomp
from mpicomp.errors import ConfigurationError, DisagreementError
from mpicomp.mpi import LocalWorld


def update(model, plain, comm, **settings):
    return close_at_end(mpicomp.torch.UpdateOptimizer(plain, model.named_parameters(), comm=comm, **settings))


WRAPPERS = {
    "gradients": lambda model, plain, comm, **settings: distribute(model, comm, plain, overlap=False, **settings),
    "overlap": lambda model, plain, comm, **settings: distribute(model, comm, plain, **settings),
    "updates": update,
}
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


def warned(caught, text):
    return [str(warning.message) for warning in caught if text in str(warning.message)]


@pytest.mark.mpi(min_size=2, max_size=3)
@each_wrapper
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model, rank: (adam if rank else sgd)(model), "optimizer must be the same .* SGD on rank 0 and Adam on"),
        (
            lambda model, rank: torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1 * rank),
            r"param_groups\[0\]\['weight_decay'\] must be the same on all ranks, got 0.0 on rank 0 and 0.1 on rank 1",
        ),
    ],
    ids=["class", "weight decay"],
)
def test_optimizers_that_differ_from_the_start_are_refused(comm, wrap, make, message):
    model = network()
    optimizer = wrap(model, make(model, comm.rank), comm)
    with pytest.raises(DisagreementError, match=message):
        train(model, optimizer, [0], comm.rank)


@pytest.mark.mpi(min_size=2, max_size=2)
@each_wrapper
@pytest.mark.parametrize(("scheduled", "tensor"), [(False, False), (True, True)])
def test_rate_that_differs_is_refused_in_that_step(comm, wrap, scheduled, tensor):
    """Both for a rate that had never changed and for one that a schedule changes in every step."""
    model = network()
    optimizer = wrap(model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1) if tensor else 0.1), comm)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9 if scheduled else 1.0)
    for number in range(70):
        train(model, optimizer, [number], comm.rank)
        schedule.step()
    before = copy.deepcopy(model)
    if comm.rank == comm.size - 1:
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] / 2
    with pytest.raises(DisagreementError, match=rf"\['lr'\] must be the same .* on rank {comm.size - 1}; a schedule"):
        train(model, optimizer, [70], comm.rank)
    assert_equal(before, model)
    if comm.rank == comm.size - 1:
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 2
    train(model, optimizer, range(71, 75), comm.rank)
    assert_replicas(model, comm)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_settings_that_stay_cost_no_round(comm):
    """Nor does one change, once it was compared and has not come again for some time."""
    model = network()
    optimizer = distribute(model, comm, overlap=False, compare_every=0)
    extra = []
    for number in range(80):
        if number in (5, 6):
            optimizer.param_groups[0]["lr"] *= 0.5
        train(model, optimizer, [number], comm.rank)
        extra.append(optimizer.reducer.last_step.overhead_bytes)
    quiet = extra[4]
    assert extra[5] > extra[6] > quiet  # compared in full, then digests
    assert extra[6] - quiet <= 16
    assert extra[78] == quiet


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize("lost", ["momentum", "value"])
def test_states_that_differ_after_a_load_are_refused(comm, lost):
    model = network()
    optimizer = distribute(model, comm)
    train(model, optimizer, range(2), comm.rank)
    state = optimizer.state_dict()
    if comm.rank == 1 and lost == "momentum":
        state["state"].pop(3)
    elif comm.rank == 1:
        state["state"][3]["momentum_buffer"][1] += 1e-3
    optimizer.load_state_dict(state)
    missing = "'2.bias, momentum_buffer' is on rank 0 but not on rank 1"
    message = {"momentum": missing, "value": "has other values on rank 1"}
    with pytest.raises(DisagreementError, match=message[lost]):
        train(model, optimizer, [2], comm.rank)


@pytest.mark.mpi(max_size=3)
@each_wrapper
@pytest.mark.parametrize(("same", "flag"), [(True, False), (True, True), (False, False)])
def test_ranks_that_draw_the_same_batches_are_warned(comm, wrap, same, flag):
    model = network()
    optimizer = wrap(model, sgd(model), comm, same_batches=flag)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, range(10), 0 if same else comm.rank)
    texts = warned(caught, "draw the same batches")
    assert len(texts) == (same and not flag and comm.size > 1 and comm.rank == 0)
    assert all("DistributedSampler" in text and "same_batches=True" in text for text in texts)


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize(("overlap", "fault"), [(True, "batches"), (False, "parameters")])
def test_ranks_of_a_ddp_hook_are_compared(comm, overlap, fault):
    with gloo(comm):
        model = torch.nn.parallel.DistributedDataParallel(network())
        state = mpicomp.torch.DDPState(model, "dense", comm=comm, overlap=overlap)
        model.register_comm_hook(state, mpicomp.torch.ddp_comm_hook)
        optimizer = sgd(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, optimizer, range(4), 0 if fault == "batches" else comm.rank)
        assert len(warned(caught, "draw the same batches")) == (fault == "batches" and comm.rank == 0)
        if fault == "parameters":
            with torch.no_grad():
                model.module[0].bias[0] += comm.rank
            with pytest.raises(DisagreementError, match=r"ddp_comm_hook: parameter '0.bias' has other values on rank"):
                train(model, optimizer, [4], comm.rank)
        state.close()


class Frozen(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)


@pytest.mark.mpi(max_size=3)
@each_wrapper
@pytest.mark.parametrize("alike", [True, False])
def test_parameter_frozen_with_a_gradient_stays_a_replica(comm, wrap, alike):
    """Its gradient is averaged, since torch steps by it, also where rank 0 alone has one."""
    model = Frozen()
    optimizer = wrap(model, sgd(model), comm)

    def loss(number, both):
        inputs = batch(number, comm.rank)
        return model.last(model.first(inputs) if both else inputs).square().mean()

    for number in range(5):
        optimizer.zero_grad()
        loss(number, both=alike or number != 1 or comm.rank == 0).backward()
        if number == 1:
            model.first.requires_grad_(False)
        optimizer.step()
        assert_replicas(model, comm)
    before = model.first.weight.clone()
    for number in range(5, 8):
        optimizer.zero_grad()
        loss(number, both=True).backward()
        optimizer.step()
    assert torch.equal(before, model.first.weight)
    assert_replicas(model, comm)


class TwoHalves(torch.optim.Optimizer):
    """Steps by two methods, as SAM does."""

    def __init__(self, params, lr, holds=True):
        super().__init__(params, {"lr": lr})
        if holds:
            self.inner = torch.optim.SGD(self.param_groups, lr=lr)

    @torch.no_grad()
    def first_half(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.data += 0.05 * parameter.grad

    def second_half(self):
        self.inner.step()


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("wrap", [WRAPPERS["gradients"], WRAPPERS["updates"]])  # overlap refuses the second backward
def test_optimizer_stepped_by_other_methods_is_refused(comm, wrap):
    model = network()
    with pytest.warns(UserWarning, match=r"TwoHalves holds another optimizer, optimizer.inner.*wrap optimizer.inner"):
        optimizer = wrap(model, TwoHalves(model.parameters(), lr=0.1), comm)
    for number in range(19):
        model.zero_grad()
        square(model, number, comm.rank).backward()
        (optimizer.second_half if number % 2 else optimizer.first_half)()
    model.zero_grad()
    loss = square(model, 19, comm.rank)
    with pytest.raises(ConfigurationError, match=r"filled gradients 20 times .* another method, such as first_step"):
        loss.backward()


def test_many_backward_passes_without_a_step_are_warned():
    model = network()
    optimizer = distribute(model, LocalWorld(1).transports[0], overlap=False)
    for number in range(19):
        square(model, number, 0).backward()
    loss = square(model, 19, 0)
    with pytest.warns(UserWarning, match=r"filled gradients 20 times without .* `with optimizer.accumulate\(\):`"):
        loss.backward()
    with optimizer.accumulate():
        for number in range(50):
            square(model, number, 0).backward()


def test_inner_optimizer_that_exchanges_is_refused():
    model = network()
    outer = TwoHalves(model.parameters(), lr=0.1)
    outer.inner = distribute(model, LocalWorld(1).transports[0], outer.inner, overlap=False)
    with pytest.raises(ConfigurationError, match=r"optimizer.inner, exchanges already; do not wrap the outer one"):
        distribute(model, LocalWorld(1).transports[0], outer)


@pytest.mark.mpi(max_size=3)
@each_wrapper
def test_new_head_in_the_middle_of_training_is_exchanged(comm, wrap):
    model = network()
    optimizer = wrap(model, sgd(model), comm)
    train(model, optimizer, range(3), comm.rank)
    torch.manual_seed(1)
    head = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=r"no name; pass names .*named_parameters\(prefix="):
        optimizer.add_param_group({"params": head.parameters()})
    with pytest.raises(ConfigurationError, match=r"two parameters are named '0.weight'"):
        optimizer.add_param_group({"params": [("0.weight", head.weight)]})
    optimizer.add_param_group({"params": head.named_parameters(prefix="head"), "lr": 0.2})
    before = head.weight.clone()
    whole = torch.nn.Sequential(model, head)
    train(whole, optimizer, range(3, 6), comm.rank)
    assert not torch.equal(before, head.weight)
    assert optimizer.reducer.residual("head.weight").shape == (2, 2)
    assert_replicas(whole, comm)
    optimizer.close()
    late = torch.nn.Linear(2, 2)
    optimizer.add_param_group({"params": late.parameters()})
    assert len(optimizer.param_groups) == 3
    optimizer = wrap(torch.nn.ModuleDict({"whole": whole, "late": late}), optimizer, comm)
    train(whole, optimizer, [0], comm.rank)


def test_scaler_is_pickled_as_it_was():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    distribute(network(), LocalWorld(1).transports[0], scaler=scaler, overlap=False)
    copied = pickle.loads(pickle.dumps(scaler))
    assert (type(copied), copied.get_scale()) == (torch.amp.GradScaler, 8.0)


@pytest.mark.mpi(min_size=2, max_size=2)
@each_wrapper
def test_model_in_ddp_is_refused(comm, wrap):
    with gloo(comm):
        model = torch.nn.parallel.DistributedDataParallel(network())
        with pytest.raises(ConfigurationError, match=r"in DistributedDataParallel, .* all \d ranks already"):
            wrap(model, sgd(model), comm)


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("copied", [True, False])
def test_residuals_of_one_rank_on_all_are_warned(comm, copied):
    """As a script loads them that has saved on rank 0 alone."""
    model = network()
    optimizer = distribute(model, comm, compressor="topk", collective="allgather", warmup=0)
    train(model, optimizer, range(2), comm.rank)
    state = optimizer.state_dict()
    optimizer.load_state_dict(comm.bcast(state) if copied else state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, [2], comm.rank)
    texts = warned(caught, "have loaded the residuals of one rank")
    assert len(texts) == (copied and comm.size > 1 and comm.rank == 0)
