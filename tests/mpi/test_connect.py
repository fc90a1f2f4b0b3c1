"""``comm=`` that is none, and MPI that has not begun or is over: one typed error that says what to pass."""

import os

import numpy as np
import pytest

import mpicomp
from mpicomp.errors import ConfigurationError, LaunchError
from mpicomp.mpi import LocalWorld


def doors(tmp_path):
    """Return a call of each function that takes ``comm=``."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)

    def wrapped(wrap):
        return lambda comm: wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), comm=comm)

    return [
        lambda comm: mpicomp.Reducer("dense", comm=comm),
        lambda comm: mpicomp.allreduce(np.ones(3, np.float32), comm=comm),
        lambda comm: mpicomp.save_checkpoint(tmp_path, {}, comm=comm),
        lambda comm: mpicomp.load_checkpoint(tmp_path, comm=comm),
        lambda comm: mpicomp.trace(tmp_path / "trace.json", comm=comm),
        wrapped(mpicomp.torch.DistributedOptimizer),
        wrapped(mpicomp.torch.UpdateOptimizer),
        lambda comm: mpicomp.torch.broadcast_parameters(model, comm=comm),
        lambda comm: mpicomp.torch.DDPState(model, comm=comm),
    ]


def test_other_objects_are_refused_wherever_comm_is_taken(tmp_path):
    for door in doors(tmp_path):
        with pytest.raises(ConfigurationError, match=r"comm must be an intracommunicator.*got 'world' \(str\)"):
            door("world")


@pytest.mark.mpi
def test_communicators_that_cannot_serve_are_refused(comm):
    from mpi4py import MPI

    freed = comm.Dup()
    freed.Free()
    for bad, says in (
        (0, r"got 0 \(int\); comm=None is all ranks"),
        (MPI.COMM_NULL, "got COMM_NULL, which Split"),
        (freed, "got COMM_NULL.* left of a communicator after Free"),
        (comm.Get_group(), r"\(Group\)"),
    ):
        with pytest.raises(ConfigurationError, match=f"intracommunicator of mpi4py.*{says}"):
            mpicomp.Reducer("dense", comm=bad)


@pytest.mark.mpi(min_size=2)
def test_intercommunicator_is_refused(comm):
    local = comm.Split(comm.rank % 2, comm.rank)
    between = local.Create_intercomm(0, comm, 1 - comm.rank % 2)
    with pytest.raises(ConfigurationError, match=r"got an intercommunicator.*Merge\(\)"):
        mpicomp.Reducer("dense", comm=between)
    both = between.Merge()
    reducer = mpicomp.Reducer("dense", comm=both)
    reducer.close()
    both.Free()
    between.Free()
    local.Free()


def test_process_group_of_torch_is_refused_by_name():
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ConfigurationError, match="got a process group of torch"):
            mpicomp.Reducer("dense", comm=distributed.group.WORLD)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("said", "launcher"),
    [
        ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}, "torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "a launcher that sets RANK and WORLD_SIZE"),
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"}, "horovodrun"),
    ],
    ids=["torchrun", "deepspeed", "horovodrun"],
)
def test_process_that_another_launcher_started_is_not_alone(monkeypatch, clean_environ, said, launcher):
    torch = pytest.importorskip("torch")
    from mpi4py import MPI

    for name in set(os.environ) - set(clean_environ):
        monkeypatch.delenv(name)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    model = torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for door in (
        mpicomp.Reducer,
        lambda: mpicomp.load_checkpoint("none"),
        lambda: mpicomp.torch.broadcast_parameters(model),
        lambda: mpicomp.torch.DistributedOptimizer(sgd, model),
    ):
        with pytest.raises(LaunchError, match=f"{launcher} started 2 processes.*mpiexec -n 2 .*comm=MPI.COMM_SELF"):
            door()
    for alone in (MPI.COMM_SELF, LocalWorld(1).transports[0]):
        mpicomp.Reducer(comm=alone).close()


STATES = """
import mpi4py
mpi4py.rc.initialize = {initialize}
import numpy as np
import mpicomp
from mpi4py import MPI
{before}
for door in (mpicomp.Reducer, lambda: mpicomp.allreduce(np.ones(2)), lambda: mpicomp.load_checkpoint("none")):
    try:
        made = door()
        print("made", flush=True)
        if isinstance(made, mpicomp.Reducer):
            made.close()
    except mpicomp.errors.LaunchError as error:
        print(error, flush=True)
if MPI.Is_initialized() and not MPI.Is_finalized():
    MPI.Finalize()
"""


@pytest.mark.parametrize(
    ("initialize", "before", "says"),
    [
        (False, "", "mpi: MPI is not initialized"),
        (True, "MPI.Finalize()", "mpi: MPI is finalized and cannot be initialized again"),
        (False, "MPI.Init_thread()", "made"),
    ],
    ids=["not begun", "over", "begun by the program"],
)
def test_mpi_that_is_not_there_is_a_launch_error(mpiexec, initialize, before, says, tmp_path):
    done = mpiexec(1, "-c", STATES.format(initialize=initialize, before=before), timeout=60, cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout.count(says) == 3
