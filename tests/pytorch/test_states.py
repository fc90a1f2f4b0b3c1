"""What state_dict() returns is saved and read back by torch, as scripts do it, and training goes on bit for bit."""

import io

import numpy as np
import pytest

import mpicomp
from mpicomp.checkpoint import load_rounds, save_rounds
from mpicomp.collectives import fitting
from mpicomp.transport import LocalWorld

torch = pytest.importorskip("torch")

from optimizers import Replicas  # noqa: E402
from replicas import square  # noqa: E402
from updating import Ranks, bits, loss_of  # noqa: E402
from updating import network as wide  # noqa: E402

from mpicomp.systems.optimizers.power_gossip import PowerGossip  # noqa: E402
from mpicomp.systems.optimizers.sketched_amsgrad import SketchedAMSGrad  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
LEARNED = {"id": "lgc", "ratio": 0.3, "dense_steps": 1, "training_steps": 2}
COMPRESSORS = [*mpicomp.list_compressors(), LEARNED | {"code": "linear"}, LEARNED | {"code": "autoencoder"}]


def network():
    torch.manual_seed(1)
    layers = [torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 24), torch.nn.Tanh(), torch.nn.Linear(24, 2)]
    return torch.nn.Sequential(*layers)


def through_a_file(state):
    """Return what torch.load makes of it, by its defaults."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def kinds(state):
    """Return the types of all that a state is made of."""
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
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, mpicomp.torch.DistributedOptimizer(adam, model.named_parameters(), comm=comm, **settings)


def run(model, optimizer, steps, rank=0):
    for step in steps:
        optimizer.zero_grad()
        square(model, step, rank).backward()
        optimizer.step()


def resumed(make, halfway=4, stop=8, rank=0, change=lambda state: state):
    """Return the bits of a run, and of one that is stopped, saved, loaded and goes on."""
    whole, optimizer = make()
    run(whole, optimizer, range(stop), rank)
    optimizer.close()
    first, optimizer = make()
    run(first, optimizer, range(halfway), rank)
    saved = {"model": first.state_dict()} | change(check(optimizer.state_dict()))
    optimizer.close()
    second, optimizer = make()
    second.load_state_dict(saved.pop("model"))
    optimizer.load_state_dict(saved)
    run(second, optimizer, range(halfway, stop), rank)
    optimizer.close()
    return bits(whole), bits(second)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_state_of_every_compressor_goes_on(compressor):
    whole, second = resumed(
        lambda: distributed(LocalWorld(1).transports[0], compressor=compressor, policy="static", warmup=0)
    )
    assert whole == second


@pytest.mark.parametrize("policy", mpicomp.list_policies())
def test_state_of_every_policy_is_read_back(policy):
    def make():
        return distributed(LocalWorld(1).transports[0], policy=policy, warmup=2)

    model, optimizer = make()
    run(model, optimizer, range(30))
    state = check(optimizer.state_dict())
    model, again = make()
    again.load_state_dict(state)
    assert torch_equal(again.state_dict()["mpicomp"]["policy"], state["mpicomp"]["policy"])
    run(model, again, [30])
    assert again.reducer.last_step.step == 30


@pytest.mark.mpi
@pytest.mark.parametrize("compressor", ["sidco", "powersgd", "fetchsgd", "dgc"])
def test_ranks_go_on_after_a_file(comm, compressor):
    collective = fitting(mpicomp.get_compressor(compressor))[0]  # one that is chosen by measured seconds may change
    settings = {"compressor": compressor, "collective": collective, "warmup": 0}
    whole, second = resumed(lambda: distributed(comm, **settings), rank=comm.rank)
    assert whole == second


@pytest.mark.mpi
def test_gossip_goes_on_after_a_file(comm):
    def make():
        model = network()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, PowerGossip(sgd, comm=comm)

    whole, second = resumed(make, rank=comm.rank)
    assert whole == second


@pytest.mark.parametrize(
    "settings",
    [
        {"compressor": "topk", "sync_every": 2, "fragments": 2},
        {"compressor": "onebit", "second_moments": "shared", "outer": {"lr": 0.7, "momentum": 0.9, "nesterov": True}},
        {"compressor": "powersgd", "sync_every": 3, "sync_delay": 1},
    ],
    ids=["fragments", "outer and moments", "late"],
)
def test_state_of_updates_goes_on(settings):
    def train(ranks, steps):
        for number in steps:
            ranks.step(number)

    whole, first, second = (Ranks(2, **settings) for _ in range(3))
    train(whole, range(9))
    train(first, range(5))
    for model, optimizer, old, other in zip(
        second.models, second.optimizers, first.models, first.optimizers, strict=True
    ):
        model.load_state_dict(old.state_dict())
        optimizer.load_state_dict(check(other.state_dict()))
    train(second, range(5, 9))
    assert [bits(model) for model in second.models] == [bits(model) for model in whole.models]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(mpicomp.torch.OneBitAdam, {"warmup_steps": 2}), (SketchedAMSGrad, {})],
)
def test_state_of_optimizers_goes_on(kind, settings):
    whole, first, second = (Replicas(kind, wide, 2, **settings) for _ in range(3))
    whole.train(loss_of, range(8))
    first.train(loss_of, range(4))
    for model, optimizer, old, other in zip(
        second.models, second.optimizers, first.models, first.optimizers, strict=True
    ):
        model.load_state_dict(old.state_dict())
        optimizer.load_state_dict(check(other.state_dict()))
    second.train(loss_of, range(4, 8))
    assert second.bits() == whole.bits()


def test_state_of_before_with_arrays_goes_on():
    def of_before(state):
        def arrays(value):
            if isinstance(value, dict):
                return {key: arrays(item) for key, item in value.items()}
            if isinstance(value, list):
                return [arrays(item) for item in value]
            return value.numpy() if isinstance(value, torch.Tensor) else np.float64(value) if value == 0.5 else value

        file = io.BytesIO()
        torch.save(state | {"mpicomp": arrays(state["mpicomp"])}, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    whole, second = resumed(
        lambda: distributed(LocalWorld(1).transports[0], compressor="powersgd", warmup=0), change=of_before
    )
    assert whole == second


@pytest.mark.parametrize("compiled", [(False, True), (True, False)], ids=["into compiled", "from compiled"])
def test_state_of_a_compiled_model_loads(compiled):
    def state_of(is_compiled, state=None, steps=range(4)):
        model = network()
        if is_compiled:
            model[2] = torch.compile(model[2], backend="eager")  # as regions of a model are
            model = torch.compile(model, backend="eager")
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        end = LocalWorld(1).transports[0]
        optimizer = mpicomp.torch.DistributedOptimizer(sgd, model.named_parameters(), "topk", warmup=0, comm=end)
        if state is not None:
            optimizer.load_state_dict(state)
        run(model, optimizer, steps)
        return optimizer.state_dict()

    state = state_of(compiled[0])
    loaded = state_of(compiled[1], state, steps=range(0))
    assert torch_equal(loaded["mpicomp"]["residuals"], state["mpicomp"]["residuals"])
    # A state of an earlier version has the names that it was trained with.
    residuals = {f"_orig_mod.{name}": item for name, item in state["mpicomp"]["residuals"].items()}
    old = state | {"mpicomp": state["mpicomp"] | {"residuals": residuals}}
    again = state_of(compiled[1], old, steps=range(0))
    assert torch_equal(again["mpicomp"]["residuals"], state["mpicomp"]["residuals"])


def test_checkpoints_keep_and_share_out_tensors(tmp_path):
    ranks = Ranks(2, compressor="topk", sync_every=1)
    ranks.step(0)
    states = [optimizer.state_dict() for optimizer in ranks.optimizers]
    ends = ranks.world.transports
    ranks.world.run([save_rounds(tmp_path, state, 1, end.group) for state, end in zip(states, ends, strict=True)])
    loaded = ranks.world.run([load_rounds(tmp_path, end.group) for end in ends])
    assert all(torch_equal(again["mpicomp"], state["mpicomp"]) for again, state in zip(loaded, states, strict=True))
    (alone,) = (world := LocalWorld(1)).run([load_rounds(tmp_path, world.transports[0].group)])
    for name, residual in alone["mpicomp"]["fragments"][0]["reducer"]["residuals"].items():
        of_ranks = [state["mpicomp"]["fragments"][0]["reducer"]["residuals"][name] for state in states]
        assert torch.equal(residual, (of_ranks[0].double() / 2 + of_ranks[1].double() / 2).to(of_ranks[0].dtype))
