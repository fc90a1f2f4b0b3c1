"""What a process finds itself in: its launcher and its processors."""

import os

import pytest
from marks import slow

import mpicomp
from mpicomp.errors import ConfigurationError
from mpicomp.job import variables
from mpicomp.job.launcher import Launch, detect, singletons

HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "3", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPENMPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "2",
}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
TORCH = {"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "n1"}
TORCHRUN = {**TORCH, "TORCHELASTIC_RUN_ID": "none"}
HOROVOD = {"HOROVOD_SIZE": "4", "HOROVOD_RANK": "3", "HOROVOD_LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, None),
        (HYDRA, Launch("hydra", 4, 3, 1)),
        (OPENMPI, Launch("openmpi", 4, 2, 0)),
        (STEP, Launch("slurm", 4, 1, 1)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, Launch("pmi", 2, 1)),
        ({"PMIX_RANK": "1"}, None),  # no size to compare with
        ({"PMI_SIZE": "2"}, None),
        ({"PMI_SIZE": "two", "PMI_RANK": "0"}, None),
        ({"PMI_SIZE": "2", "PMI_RANK": "2"}, None),
        ({"PMI_SIZE": "", "PMI_RANK": ""}, None),
        (TORCHRUN, Launch("torchrun", 4, 2, 0)),
        (TORCH, Launch("torch", 4, 2, 0)),
        (HOROVOD, Launch("horovod", 4, 3, 1)),
        ({"WORLD_SIZE": "4"}, None),  # exported in a batch script
        ({**STEP, "PMI_SIZE": "4", "PMI_RANK": "1", "PMI_FD": "5"}, Launch("slurm", 4, 1, 1)),  # srun --mpi=pmi2
        ({**BATCH, "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, Launch("slurm", 4, 1, 0)),  # the size of the job alone
    ],
)
def test_each_launcher_is_recognised(environ, launch):
    assert detect(environ) == launch


@pytest.mark.parametrize("inner", [HYDRA, OPENMPI, TORCHRUN, HOROVOD])
@pytest.mark.parametrize("outer", [BATCH, STEP])
def test_launcher_inside_slurm_comes_before_slurm(inner, outer):
    assert detect({**outer, **inner}) == detect(inner)


@pytest.mark.parametrize("inner", [HYDRA, OPENMPI, STEP])
def test_ranks_that_a_script_has_named_do_not_hide_the_launcher(inner):
    assert detect({**TORCH, **inner}) == detect(inner)
    assert singletons(1, environ={**TORCH, "PMI_SIZE": "1", "PMI_RANK": "0"}) is None


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290", "4294967292"])
def test_batch_script_and_interactive_shell_are_no_step(step):
    environ = BATCH if step is None else {**BATCH, "SLURM_STEP_ID": step, "SLURM_STEP_NUM_TASKS": "1"}
    assert detect(environ) is None
    assert singletons(1, environ=environ) is None


def test_one_process_is_no_singleton_by_mistake():
    assert singletons(1, environ={"PMI_SIZE": "1", "PMI_RANK": "0"}) is None
    assert singletons(1, environ={}) is None


@pytest.mark.parametrize(
    ("environ", "spoken", "mpi", "fix"),
    [
        (STEP, None, "mpich", "srun --mpi=pmi2"),
        (STEP, None, "openmpi", "srun --mpi=pmix"),
        (STEP | {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "5"}, "PMI", "openmpi", "srun --mpi=pmix"),
        (OPENMPI, "PMIx", "mpich", "/env/bin/mpiexec"),
        (HYDRA, "PMI", "openmpi", "/env/bin/mpiexec"),
        (TORCHRUN, None, "mpich", "/env/bin/mpiexec"),
        (HOROVOD, None, "openmpi", "/env/bin/mpiexec"),
    ],
)
def test_singletons_name_the_protocol_and_a_line_to_copy(environ, spoken, mpi, fix):
    problem = singletons(1, mpi, environ, "/env/bin/python", ["python", "my train.py"])
    assert singletons(4, mpi, environ) is None
    assert problem.what.count("4") == 2
    wanted = "PMI" if mpi == "mpich" else "PMIx"
    vendor = "MPICH" if mpi == "mpich" else "Open MPI"
    offered = f"{spoken} is offered, and {vendor} wants {wanted}" if spoken else "no PMI is offered"
    offered += ", as by srun --mpi=none" if environ == STEP else ""
    assert problem.what.endswith(f"({offered})")
    assert problem.fix == f"{fix} -n 4 python 'my train.py'"


@pytest.mark.parametrize("name", variables.FLAGS)
def test_flags_are_words_of_either_kind(name):
    for text in ("0", "false", "off", "No", " OFF "):
        assert variables.flag(name, {name: text}) is False
    for text in ("1", "true", "on", "YES"):
        assert variables.flag(name, {name: text}) is True
    assert variables.flag(name, {}) is variables.flag(name, {name: ""}) is None
    with pytest.raises(ConfigurationError, match=f"{name} must be 0 or 1 .*got 'perhaps'"):
        variables.flag(name, {name: "perhaps"})


def test_unknown_names_are_reported_once_with_the_nearest(monkeypatch, capsys):
    monkeypatch.setattr(variables, "_reported", False)
    environ = {"MPICOMP_STALL": "1", "MPICOMP_STALLS": "5", "MPICOMP_THINGS": "1", "OTHER": "1"}
    for _ in range(2):
        variables.report_unknown(environ)
    said = capsys.readouterr().err.splitlines()
    assert [line.partition("variable ")[2].partition(" ")[0] for line in said] == ["MPICOMP_STALLS", "MPICOMP_THINGS"]
    assert said[0].endswith("did you mean MPICOMP_STALL?")
    assert "known: MPICOMP_ABORT, " in said[1]


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("name", ["MPICOMP_ABORT", "MPICOMP_NAPS", "MPICOMP_CUDA_AWARE"])
def test_nonsense_on_one_rank_is_refused_on_all(comm, monkeypatch, name):
    if comm.rank == comm.size - 1:
        monkeypatch.setenv(name, "perhaps")
    with pytest.raises(ConfigurationError, match=f"{name} must be 0 or 1 "):
        mpicomp.Reducer(comm=comm)
    monkeypatch.setenv(name, "off")
    mpicomp.Reducer(comm=comm).close()


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("name", variables.SECONDS)
def test_limits_are_seconds_or_off(comm, monkeypatch, name):
    monkeypatch.setenv(name, "soon")
    with pytest.raises(ConfigurationError, match=f"{name} must be a number of seconds"):
        mpicomp.Reducer(comm=comm)
    monkeypatch.setenv(name, "off")
    mpicomp.Reducer(comm=comm).close()


# OpenMP binds the main thread, and the threads that exchange keep the processors that the process had.
PROGRAM = """
import os
had = os.sched_getaffinity(0)
{imports}
import threading, time
import numpy as np
from mpicomp.mpi.thread import ProgressThread
reducer = mpicomp.Reducer("dense")
thread = ProgressThread(reducer.transport).start()
reducer.reduce({{"w": np.ones(4)}})
deadline = time.monotonic() + 5
while any(os.sched_getaffinity(thread.native_id) != had for thread in threading.enumerate()[1:]):
    assert time.monotonic() < deadline, [os.sched_getaffinity(thread.native_id) for thread in threading.enumerate()]
    time.sleep(0.01)
assert os.sched_getaffinity(0) < had
print(sorted(thread.name for thread in threading.enumerate()[1:]), flush=True)
thread.stop()
reducer.close()
"""


@pytest.mark.skipif(os.cpu_count() == 1, reason="one processor cannot be narrowed")
@pytest.mark.parametrize("imports", ["import torch, mpicomp", slow("import mpicomp, torch")])
def test_threads_have_the_mask_of_the_process(mpiexec, imports):
    pytest.importorskip("torch")
    env = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
    done = mpiexec(2, "-c", PROGRAM.format(imports=imports), timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("['mpicomp progress', 'mpicomp watch']") == 2
    assert done.stderr.count("OMP_PROC_BIND=true OMP_PLACES=cores has bound the main thread to 1 of the") == 1
