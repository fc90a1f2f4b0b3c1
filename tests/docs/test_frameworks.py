"""The examples with people's frameworks run: replicas stay the same, the loss falls, TensorBoard has all of it."""

import importlib.util
import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
NEEDS = {"with_lightning": "lightning", "with_accelerate": "accelerate", "with_hf_trainer": "transformers"}
INSTALL = "pip install -c constraints.txt torch lightning accelerate transformers tensorboard"

DRIVER = """
import json, runpy, sys
import numpy as np
import torch
from mpi4py import MPI

comm = MPI.COMM_WORLD
torch.manual_seed(comm.rank)  # models differ until they are broadcast
loss, model = runpy.run_path(sys.argv[1])["main"](sys.argv[2])
mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()
everyones = comm.allgather(mine.tobytes())
losses = comm.allgather(loss)
if comm.rank == 0:
    with open(sys.argv[3], "w") as file:
        json.dump({"same": len(set(everyones)) == 1, "finite": bool(np.isfinite(mine).all()), "losses": losses}, file)
"""


def missing(name):
    return next(
        (package for package in ("torch", "tensorboard", name) if importlib.util.find_spec(package) is None), None
    )


def read(folder):
    """Return the scalars of all event files below a folder, by tag in order of steps, and the tags of everything."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars, tags = {}, set()
    for path in folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            scalars[tag] = [event.value for event in events.Scalars(tag)]
        tags |= set(events.summary_metadata)
    return scalars, tags


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", NEEDS)
def test_example_with_a_framework_trains(mpiexec, tmp_path, example):
    if missing(NEEDS[example]):
        pytest.skip(f"there is no {missing(NEEDS[example])}: {INSTALL}")
    runs, out = tmp_path / "runs", tmp_path / "out.json"
    done = mpiexec(2, "-c", DRIVER, EXAMPLES / f"{example}.py", runs, out, timeout=280)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["same"]
    assert result["finite"]
    assert len(set(result["losses"])) == 2  # each rank has had samples of its own
    scalars, tags = read(runs)
    losses = next(scalars[tag] for tag in ("loss", "train/loss") if tag in scalars)
    assert len(losses) == 4 * 16  # epochs of 512 samples, 16 on each of two ranks
    assert sum(losses[-16:]) < 0.7 * sum(losses[:16])
    prefix = "train/" if "train/loss" in scalars else ""
    for tag in ("seconds", "seconds/exchange", "bytes/wire", "bytes/dense_ring", "ratio"):
        assert len(scalars[f"{prefix}mpicomp/{tag}"]) == len(losses)
    numel = 8 * 32 + 32 + 32 + 1
    assert scalars[f"{prefix}mpicomp/bytes/dense_ring"] == [4.0 * numel] * len(losses)
    assert tags & {"_hparams_/session_start_info", "args/text_summary"}


SHARDED = """
import runpy, sys
import accelerate, torch
from accelerate.utils import DistributedType
from mpi4py import MPI

class OnProcessors(accelerate.Accelerator):
    # Accelerate shards on GPUs alone; on processors it would take DistributedDataParallel.
    def __init__(self, fsdp_plugin):
        super().__init__(cpu=True)
        self.state.distributed_type, self.state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

accelerate.Accelerator = OnProcessors
model, loss = runpy.run_path(sys.argv[1])["main"](shards=2, steps=60)
sharded = [parameter.to_local().numel() < parameter.numel() for parameter in model.parameters()]
held = torch.cat([parameter.to_local().detach().flatten() for parameter in model.parameters()]).tolist()
everyones = MPI.COMM_WORLD.allgather(held)
if MPI.COMM_WORLD.rank == 0:
    print(all(sharded), everyones[:2] == everyones[2:], everyones[0] != everyones[1], loss < 0.15)
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_accelerate_shards_inside_hosts(mpiexec):
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip(f"there is no accelerate: {INSTALL}")
    done = mpiexec(4, "-c", SHARDED, EXAMPLES / "with_accelerate_fsdp.py", timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 4
