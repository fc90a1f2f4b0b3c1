"""DistributedDataParallel over gloo whose buckets go through mpicomp."""

import io

import pytest
import torch
from replicas import Reference, assert_equal, assert_replicas, assert_same, descent, gloo, sgd, square, train

import mpicomp
from mpicomp.errors import ConfigurationError


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40), torch.nn.Linear(40, 2))


def hooked(comm, *settings, **more):
    """Return a model, the one in DistributedDataParallel, and the state of its hook."""
    plain = network()
    model = torch.nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=0.004)
    state = mpicomp.torch.DDPState(model, *settings, comm=comm, **more)
    model.register_comm_hook(state, mpicomp.torch.ddp_comm_hook)
    return plain, model, state


@pytest.mark.mpi
@pytest.mark.parametrize("overlap", [True, False])
def test_script_on_ddp_follows_the_reference(comm, overlap):
    with gloo(comm):
        plain, model, state = hooked(comm, "dense", "allreduce", overlap=overlap, bucket_bytes=2000)
        reference, optimizer = Reference(plain, sgd, comm.size), sgd(model)
        for step in range(6):  # DDP builds new buckets after the first
            train(model, optimizer, [step], comm.rank)
            reference.step(square, step)
        assert_same(plain, reference)
        assert not state.reducer.last_step.agreed
        assert len(state.reducer.last_step.buckets) > 1
        state.close()


@pytest.mark.mpi(max_size=3)
def test_residuals_follow_their_parameters_into_new_buckets(comm):
    """With a rate of 0 all gradients are of the same weights: nothing of them is lost."""
    with gloo(comm):
        plain, model, state = hooked(comm, mpicomp.TopK(ratio=0.05), "allgather")
        optimizer = descent(model, lr=0.0)
        total = {name: torch.zeros_like(parameter) for name, parameter in plain.named_parameters()}
        for step in range(4):
            train(model, optimizer, [step], comm.rank)
            for name, parameter in plain.named_parameters():
                total[name] += parameter.grad
        for name, parameter in plain.named_parameters():
            residual = torch.from_numpy(comm.allreduce(state.reducer.residual(name))) / comm.size
            losses = [square(plain, step, rank) for rank in range(comm.size) for step in range(4)]
            expected = sum(torch.autograd.grad(loss, parameter)[0] for loss in losses) / comm.size
            torch.testing.assert_close(total[name] + residual, expected, rtol=1e-4, atol=1e-5)
        assert_replicas(plain, comm)
        state.close()


@pytest.mark.mpi(max_size=3)
def test_unserved_models_and_groups_are_refused(comm, monkeypatch):
    with gloo(comm):
        model = torch.nn.parallel.DistributedDataParallel(network())
        from mpi4py import MPI

        wrong = network() if comm.rank == comm.size - 1 else model
        with pytest.raises(ConfigurationError, match="a model in DistributedDataParallel is needed, got Sequential"):
            mpicomp.torch.DDPState(wrong, comm=comm)
        sparse = torch.nn.parallel.DistributedDataParallel(torch.nn.EmbeddingBag(9, 4, sparse=True))
        with pytest.raises(ConfigurationError, match="sparse=False, or use DistributedOptimizer"):
            mpicomp.torch.DDPState(sparse, "topk", comm=comm)
        if comm.size > 1:
            with pytest.raises(ConfigurationError, match=f"process group has {comm.size} ranks and MPI has 1"):
                mpicomp.torch.DDPState(model, comm=MPI.COMM_SELF)
        monkeypatch.setattr(torch.distributed, "get_backend", lambda group=None: "nccl")
        with pytest.raises(ConfigurationError, match="on NCCL, which can wait for MPI, and MPI for it, forever"):
            mpicomp.torch.DDPState(model, comm=comm)
        mpicomp.torch.DDPState(model, comm=comm, allow_nccl=True).close()


@pytest.mark.mpi(max_size=3)
def test_saved_state_resumes_bit_for_bit(comm):
    """DDPState has a state that torch.load reads by its defaults."""
    settings = mpicomp.TopK(ratio=0.05), "allgather"
    with gloo(comm):
        whole, model, _ = hooked(comm, *settings)
        train(model, descent(model), range(6), comm.rank)
        _, model, state = hooked(comm, *settings)
        train(model, descent(model), range(3), comm.rank)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "exchange": state.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file)
        resumed, model, state = hooked(comm, *settings)
        model.load_state_dict(saved["model"])
        state.load_state_dict(saved["exchange"])
        train(model, descent(model), range(3, 6), comm.rank)
        assert_equal(resumed, whole)
