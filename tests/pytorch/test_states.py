"""States are saved and read back by torch, as scripts do it, and training resumes bit for bit."""

import io

import pytest
import torch
from local_replicas import Updates, bits
from local_replicas import network as wide
from networks import Link
from replicas import adam, descent, distribute, train
from replicas import network as narrow

import mpicomp
from mpicomp.collectives import fitting
from mpicomp.errors import ConfigurationError
from mpicomp.mpi import LocalWorld

LEARNED = {"id": "lgc", "ratio": 0.3, "dense_steps": 1, "training_steps": 2}
COMPRESSORS = [*mpicomp.list_compressors(), LEARNED]


def network():
    torch.manual_seed(1)
    layers = [torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 24), torch.nn.Tanh(), torch.nn.Linear(24, 2)]
    return torch.nn.Sequential(*layers)


def through_a_file(state):
    """Return a state that torch.load reads by its defaults."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def kinds(state):
    found = {type(state)}
    for key, item in state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ():
        found |= {type(key)} | kinds(item)
    return found


def check(state):
    plain = {torch.Tensor, int, float, str, bool, type(None), dict, list}
    assert kinds(state["mpicomp"]) <= plain
    again = through_a_file(state)
    assert torch_equal(again, state)
    return again


def torch_equal(first, second):
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and first.tolist() == second.tolist()
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(torch_equal(item, second[key]) for key, item in first.items())
    if isinstance(first, list):
        return len(first) == len(second) and all(torch_equal(*pair) for pair in zip(first, second, strict=True))
    return first == second


def distributed(comm, make=network, **settings):
    model = make()
    return model, mpicomp.torch.DistributedOptimizer(adam(model), model.named_parameters(), comm=comm, **settings)


def alone(**settings):
    return distributed(LocalWorld(1).transports[0], **settings)


def resumed(make, halfway=4, stop=8, rank=0, change=lambda state: state):
    """Return the bits of a run, and of one that is stopped, saved, loaded and resumed."""
    whole, optimizer = make()
    train(whole, optimizer, range(stop), rank)
    optimizer.close()
    first, optimizer = make()
    train(first, optimizer, range(halfway), rank)
    saved = {"model": first.state_dict()} | change(check(optimizer.state_dict()))
    optimizer.close()
    second, optimizer = make()
    second.load_state_dict(saved.pop("model"))
    optimizer.load_state_dict(saved)
    train(second, optimizer, range(halfway, stop), rank)
    optimizer.close()
    return bits(whole), bits(second)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_state_of_every_compressor_resumes(compressor):
    whole, second = resumed(lambda: alone(compressor=compressor, policy="static", warmup=0))
    assert whole == second


@pytest.mark.parametrize("policy", mpicomp.list_policies())
def test_state_of_every_policy_is_read_back(policy):
    model, optimizer = alone(policy=policy, warmup=2)
    train(model, optimizer, range(30), 0)
    state = check(optimizer.state_dict())
    model, again = alone(policy=policy, warmup=2)
    again.load_state_dict(state)
    assert torch_equal(again.state_dict()["mpicomp"]["policy"], state["mpicomp"]["policy"])
    train(model, again, [30], 0)
    assert again.reducer.last_step.step == 30


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize(
    ("compressor", "overlap"),
    [("sidco", True), ("powersgd", False), ("dgc", False)],
)
def test_ranks_resume_from_a_file(comm, compressor, overlap):
    collective = fitting(mpicomp.get_compressor(compressor))[0]  # one that is chosen by measured seconds may change
    settings = {"compressor": compressor, "collective": collective, "warmup": 0, "overlap": overlap}
    if overlap:
        settings["bucket_bytes"] = 64  # several buckets
    whole, second = resumed(lambda: distributed(comm, **settings), rank=comm.rank)
    assert whole == second


UPDATES = {
    "outer": {"compressor": "topk", "sync_every": 2, "outer": {"lr": 0.7, "momentum": 0.9}, "feedback_decay": 0.95},
    "powersgd": {"compressor": "powersgd", "sync_every": 3},
    "random": {"compressor": "qsgd", "sync_every": 2},
    "auto": {"policy": "auto"},
}


@pytest.mark.parametrize("settings", UPDATES.values(), ids=UPDATES)
def test_state_of_updates_resumes(settings):
    """Up to where `auto` knows its statistics: a survey of two steps that a stop cuts is made again, a step later."""
    assert_resumes(lambda: Updates(2, make=lambda: wide(torch.float32), **settings), halfway=7, stop=12)


@pytest.mark.parametrize("compressor", [None, "onebit"])
def test_chosen_number_of_steps_is_resumed(compressor):
    def make():
        world = LocalWorld(2, True, 2, Link(50e-6, 2e6))
        return Updates(2, world=world, warmup=compressor and 0, sync_every="auto", compressor=compressor)

    ranks, again = make(), make()
    states = ranks.states()
    for state in states:
        state["optimizer"]["mpicomp"]["sync_every"] = 4
    ranks.load(states)
    ranks.run(range(2))
    again.load(ranks.states())
    assert [optimizer.sync_every for optimizer in again.optimizers] == [4, 4]
    same = []
    for step in range(2, 4):
        again.step(step)
        same.append(again.same())
    assert same == [False, True]


def test_state_of_updates_that_does_not_fit_is_refused():
    ranks = Updates(1)
    ranks.step(0)
    state = ranks.optimizers[0].state_dict()
    other = Updates(1, make=lambda: torch.nn.Linear(2, 2)).optimizers[0]
    with pytest.raises(ConfigurationError, match="the state is of another model: parameter 'weight'"):
        other.load_state_dict(state)
    ranks.optimizers[0].load_state_dict(adam(wide()).state_dict())  # a plain optimizer's


def assert_resumes(make, halfway, stop):
    """A run of replicas that is resumed from a file equals a whole one."""
    whole, first, second = make(), make(), make()
    whole.run(range(stop))
    first.run(range(halfway))
    second.load([state | {"optimizer": check(state["optimizer"])} for state in first.states()])
    second.run(range(halfway, stop))
    assert second.bits() == whole.bits()


@pytest.mark.parametrize("compiled", [(False, True), (True, False)], ids=["into compiled", "from compiled"])
def test_state_of_a_compiled_model_loads(compiled):
    def state_of(is_compiled, state=None, steps=range(4)):
        model = network()
        if is_compiled:
            model[2] = torch.compile(model[2], backend="eager")  # as regions of a model are
            model = torch.compile(model, backend="eager")
        end = LocalWorld(1).transports[0]
        optimizer = distribute(model, end, descent(model), "topk", "auto", warmup=0)
        if state is not None:
            optimizer.load_state_dict(state)
        train(model, optimizer, steps, 0)
        return optimizer.state_dict()

    state = state_of(compiled[0])
    loaded = state_of(compiled[1], state, steps=range(0))
    assert torch_equal(loaded["mpicomp"]["residuals"], state["mpicomp"]["residuals"])
    # A state may also have the names of the compiled model.
    residuals = {f"_orig_mod.{name}": item for name, item in state["mpicomp"]["residuals"].items()}
    old = state | {"mpicomp": state["mpicomp"] | {"residuals": residuals}}
    again = state_of(compiled[1], old, steps=range(0))
    assert torch_equal(again["mpicomp"]["residuals"], state["mpicomp"]["residuals"])


def test_state_of_another_model_is_refused():
    model, other = narrow(), torch.nn.Sequential(torch.nn.Linear(6, 9))
    optimizer, strange = (
        distribute(member, LocalWorld(1).transports[0], compressor="topk", collective="allgather")
        for member in (model, other)
    )
    train(model, optimizer, [0], 0)
    train(other, strange, [0], 0)
    before = optimizer.state_dict()
    with pytest.raises(
        ConfigurationError, match=r"of another model: .*\(9,\) for '0.bias', and this model has shape \(8,\)"
    ):
        optimizer.load_state_dict(strange.state_dict())
    assert torch_equal(optimizer.state_dict()["mpicomp"]["residuals"], before["mpicomp"]["residuals"])
    optimizer.load_state_dict({key: value for key, value in before.items() if key != "mpicomp"})
