from mpicomp import doctor
from mpicomp.doctor.loaded import thread_notes
from mpicomp.system.libraries import files


def test_which_library_is_loaded():
    maps = [
        "7f00-7f01 r-xp 00000000 08:01 41 /env/mpi4py/MPI.mpich.cpython-311-x86_64-linux-gnu.so",
        "7f00-7f01 r-xp 00000000 08:01 42 /opt/mpi/lib/libmpi_cxx.so.40",
        "7f00-7f01 rw-p 00000000 00:00 0",
        "7f00-7f01 r-xp 00000000 08:01 43 /opt/my mpi/lib/libmpich.so.12.1.0",
    ]
    assert doctor.library(maps) == "/opt/my mpi/lib/libmpich.so.12.1.0"
    assert doctor.library(maps[:3]) is None
    assert doctor.library(["1-2 r-xp 0 0:0 4 /opt/cray/lib/libmpi_gnu_123.so.12"]) is not None


def test_files_are_told_once():
    line = "7f00-7f01 r-xp 00000000 08:01 43 /opt/a b/libucp.so.0"
    assert files([line, "7f00-7f01 rw-p 0 0:0 0", line]) == ["/opt/a b/libucp.so.0"]


def test_thread_levels():
    assert thread_notes("multiple") == thread_notes("serialized") == []
    assert len(thread_notes("single")) == len(thread_notes("funneled")) == 1
