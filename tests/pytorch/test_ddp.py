"""DistributedDataParallel over gloo whose buckets go through mpicomp."""

import io
from types import SimpleNamespace

import pytest

import mpicomp
from mpicomp.errors import ConfigurationError

torch = pytest.importorskip("torch")

from replicas import Reference, assert_replicas, assert_same, batch, gloo  # noqa: E402

torch.set_num_threads(1)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40), torch.nn.Linear(40, 2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.mpi
@pytest.mark.parametrize("overlap", [True, False])
def test_a_script_on_ddp_keeps_its_wrapper(comm, overlap):
    with gloo(comm):
        plain = network()
        reference = Reference(plain, sgd, comm.size)
        model = torch.nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=0.004)
        state = mpicomp.torch.DDPState(model, "dense", "allreduce", comm=comm, overlap=overlap, bucket_bytes=2000)
        model.register_comm_hook(state, mpicomp.torch.ddp_comm_hook)
        optimizer = sgd(model)
        for step in range(6):  # buckets are made anew after the first
            optimizer.zero_grad()
            model(batch(step, comm.rank)).square().mean().backward()
            optimizer.step()
            reference.step(lambda m, r, s=step: m(batch(s, r)).square().mean())
        assert_same(plain, reference)
        assert not state.reducer.last_step.agreed
        assert len(state.reducer.last_step.buckets) > 1
        state.close()


@pytest.mark.mpi
def test_residuals_follow_their_parameters(comm):
    with gloo(comm):
        plain = network()
        model = torch.nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=0.004)
        state = mpicomp.torch.DDPState(model, mpicomp.TopK(ratio=0.05), "allgather", comm=comm)
        model.register_comm_hook(state, mpicomp.torch.ddp_comm_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        total = {name: torch.zeros_like(parameter) for name, parameter in plain.named_parameters()}
        for step in range(4):
            optimizer.zero_grad()
            model(batch(step, comm.rank)).square().mean().backward()
            for name, parameter in plain.named_parameters():
                total[name] += parameter.grad
        # With a rate of 0 all gradients are of the same weights: nothing of them is lost.
        for name, parameter in plain.named_parameters():
            kept = torch.from_numpy(comm.allreduce(state.reducer.residual(name))) / comm.size
            expected = torch.zeros_like(parameter)
            for rank in range(comm.size):
                for step in range(4):
                    loss = plain(batch(step, rank)).square().mean()
                    expected += torch.autograd.grad(loss, parameter)[0] / comm.size
            torch.testing.assert_close(total[name] + kept, expected, rtol=1e-4, atol=1e-5)
        assert_replicas(plain, comm)
        state.close()


@pytest.mark.mpi(min_size=2)
def test_what_one_rank_refuses_all_refuse(comm):
    with gloo(comm):
        model = torch.nn.parallel.DistributedDataParallel(network())
        with pytest.raises(ConfigurationError, match=r"a model in DistributedDataParallel is needed.*on rank 1"):
            mpicomp.torch.DDPState(network() if comm.rank == 1 else model, comm=comm)


@pytest.mark.mpi
def test_what_cannot_be_served_is_refused(comm, monkeypatch):
    with pytest.raises(ConfigurationError, match="a model in DistributedDataParallel is needed, got Sequential"):
        mpicomp.torch.DDPState(network(), comm=comm)
    with gloo(comm):
        model = torch.nn.parallel.DistributedDataParallel(network())
        from mpi4py import MPI

        if comm.size > 1:
            with pytest.raises(ConfigurationError, match=f"process group has {comm.size} ranks and MPI has 1"):
                mpicomp.torch.DDPState(model, comm=MPI.COMM_SELF)
        monkeypatch.setattr(torch.distributed, "get_backend", lambda group=None: "nccl")
        with pytest.raises(ConfigurationError, match="on NCCL, which can wait for MPI, and MPI for it, forever"):
            mpicomp.torch.DDPState(model, comm=comm)
        mpicomp.torch.DDPState(model, comm=comm, allow_nccl=True).close()


@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_a_future_knows_the_device_of_its_value(device, monkeypatch):
    """Without it the streams of torch would not wait for the mean; there is no such device here, so it only looks."""
    told = []

    class Recorded:
        def __class_getitem__(cls, item):
            return cls

        def __init__(self, devices=None):
            told.append(devices)

    monkeypatch.setattr(torch.futures, "Future", Recorded)
    state = object.__new__(mpicomp.torch.DDPState)
    state._gradients, state._thread, state._stream, state._waiting = {}, None, None, []
    values = torch.empty(0)
    buffer = SimpleNamespace(
        is_cuda=device != "cpu",
        device=torch.device(device),
        layout=values.layout,
        is_complex=values.is_complex,
        reshape=values.reshape,
    )
    empty = SimpleNamespace(buffer=lambda: buffer, parameters=list, gradients=list, is_last=lambda: False)
    state.put(empty)
    assert told == [[torch.device(device)] if device != "cpu" else None]


@pytest.mark.mpi
def test_a_saved_state_goes_on(comm):
    """DDPState has a state of its own, which torch.load reads by its defaults."""

    def run(state, plain, model, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in steps:
            optimizer.zero_grad()
            model(batch(step, comm.rank)).square().mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in plain.parameters()]

    def make():
        plain = network()
        model = torch.nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=0.004)
        state = mpicomp.torch.DDPState(model, mpicomp.TopK(ratio=0.05), "allgather", comm=comm)
        model.register_comm_hook(state, mpicomp.torch.ddp_comm_hook)
        return state, plain, model

    with gloo(comm):
        whole = run(*make(), range(6))
        state, plain, model = make()
        run(state, plain, model, range(3))
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "exchange": state.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file)
        state, plain, model = make()
        model.load_state_dict(saved["model"])
        state.load_state_dict(saved["exchange"])
        second = run(state, plain, model, range(3, 6))
        assert all(torch.equal(own, other) for own, other in zip(second, whole, strict=True))
