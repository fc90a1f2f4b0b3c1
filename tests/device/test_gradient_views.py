"""Gradients on a device that lie where they are added to residuals: the host's bits, undone and stale steps."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
from device import fake_cuda
from device.kinds import TorchMemory
from device.steps_on_a_device import fetched, gradients_of, host, ranks_of, reduced

import mpicomp
from mpicomp.errors import NonFiniteError
from mpicomp.gpu.cuda import CudaDevice
from mpicomp.job import stop
from mpicomp.mpi import LocalWorld

SHAPES = {"first": (40, 25), "second": (7,), "third": (3, 5, 2)}
KINDS = [  # with kernels of the host, or emulated ones
    ("host", mpicomp.TopK(ratio=0.1), "allgather"),  # the sum stays
    ("emulated", mpicomp.TopK(ratio=0.1), "allgather"),  # the launch of the mean subtracts what was sent
    ("host", mpicomp.Dense(), "allreduce"),  # the mean is left in the sum's place
    ("host", mpicomp.OneBit(), "two-phase"),  # the residual is
    ("host", mpicomp.QSGD(bits=4, rounding="nearest"), "packed-allgather"),  # messages are decoded by all
    ("host", mpicomp.Dense(), "ring"),
]


@pytest.fixture
def of_kernels(request, monkeypatch):
    """Return a function that returns the stand-in with kernels of the host, or emulated ones."""

    def install(kernels):
        if kernels == "emulated":
            request.getfixturevalue("emulated")
        return fake_cuda.install(monkeypatch, "lazy", kernels == "emulated")

    return install


def viewed(size, *settings, **more):
    ranks = ranks_of(size, *settings, **more)
    for reducer in ranks.reducers:
        reducer.layout.holds_gradients = True
    return ranks


def put(ranks, gradients, cupy):
    """Return gradients on the device: in the buckets of each rank once there are some."""
    found = [{name: cupy.asarray(gradient) for name, gradient in rank.items()} for rank in gradients]
    for reducer, rank in zip(ranks.reducers, found, strict=True):
        if reducer.layout.buckets:
            for name, array in rank.items():
                rank[name] = reducer.layout.gradient(name)
                np.copyto(rank[name], array)
    return found


def stepped(ranks, step, cupy):
    return ranks.reduce(put(ranks, [gradients_of(rank, step, SHAPES) for rank in range(len(ranks.reducers))], cupy))


@pytest.mark.parametrize(("kernels", "compressor", "collective"), KINDS, ids=str)
def test_views_have_the_bits_of_the_host(kernels, compressor, collective, of_kernels):
    cupy = of_kernels(kernels)
    there, here = viewed(3, compressor, collective), ranks_of(3, compressor, collective)
    for step in range(4):
        means = stepped(there, step, cupy)
        layouts = [reducer.layout for reducer in there.reducers]
        lies_there = {
            mean.data.ptr == layout.gradient(name).data.ptr
            for layout, rank in zip(layouts, means, strict=True)
            for name, mean in rank.items()
        }
        assert not step or lies_there == {True}
        expected = reduced(here, [gradients_of(rank, step, SHAPES) for rank in range(3)], host)
        np.testing.assert_equal(fetched(means), fetched(expected))
        for name in SHAPES:
            np.testing.assert_equal(there.residuals(name), here.residuals(name))


@pytest.mark.parametrize(("kernels", "compressor", "collective"), KINDS[:4], ids=str)
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_undone_step_leaves_gradients_and_residuals(kernels, compressor, collective, nonfinite, of_kernels):
    cupy = of_kernels(kernels)
    ranks = viewed(2, compressor, collective, nonfinite=nonfinite)
    for step in range(3):
        stepped(ranks, step, cupy)
    before = {name: [residual.copy() for residual in ranks.residuals(name)] for name in SHAPES}
    gradients = [gradients_of(rank, 3, SHAPES) for rank in range(2)]
    gradients[1]["second"][3] = np.inf
    given = put(ranks, gradients, cupy)
    if nonfinite == "raise":
        with pytest.raises(NonFiniteError):
            ranks.reduce(given)
        if collective == "allgather":  # others overwrite them
            np.testing.assert_allclose(given[0]["first"].get(), gradients[0]["first"], rtol=1e-5, atol=1e-5)
    else:
        assert all(not mean.get().any() for rank in ranks.reduce(given) for mean in rank.values())
    for name in SHAPES:
        np.testing.assert_equal(ranks.residuals(name), before[name])
    np.testing.assert_equal(*fetched(stepped(ranks, 4, cupy)))


@pytest.mark.parametrize(("kernels", "compressor", "collective"), KINDS, ids=str)
def test_stale_step_loses_nothing(kernels, compressor, collective, of_kernels, monkeypatch):
    """Buckets that were exchanged before one rank asks all of them to agree: gradients plus residuals are conserved."""
    cupy = of_kernels(kernels)
    ranks = viewed(2, compressor, collective)
    for step in range(5):
        gradients = [gradients_of(rank, step, SHAPES) for rank in range(2)]
        brought = {name: sum(rank[name].astype(float) for rank in gradients) for name in SHAPES}
        if step:
            brought = {name: total + ranks.residual_sum(name).reshape(total.shape) for name, total in brought.items()}
        if step == 3:
            ranks.reducers[0].stop = True  # so that rank 1 alone asks
            monkeypatch.setattr(stop, "asked", True)
        means = fetched(ranks.reduce(put(ranks, gradients, cupy)))
        assert ranks.reducers[0].last_step.agreed == (step in (0, 3))
        np.testing.assert_equal(*means)
        for name, total in brought.items():
            kept = ranks.residual_sum(name).reshape(total.shape)
            np.testing.assert_allclose(2.0 * means[0][name] + kept, total, rtol=1e-5, atol=1e-5)


def test_gradients_elsewhere_and_in_other_places_are_copied(cupy):
    """A gradient outside its bucket, and one that lies where another one is summed."""
    there, here = viewed(1, *KINDS[0][1:]), ranks_of(1, *KINDS[0][1:])
    shapes = {"first": (30,), "second": (30,)}
    for step in range(4):
        [gradients] = [gradients_of(0, step, shapes)]
        [given] = put(there, [gradients], cupy)
        if step == 2:
            given = {"first": given["second"], "second": given["first"]}
            gradients = {"first": gradients["second"], "second": gradients["first"]}
        elif step == 3:
            given["first"] = given["first"].copy()
        np.testing.assert_equal(fetched(there.reduce([given])), fetched(here.reduce([gradients])))


def test_optimizer_of_torch_puts_gradients_into_buckets(monkeypatch):
    """Gradients of the host that say they are not; the device works at once, as torch does here."""
    torch = pytest.importorskip("torch")
    import mpicomp.torch

    class Tensor(torch.Tensor):
        is_cuda = True

    def on_device(gradient):
        cupy.driver.on_device.setdefault(gradient.data_ptr(), (gradient.nbytes, 0))
        return gradient.as_subclass(Tensor)

    def train(views):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5))
        optimizer = mpicomp.torch.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), mpicomp.TopK(ratio=0.1), "allgather",
            comm=LocalWorld(1).transports[0], warmup=0, overlap=False, gradient_as_bucket_view=views,
        )  # fmt: skip
        for step in range(5):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            optimizer.step()
        layout = optimizer.reducer.layout
        if views:
            for name, parameter in model.named_parameters():
                assert parameter.grad.data_ptr() == layout.gradient(name).data.ptr
        return [parameter.detach() for parameter in model.parameters()]

    expected = train(False)
    cupy = fake_cuda.install(monkeypatch, "eager")
    stream, memory = SimpleNamespace(cuda_stream=cupy.driver.stream()), TorchMemory()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "ExternalStream", memory.ExternalStream)
    host_empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, device=None, **more: (
            host_empty(*size, device=device, **more) if device is None else memory.empty(*size, device=device, **more)
        ),
    )  # fmt: skip
    view = lambda device, tensor, found: fake_cuda.ndarray(tensor.as_subclass(torch.Tensor).numpy())  # noqa: E731
    monkeypatch.setattr(CudaDevice, "_view", view)
    monkeypatch.setattr("mpicomp.torch.gradients.as_real", on_device)
    assert all(map(torch.equal, train(True), expected))
    gc.collect()
    assert not memory.held
