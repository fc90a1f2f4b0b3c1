import pytest

from mpicomp.doctor.threads import count, of_task


@pytest.mark.parametrize(
    ("said", "threads"), [("4", 4), ("4,2", 4), (" 3 ", 3), ("", 16), ("0", 16), ("many", 16), (None, 16), ("²", 16)]
)
def test_threads(said, threads):
    found, reason = count({} if said is None else {"OMP_NUM_THREADS": said}, 16)
    assert found == threads
    assert (reason == "OMP_NUM_THREADS is not set") == (threads == 16)


@pytest.mark.parametrize(("said", "cpus"), [("4", 4), ("", None), ("0", None), ("x", None), (None, None)])
def test_cpus_of_a_task(said, cpus):
    assert of_task({} if said is None else {"SLURM_CPUS_PER_TASK": said}) == cpus
