"""Training of 2 x 2 ranks goes on from its checkpoints, on other numbers of shards and replicas, too."""

import numpy as np
import pytest
import torch
from replicas import adam, square
from sharded_models import HOSTS, Hybrid, assert_alike, mesh_of, residuals, shards
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import mpicomp
from mpicomp.checkpoint import load_checkpoint, save_checkpoint
from mpicomp.errors import CheckpointError, ConfigurationError, DisagreementError
from mpicomp.torch import UpdateOptimizer

pytestmark = pytest.mark.mpi(min_size=4, max_size=4)

LAYOUTS = {"2x2": HOSTS, "1x4": [[0, 1, 2, 3]], "4x1": [[0], [1], [2], [3]]}  # replicas x shards
SPARSE = {"compressor": mpicomp.TopK(ratio=0.1), "collective": "allgather", "warmup": 0, "overlap": False}
PLAIN = {"compressor": "topk", "collective": "allgather", "warmup": 0, "overlap": False}
DILOCO = {"wrap": UpdateOptimizer, "outer": {"lr": 0.7, "momentum": 0.9}}


def layer():
    """A matrix of seven rows, which no number of shards divides, and a bias of as many."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))


def made(comm, layout, **settings):
    return Hybrid(comm, mesh_of(LAYOUTS[layout])["shard"], layer(), make=adam, **settings)


def save(hybrid, folder):
    """Save the model and the optimizer by torch, what mpicomp keeps by mpicomp, both from all ranks."""
    model, optimizer = get_state_dict(hybrid.model, hybrid.optimizer)
    checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=f"{folder}/torch")
    save_checkpoint(f"{folder}/mpicomp", hybrid.optimizer.state_dict()["mpicomp"], hybrid.comm)


def resume(hybrid, folder):
    model, optimizer = get_state_dict(hybrid.model, hybrid.optimizer)
    checkpoint.load({"model": model, "optimizer": optimizer}, checkpoint_id=f"{folder}/torch")
    set_state_dict(hybrid.model, hybrid.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    present = hybrid.optimizer.state_dict()
    state = load_checkpoint(f"{folder}/mpicomp", hybrid.replicas, present["mpicomp"]["rows"])
    hybrid.optimizer.load_state_dict(present | {"mpicomp": state})


def whole(hybrid, held):
    """Return arrays by name, put together from the rows that ranks of each replica hold: a list of replicas."""
    rows = hybrid.optimizer.state_dict()["mpicomp"]["rows"]
    parts = {name: (rows[name][0], np.asarray(values)) for name, values in held.items()}
    by_rank = hybrid.comm.allgather(parts)
    size = hybrid.model[0].weight.device_mesh.size()
    replicas = [by_rank[start : start + size] for start in range(0, len(by_rank), size)]
    return [
        {name: np.concatenate([p[name][1] for p in sorted_by_row(ranks, name)]) for name in parts} for ranks in replicas
    ]


def sorted_by_row(ranks, name):
    return sorted((rank for rank in ranks if rank[name][1].size), key=lambda rank: rank[name][0])


def mean(replicas):
    return {name: np.mean([replica[name] for replica in replicas], axis=0) for name in replicas[0]}


def begin_with(reference, hybrid):
    """Give the reference the whole parameters and moments of a sharded model."""
    pairs = list(zip(hybrid.model.parameters(), reference.model.parameters(), strict=True))
    with torch.no_grad():
        for parameter, other in pairs:
            other.copy_(parameter.full_tensor())
    for parameter, other in pairs:
        held = hybrid.optimizer.state[parameter].items()
        reference.optimizer.state[other] = {
            key: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone() for key, value in held
        }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_resumes_on_other_shards_and_replicas(comm, tmp_path, layout):
    """The next step delivers all gradients and residuals: it is that of one process with the mean of the residuals."""
    folder = comm.bcast(str(tmp_path))
    with shards(comm):
        first = made(comm, "2x2", **SPARSE)
        first.run(range(3))
        waiting = mean(whole(first, residuals(first.optimizer)))
        assert all(np.abs(values).max() > 0 for values in waiting.values())
        save(first, folder)
        second = made(comm, layout, **SPARSE | {"compressor": mpicomp.TopK(ratio=1.0)})
        resume(second, folder)
        for name, values in mean(whole(second, residuals(second.optimizer))).items():
            np.testing.assert_allclose(values, waiting[name], rtol=1e-6, atol=1e-8)
        begin_with(second.reference, first)

        def add_residuals(model):
            for name, parameter in model.named_parameters():
                parameter.grad += torch.from_numpy(waiting[name]).float()

        for step in range(3, 6):
            second.backward(step)
            second.optimizer.step()
            second.reference.step(square, step, add_residuals if step == 3 else None)
        assert second.optimizer.reducer.last_step.step == 5
        second.check(most=2e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_values_and_momenta_resume_on_other_shards(comm, tmp_path, layout):
    folder = comm.bcast(str(tmp_path))
    with shards(comm):
        first, second = made(comm, "2x2", **DILOCO), made(comm, layout, **DILOCO)
        for step in range(3):
            first.backward(step)
            first.optimizer.step()
        save(first, folder)
        resume(second, folder)
        before, after = (hybrid.optimizer.state_dict()["mpicomp"] for hybrid in (first, second))
        states = [(after["shared"], before["shared"]), (after["outer"], before["outer"])]
        for found, expected in states:
            one, *others = whole(first, expected)
            for replica in [*others, *whole(second, found)]:
                assert {name: values.tolist() for name, values in replica.items()} == {
                    name: values.tolist() for name, values in one.items()
                }
            assert any(np.abs(values).max() > 0 for values in one.values())
        for step in range(3, 5):
            second.backward(step)
            second.optimizer.step()
        assert_alike(second.model, second.replicas)


def test_checkpoint_that_does_not_fit_is_refused(comm, tmp_path):
    folder = comm.bcast(str(tmp_path))
    with shards(comm):
        first = made(comm, "2x2", **PLAIN)
        first.run(range(2))
        save(first, folder)
        rows = first.optimizer.state_dict()["mpicomp"]["rows"]
        with pytest.raises(DisagreementError, match=r"'0.weight'.*rows 0 to 4"):
            load_checkpoint(f"{folder}/mpicomp", comm, rows)
        with pytest.raises(CheckpointError, match=r"written by 4 ranks with shards.*pass comm=mpicomp.torch.replicas"):
            load_checkpoint(f"{folder}/mpicomp", first.replicas)
        second = made(comm, "1x4", **PLAIN)
        state = load_checkpoint(f"{folder}/mpicomp", comm)
        with pytest.raises(
            ConfigurationError, match=r"the state holds rows .*load_checkpoint\(folder, replicas, rows="
        ):
            second.optimizer.load_state_dict(second.optimizer.state_dict() | {"mpicomp": state})
