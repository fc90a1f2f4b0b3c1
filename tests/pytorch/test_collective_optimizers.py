"""Laws of optimizers whose step is an exchange: OneBitAdam and SketchedAMSGrad."""

import copy

import numpy as np
import oracle
import pytest
import torch
from local_replicas import Regression, Replicas
from marks import slow

import mpicomp
from mpicomp.errors import ConfigurationError, NonFiniteError
from mpicomp.systems.optimizers.sketched_amsgrad import SketchedAMSGrad
from mpicomp.transport import LocalWorld

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


BLOCK = mpicomp.OneBit().block


def onebit_replicas(ranks, make=None, loss=None, **settings):
    return Replicas(mpicomp.torch.OneBitAdam, make or linear, ranks, loss or squares, **settings)


class Reference:
    """1-bit Adam of N ranks in NumPy, step by step, as it is written in the paper and in OneBitAdam's notes."""

    def __init__(self, parameters, ranks, warmup_steps, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        self.parameters = {name: np.array(value, np.float64) for name, value in parameters.items()}
        self.ranks, self.warmup_steps, self.lr, self.betas, self.eps = ranks, warmup_steps, lr, betas, eps
        self.weight_decay = weight_decay
        self.steps = 0
        self.momentum = {name: np.zeros_like(value) for name, value in self.parameters.items()}
        self.variance = {name: np.zeros_like(value) for name, value in self.parameters.items()}
        self.residuals = [np.zeros(sum(value.size for value in self.parameters.values())) for _ in range(ranks)]

    def step(self, gradients):
        """Take a mapping of gradients for each rank."""
        gradients = [
            {name: arrays[name] + self.weight_decay * value for name, value in self.parameters.items()}
            for arrays in gradients
        ]
        beta1, beta2 = self.betas
        if self.steps < self.warmup_steps:
            for name in self.parameters:
                mean = sum(arrays[name] for arrays in gradients) / self.ranks
                self.momentum[name] = beta1 * self.momentum[name] + (1 - beta1) * mean
                self.variance[name] = beta2 * self.variance[name] + (1 - beta2) * mean**2
            self.steps += 1
            roots = {name: np.sqrt(v / (1 - beta2**self.steps)) for name, v in self.variance.items()}
            if self.steps == self.warmup_steps:
                self.frozen = {name: self._floored(root) for name, root in roots.items()}
        else:
            momenta = [
                np.concatenate([(beta1 * self.momentum[n] + (1 - beta1) * arrays[n]).ravel() for n in self.parameters])
                for arrays in gradients
            ]
            mean, self.residuals = oracle.two_phase_step(momenta, self.residuals, BLOCK)
            start = 0
            for name, value in self.parameters.items():
                self.momentum[name] = mean[start : start + value.size].reshape(value.shape)
                start += value.size
            self.steps += 1
            roots = self.frozen
        for name, root in roots.items():
            step = self.momentum[name] / (1 - beta1**self.steps) / (root + self.eps)
            self.parameters[name] -= self.lr * step

    def _floored(self, root):
        seen = np.sort(root[root > 0])
        if seen.size == 0:
            return np.full_like(root, np.inf)
        median = seen[(seen.size - 1) // 2]
        return np.where(root > 0, np.maximum(root, 0.1 * median), median)


ONEBIT_PROBLEM = Regression(37, 41, {5: 0, 6: 1e-4})  # weights of the first have no gradient
linear, squares, gradients_of_squares = ONEBIT_PROBLEM.model, ONEBIT_PROBLEM.loss, ONEBIT_PROBLEM.gradients


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_warmup_is_adam_on_the_large_batch(ranks, weight_decay):
    trained = onebit_replicas(ranks, lr=0.01, betas=(0.8, 0.99), weight_decay=weight_decay)
    plain = linear()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01, betas=(0.8, 0.99), weight_decay=weight_decay)
    for step in range(20):
        trained.step(step)
        optimizer.zero_grad()
        (sum(squares(plain, rank, step) for rank in range(ranks)) / ranks).backward()
        optimizer.step()
    for model in trained.models:
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-9, atol=1e-12)
    assert trained.same()


@pytest.mark.parametrize(
    ("ranks", "weight_decay"), [(1, 0.1), (2, 0.0), (3, 0.1), slow(5, 0.0), slow(5, 0.1), slow(3, 0.0), slow(2, 0.1)]
)
def test_steps_equal_those_of_the_reference(ranks, weight_decay):
    settings = {"lr": 0.01, "weight_decay": weight_decay, "warmup_steps": 5}
    trained = onebit_replicas(ranks, **settings)
    start = {name: value.detach().numpy() for name, value in linear().named_parameters()}
    reference = Reference(start, ranks, **settings)
    for step in range(40):
        trained.step(step)
        reference.step([gradients_of_squares(reference.parameters, rank, step) for rank in range(ranks)])
        for name, value in trained.models[0].named_parameters():
            np.testing.assert_allclose(value.detach(), reference.parameters[name], rtol=1e-8, atol=1e-10)
        assert trained.same()
    for optimizer, residual in zip(trained.optimizers, reference.residuals, strict=True):
        held = np.concatenate([optimizer.reducer.residual(name).ravel() for name in start])
        np.testing.assert_allclose(held, residual, rtol=1e-6, atol=1e-9)


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(),
                               torch.nn.Linear(64, 4))  # fmt: skip


def classify(model, rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 16, generator=generator)
    targets = (inputs[:, :4] * inputs[:, 4:8]).argmax(dim=1)  # not linear
    return torch.nn.functional.cross_entropy(model(inputs), targets)


@pytest.mark.slow
def test_learns_about_as_well_as_adam():
    ranks, steps = 4, 800
    trained = onebit_replicas(ranks, network, classify, lr=3e-3, warmup_steps=150)
    losses = trained.run(range(steps))
    plain = network()
    optimizer = torch.optim.Adam(plain.parameters(), lr=3e-3)
    expected = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum(classify(plain, rank, step) for rank in range(ranks)) / ranks
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    start, end, adam = np.mean(losses[:20]), np.mean(losses[-100:]), np.mean(expected[-100:])
    print(f"cross entropy from {start:.3f} to {end:.3f}; that of Adam to {adam:.3f}")
    assert start - end > 0.8 * (start - adam)


class Rare(torch.nn.Module):
    """Rows that come late, one that never comes, and a parameter that is not used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows = torch.nn.Embedding(300, 8)
        self.unused = torch.nn.Parameter(torch.ones(5))
        self.out = torch.nn.Linear(8, 1)


def of_rows(model, rank, step):
    rng = np.random.default_rng([rank, step])
    rows = torch.from_numpy(rng.integers(0, 100 if step < 20 else 200, 16))
    return (model.out(model.rows(rows))[:, 0] - (rows % 2)).square().mean()


def test_rows_without_a_variance_do_not_run_away():
    trained = onebit_replicas(2, Rare, of_rows, lr=0.01, warmup_steps=20)
    before = Rare()
    losses = trained.run(range(600))
    model = trained.models[0]
    assert torch.equal(model.unused, before.unused)
    moved = (model.rows.weight - before.rows.weight).detach().abs()
    assert moved[200:].max() < 0.2  # these have no gradient at all, and signs all the same
    assert moved[100:200].max() > 0.3
    assert np.mean(losses[-50:]) < 0.1


def test_parameters_without_gradients_and_sixteen_bits():
    model = linear().to(torch.bfloat16)
    model.bias.requires_grad_(False)
    optimizer = single(mpicomp.torch.OneBitAdam, model.named_parameters(), lr=0.01, warmup_steps=1)
    start = model.bias.detach().clone()
    for step in range(3):
        optimizer.zero_grad()
        if step != 1:
            model(torch.ones(2, 37, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    assert torch.equal(model.bias, start)
    assert optimizer.reducer.residual("weight").dtype == np.float32


def test_impossible_settings_are_refused():
    model = linear()
    with pytest.raises(ConfigurationError, match=r"warmup_steps must be at least 1, got 0; without a warm-up"):
        single(mpicomp.torch.OneBitAdam, model.parameters(), warmup_steps=0)
    optimizer = single(mpicomp.torch.OneBitAdam, model.parameters(), warmup_steps=1)
    squares(model, 0, 0).backward()
    optimizer.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(ConfigurationError, match="'2' was not trained in the warm-up"):
        optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.full((1, 37), torch.inf).double()).sum()).backward()
    with pytest.raises(ConfigurationError, match=r"use torch\.autocast with bfloat16"):
        scaler.step(optimizer)


@pytest.mark.mpi(max_size=3)
def test_steps_over_mpi_equal_those_of_the_reference(comm):
    settings = {"lr": 0.01, "warmup_steps": 5}
    model = linear()
    optimizer = mpicomp.torch.OneBitAdam(model.named_parameters(), comm=comm, **settings)
    start = {name: value.detach().numpy() for name, value in linear().named_parameters()}
    reference = Reference(start, comm.size, **settings)
    for step in range(30):
        optimizer.zero_grad()
        squares(model, comm.rank, step).backward()
        optimizer.step()
        reference.step([gradients_of_squares(reference.parameters, rank, step) for rank in range(comm.size)])
        for name, value in model.named_parameters():
            np.testing.assert_allclose(value.detach(), reference.parameters[name], rtol=1e-8, atol=1e-10)
            assert len(set(comm.allgather(value.detach().numpy().tobytes()))) == 1
    optimizer.close()
