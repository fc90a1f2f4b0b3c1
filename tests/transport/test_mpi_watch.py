"""A rank that does not come is named by those who wait for it."""

import os
import re
import subprocess
import sys

import pytest

SCRIPT = """
import sys, time
import numpy as np
from mpi4py import MPI
import mpicomp
rank = MPI.COMM_WORLD.rank
reducer = mpicomp.Reducer("dense", "{collective}")
reducer.reduce({{"layer.weight": np.ones(1000, np.float32)}})
if rank in ({late}):
    time.sleep(4)
reducer.reduce({{"layer.weight": np.ones(1000, np.float32)}})
reducer.close()
"""


def run(collective, late, stall, ranks=3):
    source = SCRIPT.format(collective=collective, late=late)
    mpiexec = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    command = [mpiexec, "-n", str(ranks), sys.executable, "-c", source]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "MPI_", "HYDRA"))}
    environment["MPICOMP_STALL"] = stall
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


@pytest.mark.parametrize("collective", ["allreduce", "ring"])
def test_the_ranks_that_are_missing_are_named(collective):
    done = run(collective, late="1,", stall="0.5")
    assert done.returncode == 0, done.stderr
    assert len(re.findall("mpicomp: rank", done.stderr)) == 1
    where = r"in an \w+ of step 1, bucket 0 \('layer.weight' ...\): rank 1 is not there"
    assert re.search(rf"mpicomp: rank 0 has waited for [1-4] s {where}", done.stderr)


def test_several_are_missing():
    done = run("allreduce", late="0, 1", stall="0.5")
    assert "rank 2 has waited" in done.stderr
    assert "ranks 0, 1 are not there" in done.stderr


@pytest.mark.parametrize("stall", ["0", "", "30"])
def test_nothing_is_said_otherwise(stall):
    done = run("allreduce", late="1,", stall=stall)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_number_of_seconds_that_is_none():
    done = run("allreduce", late="9,", stall="soon")
    assert done.returncode != 0
    assert "MPICOMP_STALL must be a number of seconds" in done.stderr


@pytest.mark.mpi(min_size=2)
def test_nothing_is_left_for_whoever_comes_next(comm):
    """MPI numbers communicators anew when they are freed: what nobody has received would turn up in another one."""
    from mpi4py import MPI

    from mpicomp.transport.mpi_watch import Watch

    for saying in ([0], [comm.size - 1], list(range(comm.size))):
        watch = Watch(comm.Dup(), 1000.0)
        if comm.rank in saying:
            watch._say(True)
            watch._say(False)
        watch.close()
        others = [comm.Dup() for _ in range(4)]
        comm.Barrier()
        assert not any(other.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) for other in others)
        for other in others:
            other.Free()
