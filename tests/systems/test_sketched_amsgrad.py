import numpy as np
import oracle
import pytest
from oracle import estimates_of, table_of

import mpicomp
from mpicomp.compressors import Context
from mpicomp.errors import ConfigurationError
from mpicomp.transport import LocalWorld

torch = pytest.importorskip("torch")
from local_replicas import Regression, Replicas  # noqa: E402, it needs torch

from mpicomp.systems.optimizers.sketched_amsgrad import SketchedAMSGrad  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


class Reference:
    """The algorithm on flat arrays, as SketchedAMSGrad has it in its notes; memories are without learning rate."""

    def __init__(self, parameters, ranks, compressor, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        self.shapes = {name: value.shape for name, value in parameters.items()}
        self.flat = np.concatenate([np.ravel(value) for value in parameters.values()]).astype(np.float64)
        self.compressor, self.betas, self.weight_decay = compressor, betas, weight_decay
        self.momenta, self.memories = ([np.zeros(self.flat.size) for _ in range(ranks)] for _ in range(2))
        self.v, self.vhat = np.zeros(self.flat.size), np.full(self.flat.size, eps)
        self.rate, self.steps = None, 0

    def parameters(self):
        sizes = [int(np.prod(shape)) for shape in self.shapes.values()]
        parts = np.split(self.flat, np.cumsum(sizes)[:-1])
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def step(self, gradients, rate):
        """Take a mapping of gradients for each rank."""
        beta1, beta2 = self.betas
        key = Context(step=self.steps).key(shared=True)
        self.steps += 1
        for rank, gradient in enumerate(gradients):
            flat = np.concatenate([np.ravel(gradient[name]) for name in self.shapes]) + self.weight_decay * self.flat
            self.momenta[rank] = beta1 * self.momenta[rank] + (1 - beta1) * flat
        factor = 1.0 if self.rate is None else self.rate / rate
        self.rate = rate
        sent = [m + factor * e for m, e in zip(self.momenta, self.memories, strict=True)]
        shape = self.compressor.rows, oracle.kept(self.compressor.columns, self.flat.size)
        estimates = estimates_of(table_of(sum(sent) / np.sqrt(self.vhat), key, *shape), key, *shape, self.flat.size)
        count = self.compressor.candidates * oracle.kept(self.compressor.ratio, self.flat.size)
        places = oracle.largest(estimates, count)
        h = np.zeros(self.flat.size)
        h[places] = sum(array[places] for array in sent) / len(sent)
        for array in sent:
            array[places] = 0
        self.memories = sent
        self.v = beta2 * self.v + (1 - beta2) * h**2
        self.vhat = np.maximum(self.vhat, self.v / (1 - beta2**self.steps))
        self.flat -= rate * h / np.sqrt(self.vhat)


PROBLEM = Regression(17, 21, {6: 1e-2})
linear, squares, gradients_of_squares = PROBLEM.model, PROBLEM.loss, PROBLEM.gradients


SKETCH = mpicomp.CountSketch(ratio=0.02, rows=3, columns=0.1, candidates=4, wire=None)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_it_is_what_the_reference_says(ranks, weight_decay):
    members = Replicas(SketchedAMSGrad, linear, ranks, lr=0.01, weight_decay=weight_decay, compressor=SKETCH)
    start = {name: value.detach().numpy() for name, value in linear().named_parameters()}
    reference = Reference(start, ranks, SKETCH, weight_decay=weight_decay)
    for step in range(12):
        rate = 0.01 if step < 6 else 0.002  # what waits in memory does so at the rate of before
        for optimizer in members.optimizers:
            optimizer.param_groups[0]["lr"] = rate
        now = reference.parameters()
        reference.step([gradients_of_squares(now, rank, step) for rank in range(ranks)], rate)
        members.train(squares, [step])
        expected = reference.parameters()
        for name, value in members.models[0].named_parameters():
            np.testing.assert_allclose(value.detach(), expected[name], rtol=1e-8, atol=1e-10)
        assert len(set(members.bits())) == 1
    for optimizer, memory in zip(members.optimizers, reference.memories, strict=True):
        held = np.concatenate([optimizer.reducer.residual(name).ravel() for name in start])
        np.testing.assert_allclose(held, 0.002 * memory, rtol=1e-6, atol=1e-12)


@pytest.mark.slow
def test_it_learns_about_as_well_as_amsgrad():
    ranks, steps = 2, 300
    members = Replicas(
        SketchedAMSGrad, linear, ranks, lr=0.05, compressor=mpicomp.CountSketch(ratio=0.02, columns=0.03)
    )
    losses = members.train(squares, range(steps))
    plain = linear()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.05, amsgrad=True)
    expected = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum(squares(plain, rank, step) for rank in range(ranks)) / ranks
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    start, end, dense = losses[0], np.mean(losses[-50:]), np.mean(expected[-50:])
    print(f"squares from {start:.3f} to {end:.3f}; those of AMSGrad to {dense:.3f}")
    assert start - end > 0.95 * (start - dense)


def alone(parameters, **settings):
    return SketchedAMSGrad(parameters, comm=LocalWorld(1).transports[0], **settings)


def test_power_gossip_types_strides_and_missing_gradients():
    torch.manual_seed(0)
    half = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16))
    double = torch.nn.Parameter(torch.randn(5, 6).double().t())
    frozen, unused = torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.nn.Parameter(torch.ones(2))
    named = [("half", half), ("double", double), ("frozen", frozen), ("unused", unused)]
    optimizer = alone(named, lr=0.01, compressor=mpicomp.CountSketch(ratio=1.0))
    for _ in range(3):
        optimizer.zero_grad()
        (half.float().sum() + double.square().sum()).backward()
        optimizer.step()
    assert optimizer.reducer.residual("half").dtype == np.float32
    assert half.max() < 1
    assert torch.equal(frozen, torch.ones(2))
    assert torch.equal(unused, torch.ones(2))


def test_sketched_amsgrad_late_group_begins_at_the_learning_rate():
    model = linear()
    optimizer = alone([{"params": [model.weight], "lr": 0.0}, {"params": [model.bias]}], lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        squares(model, 0, step).backward()
        optimizer.step()
    late = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    optimizer.add_param_group({"params": [("late", late)]})
    late.grad = torch.ones_like(late)
    optimizer.step()
    assert late.detach().min() == pytest.approx(0.9)  # the first step of an element is the learning rate


def test_sketched_amsgrad_impossible_settings_are_refused():
    for settings, text in [
        ({"eps": 0}, "eps must be above 0, got 0"),
        ({"compressor": mpicomp.TopK()}, r"compressor must be a CountSketch without momentum, got TopK\(\)"),
        ({"compressor": mpicomp.CountSketch(momentum=0.9)}, "compressor must be a CountSketch without momentum"),
    ]:
        with pytest.raises(ConfigurationError, match=f"SketchedAMSGrad: {text}"):
            alone(linear().parameters(), **settings)


@pytest.mark.mpi
def test_over_mpi_it_is_what_the_reference_says(comm):
    model = linear()
    optimizer = SketchedAMSGrad(model.named_parameters(), lr=0.01, compressor=SKETCH, comm=comm)
    start = {name: value.detach().numpy() for name, value in linear().named_parameters()}
    reference = Reference(start, comm.size, SKETCH)
    for step in range(8):
        optimizer.zero_grad()
        squares(model, comm.rank, step).backward()
        optimizer.step()
        now = reference.parameters()
        reference.step([gradients_of_squares(now, rank, step) for rank in range(comm.size)], 0.01)
        expected = reference.parameters()
        for name, value in model.named_parameters():
            np.testing.assert_allclose(value.detach(), expected[name], rtol=1e-8, atol=1e-10)
            assert len(set(comm.allgather(value.detach().numpy().tobytes()))) == 1
    optimizer.close()
