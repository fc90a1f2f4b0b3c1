"""UpdateOptimizer: runs that resume from a checkpoint, with as many ranks or others."""

import json

import numpy as np
import pytest
from networks import Link

from mpicomp.errors import ConfigurationError
from mpicomp.transport import LocalWorld

torch = pytest.importorskip("torch")

from local_replicas import Updates, adam, network  # noqa: E402


def test_chosen_number_of_steps_is_resumed():
    def make():
        world = LocalWorld(2, True, 2, Link(50e-6, 2e6))
        return Updates(2, world=world, warmup=None, sync_every="auto")

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
def test_resumed_run_equals_the_whole_one(settings, after):
    ranks, again = (Updates(2, sync_every=2, **settings) for _ in range(2))
    ranks.run(range(after))
    states = ranks.states()
    json.dumps(states[0]["optimizer"]["mpicomp"]["fragments"][0]["reducer"]["policy"])
    again.load(states)
    for step in range(after, after + 5):
        ranks.step(step)
        again.step(step)
        assert ranks.bits() == again.bits()


def test_checkpoint_resumes_with_fewer_ranks(tmp_path):
    ranks, fewer = Updates(4, compressor="topk"), Updates(2, compressor="topk")
    ranks.run(range(3))
    residual = np.mean(ranks.residuals(), axis=0)
    ranks.through_a_checkpoint(tmp_path, fewer)
    np.testing.assert_allclose(fewer.values()[0], ranks.values()[0])
    np.testing.assert_allclose(np.mean(fewer.residuals(), axis=0), residual, atol=1e-12)
    fewer.step(3)
    assert fewer.same()


def test_states_of_other_models_are_refused():
    ranks = Updates(1)
    ranks.step(0)
    state = ranks.optimizers[0].state_dict()
    other = Updates(1, make=lambda: torch.nn.Linear(2, 2)).optimizers[0]
    with pytest.raises(ConfigurationError, match="the state is of another model: parameter 'weight'"):
        other.load_state_dict(state)
    fragments = Updates(1, fragments=2, sync_every=2).optimizers[0]
    with pytest.raises(ConfigurationError, match="the state has 1 fragments and the optimizer 2"):
        fragments.load_state_dict(state)
    plain = adam(network()).state_dict()
    ranks.optimizers[0].load_state_dict(plain)  # a plain optimizer's continues with the model's parameters
