"""A rank that does not come is named by those who wait for it."""

import re

import pytest
from marks import slow

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


@pytest.fixture
def run(mpiexec):
    def start(collective, late, stall, ranks=3):
        source = SCRIPT.format(collective=collective, late=late)
        return mpiexec(ranks, "-c", source, timeout=60, env={"MPICOMP_STALL": stall})

    return start


@pytest.mark.parametrize("collective", ["allreduce", slow("ring")])
def test_the_ranks_that_are_missing_are_named(run, collective):
    done = run(collective, late="1,", stall="1")
    assert done.returncode == 0, done.stderr
    assert len(re.findall("mpicomp: rank", done.stderr)) == 1
    where = r"in the \w+ of step 1, bucket 0 \('layer.weight' ...\): rank 1 is not there"
    assert re.search(rf"mpicomp: rank 0 has waited for (\S+) s {where}", done.stderr)


@pytest.mark.slow
def test_several_are_missing(run):
    done = run("allreduce", late="0, 1", stall="1")
    assert "rank 2 has waited" in done.stderr
    assert "ranks 0, 1 are not there" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("stall", ["0", slow(""), slow("30")])
def test_nothing_is_said_otherwise(run, stall):
    done = run("allreduce", late="1,", stall=stall)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_number_of_seconds_that_is_none(run):
    done = run("allreduce", late="9,", stall="soon")
    assert done.returncode != 0
    assert "MPICOMP_STALL must be a number of seconds" in done.stderr
