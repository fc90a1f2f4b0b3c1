"""Why processes that were started together do not find each other."""

import pytest

from mpicomp.system.launcher import protocol, singletons

STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}
PMI2 = {**STEP, "PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "5"}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "3", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "PMIX_RANK": "2"}


@pytest.mark.parametrize(
    ("environ", "mpi", "why"),
    [
        (STEP, "mpich", "(no PMI is offered, as by srun --mpi=none)"),
        (STEP, "openmpi", "(no PMI is offered, as by srun --mpi=none)"),
        (PMI2, "openmpi", "(PMI is offered, and Open MPI wants PMIx)"),
        (HYDRA, "openmpi", "(PMI is offered, and Open MPI wants PMIx)"),
        (MPIRUN, "mpich", "(PMIx is offered, and MPICH wants PMI)"),
    ],
)
def test_singletons_end_with_the_reason(environ, mpi, why):
    assert singletons(environ, 1, mpi).what.endswith(why)


@pytest.mark.parametrize(
    ("environ", "spoken"), [({}, None), (STEP, None), (PMI2, "PMI"), (HYDRA, "PMI"), (MPIRUN, "PMIx")]
)
def test_protocol_is_that_of_the_environment(environ, spoken):
    assert protocol(environ) == spoken
