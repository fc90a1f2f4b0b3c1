"""Laws of optimizers whose step is an exchange: OneBitAdam and SketchedAMSGrad."""

import copy

import numpy as np
import pytest

import mpicomp
from mpicomp.errors import ConfigurationError, NonFiniteError
from mpicomp.transport import LocalWorld

torch = pytest.importorskip("torch")
from local_replicas import Regression, Replicas  # noqa: E402, it needs torch

from mpicomp.systems.optimizers.sketched_amsgrad import SketchedAMSGrad  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
PROBLEM = Regression(17, 21, {6: 1e-2})
SKETCH = mpicomp.CountSketch(ratio=0.02, rows=3, columns=0.1, candidates=4, wire=None)
KINDS = [(mpicomp.torch.OneBitAdam, {"warmup_steps": 2}), (SketchedAMSGrad, {"compressor": SKETCH})]
kinds = pytest.mark.parametrize(("kind", "settings"), KINDS, ids=["onebit", "sketched"])


def replicas(kind, ranks, settings):
    return Replicas(kind, PROBLEM.model, ranks, PROBLEM.loss, lr=0.01, **settings)


def single(kind, parameters, **settings):
    return kind(parameters, comm=LocalWorld(1).transports[0], **settings)


@kinds
@pytest.mark.parametrize("at", [1, 2, 3, 7])
def test_resumed_run_equals_the_whole_one(kind, settings, at):
    trained, again = replicas(kind, 3, settings), replicas(kind, 3, settings)
    trained.run(range(at))
    again.load(trained.states())
    for step in range(at, 20):
        trained.step(step)
        again.step(step)
        assert trained.bits() == again.bits()
    assert again.optimizers[0].steps == 20


@kinds
def test_step_runs_a_closure_and_is_recorded(kind, settings):
    model = PROBLEM.model()
    optimizer = single(kind, model.named_parameters(), lr=0.5, **settings)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)

    def closure():
        optimizer.zero_grad()
        loss = PROBLEM.loss(model, 0, 0)
        loss.backward()
        return loss

    seen = []
    for _ in range(3):
        assert optimizer.step(closure).item() > 0
        scheduler.step()
        seen.append((optimizer.reducer.compressor.id, optimizer.reducer.last_step.lr))
    names = ["dense", "dense", "onebit"] if kind is mpicomp.torch.OneBitAdam else ["countsketch"] * 3
    assert [name for name, _ in seen] == names
    np.testing.assert_allclose([lr for _, lr in seen], [0.5, 0.05, 0.005])
    [*_, residuals] = [state["residuals"] for state in optimizer.state_dict()["mpicomp"]["reducers"].values()]
    assert set(residuals) == {"weight", "bias"}
    optimizer.close()


@kinds
def test_groups_have_settings_and_names_may_be_left_out(kind, settings):
    model = PROBLEM.model()
    groups = [{"params": [model.weight], "lr": 0.0}, {"params": [("offset", model.bias)]}]
    optimizer = single(kind, groups, lr=0.1, **settings)
    before = model.weight.detach().clone()
    for step in range(4):
        optimizer.zero_grad()
        PROBLEM.loss(model, 0, step).backward()
        optimizer.step()
    assert torch.equal(model.weight, before)
    assert optimizer.reducer.residual("offset").any()
    assert optimizer.reducer.residual("0").shape == (21, 17)
    with pytest.raises(ConfigurationError, match="two parameters are named 'a'"):
        single(kind, [("a", model.weight), ("a", model.bias)], **settings)


@kinds
@pytest.mark.parametrize("steps", [1, 4])
def test_nonfinite_gradient_changes_nothing(kind, settings, steps):
    trained = replicas(kind, 2, settings)
    trained.run(range(steps))
    before = trained.bits()
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in trained.optimizers]
    trained.models[1].weight.grad[3, 3] = torch.nan
    with pytest.raises(NonFiniteError):
        trained.exchange()
    assert trained.bits() == before
    for optimizer, state in zip(trained.optimizers, states, strict=True):
        for place, tensors in optimizer.state_dict()["state"].items():
            for name, value in tensors.items():
                assert torch.equal(value, state["state"][place][name])
    trained.run(range(steps, 10))
    assert trained.same()


@kinds
def test_impossible_settings_and_states_are_refused(kind, settings):
    model = PROBLEM.model()
    for wrong, text in (
        ({"lr": -1}, "lr must be at least 0, got -1"),
        ({"betas": (0.9, 1.0)}, "betas must be at least"),
    ):
        with pytest.raises(ConfigurationError, match=f"{kind.__name__}: {text}"):
            single(kind, model.parameters(), **settings | wrong)
    optimizer = single(kind, model.parameters(), **settings)
    with pytest.raises(ConfigurationError, match="the state is of another optimizer"):
        optimizer.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
    with pytest.raises(ConfigurationError, match=f"{kind.__name__} exchanges by itself"):
        mpicomp.torch.DistributedOptimizer(optimizer, model.named_parameters())
