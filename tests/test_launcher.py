import pytest

from mpicomp.system.launcher import Launch, detect, protocol, singletons

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


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, None),
        (HYDRA, Launch("hydra", 4, 3, 1, 2)),
        (OPENMPI, Launch("openmpi", 4, 2, 0, 2)),
        (STEP, Launch("slurm", 4, 1, 1)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, Launch("pmi", 2, 1)),
        ({"PMIX_RANK": "1"}, None),  # no size to compare with
        ({"PMI_SIZE": "2"}, None),
        ({"PMI_SIZE": "two", "PMI_RANK": "0"}, None),
        ({"PMI_SIZE": "2", "PMI_RANK": "2"}, None),
        ({"PMI_SIZE": "", "PMI_RANK": ""}, None),
    ],
)
def test_each_launcher_is_recognised(environ, launch):
    assert detect(environ) == launch


def test_slurm_with_pmi2_is_slurm():
    assert detect({**STEP, "PMI_SIZE": "4", "PMI_RANK": "1", "PMI_FD": "5"}) == Launch("slurm", 4, 1, 1)


@pytest.mark.parametrize("inner", [HYDRA, OPENMPI])
@pytest.mark.parametrize("outer", [BATCH, STEP])
def test_launcher_inside_slurm_comes_before_slurm(inner, outer):
    assert detect({**outer, **inner}) == detect(inner)


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290", "4294967292"])
def test_batch_script_and_interactive_shell_are_no_step(step):
    environ = BATCH if step is None else {**BATCH, "SLURM_STEP_ID": step, "SLURM_STEP_NUM_TASKS": "1"}
    assert detect(environ) is None
    assert singletons(environ, 1) is None


def test_step_with_only_the_size_of_the_job():
    assert detect({**BATCH, "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}) == Launch("slurm", 4, 1, 0)


@pytest.mark.parametrize("environ", [HYDRA, OPENMPI, STEP])
def test_singletons_are_noticed(environ):
    assert singletons(environ, 4) is None
    assert singletons(environ, 1).what.count("4") == 2


def test_one_process_is_no_singleton_by_mistake():
    assert singletons({"PMI_SIZE": "1", "PMI_RANK": "0"}, 1) is None
    assert singletons({}, 1) is None


@pytest.mark.parametrize(
    ("environ", "spoken", "mpi", "fix"),
    [
        (STEP, None, "mpich", "srun --mpi=pmi2"),
        (STEP, None, "openmpi", "srun --mpi=pmix"),
        (STEP | {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "5"}, "PMI", "openmpi", "srun --mpi=pmix"),
        (OPENMPI, "PMIx", "mpich", "/env/bin/mpiexec"),
        (HYDRA, "PMI", "openmpi", "/env/bin/mpiexec"),
    ],
)
def test_singletons_name_the_protocol_and_a_line_to_copy(environ, spoken, mpi, fix):
    assert protocol(environ) == spoken
    problem = singletons(environ, 1, mpi, "/env/bin/python", ["python", "my train.py"])
    wanted = "PMI" if mpi == "mpich" else "PMIx"
    vendor = "MPICH" if mpi == "mpich" else "Open MPI"
    offered = (
        f"{spoken} is offered, and {vendor} wants {wanted}" if spoken else "no PMI is offered, as by srun --mpi=none"
    )
    assert problem.what.endswith(f"({offered})")
    assert problem.fix == f"{fix} -n 4 python 'my train.py'"
