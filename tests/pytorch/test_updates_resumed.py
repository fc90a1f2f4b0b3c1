"""UpdateOptimizer: runs that go on from a checkpoint, with as many ranks or others."""

import copy
import json

import numpy as np
import pytest
from networks import Link

import mpicomp
from mpicomp.checkpoint import load_rounds, save_rounds
from mpicomp.errors import ConfigurationError
from mpicomp.transport import LocalWorld

torch = pytest.importorskip("torch")

from updating import Ranks, adam, bits, loss_of, network  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_chosen_number_of_steps_is_resumed():
    def make():
        world = LocalWorld(2, True, 2, Link(50e-6, 2e6))
        models = [network() for _ in range(2)]
        own = [
            mpicomp.torch.UpdateOptimizer(adam(model), model.named_parameters(), sync_every="auto", comm=end)
            for model, end in zip(models, world.transports, strict=True)
        ]
        return world, models, own

    world, models, optimizers = make()
    optimizers[0]._mpicomp_every = optimizers[1]._mpicomp_every = 4
    for number in range(2):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
        world.run([optimizer.rounds() for optimizer in optimizers])
    again, models_again, optimizers_again = make()
    for here, there, own, other in zip(models, models_again, optimizers, optimizers_again, strict=True):
        there.load_state_dict(here.state_dict())
        other.load_state_dict(copy.deepcopy(own.state_dict()))
    assert [own.sync_every for own in optimizers_again] == [4, 4]
    same = []
    for number in range(2, 4):
        for rank, (model, optimizer) in enumerate(zip(models_again, optimizers_again, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
        again.run([optimizer.rounds() for optimizer in optimizers_again])
        same.append(bits(models_again[0]) == bits(models_again[1]))
    assert same == [False, True]


def save(ranks):
    kept = [
        (copy.deepcopy(model.state_dict()), copy.deepcopy(own.state_dict()))
        for model, own in zip(ranks.models, ranks.optimizers, strict=True)
    ]
    json.dumps(kept[0][1]["mpicomp"]["fragments"][0]["reducer"]["policy"])
    return kept


@pytest.mark.parametrize("after", [4, 5])
@pytest.mark.parametrize(
    "settings",
    [
        {"compressor": "topk", "outer": {"lr": 0.7, "momentum": 0.9}, "feedback_decay": 0.95},
        {"compressor": "qsgd"},
        {"compressor": "dense", "fragments": 2},
    ],
    ids=str,
)
def test_a_run_that_is_resumed_is_the_same(settings, after):
    ranks = Ranks(2, sync_every=2, **settings)
    for number in range(after):
        ranks.step(number)
    kept = save(ranks)
    again = Ranks(2, sync_every=2, **settings)
    for model, own, (parameters, state) in zip(again.models, again.optimizers, kept, strict=True):
        own.load_state_dict(state)
        model.load_state_dict(parameters)
    for number in range(after, after + 5):
        ranks.step(number)
        again.step(number)
        assert [bits(model) for model in ranks.models] == [bits(model) for model in again.models]


def test_a_checkpoint_goes_on_with_other_ranks(tmp_path):
    ranks = Ranks(4, compressor="topk")
    for number in range(3):
        ranks.step(number)
    owed = np.mean(ranks.residuals(), axis=0)
    states = [{"model": model, "optimizer": optimizer} for model, optimizer in save(ranks)]
    ranks.world.run(
        [save_rounds(tmp_path, state, 1, end.group) for state, end in zip(states, ranks.world.transports, strict=True)]
    )
    fewer = Ranks(2, compressor="topk")
    loaded = fewer.world.run([load_rounds(tmp_path, end.group) for end in fewer.world.transports])
    for model, own, state in zip(fewer.models, fewer.optimizers, loaded, strict=True):
        model.load_state_dict(state["model"])
        own.load_state_dict(state["optimizer"])
    np.testing.assert_allclose(fewer.values()[0], ranks.values()[0])
    np.testing.assert_allclose(np.mean(fewer.residuals(), axis=0), owed, atol=1e-12)
    fewer.step(3)
    assert len({bits(model) for model in fewer.models}) == 1


def test_states_of_other_models_are_refused():
    ranks = Ranks(1)
    ranks.step(0)
    state = ranks.optimizers[0].state_dict()
    other = mpicomp.torch.UpdateOptimizer(
        torch.optim.AdamW((model := torch.nn.Linear(2, 2)).parameters()),
        model.named_parameters(),
        comm=LocalWorld(1).transports[0],
    )
    with pytest.raises(ConfigurationError, match="the state is of another model: parameter 'weight'"):
        other.load_state_dict(state)
    fragments = Ranks(1, fragments=2, sync_every=2).optimizers[0]
    with pytest.raises(ConfigurationError, match="the state has 1 fragments and the optimizer 2"):
        fragments.load_state_dict(state)
    plain = adam(network()).state_dict()
    ranks.optimizers[0].load_state_dict(plain)  # a plain optimizer's goes on with the model's parameters
