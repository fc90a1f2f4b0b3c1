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
def run(mpiexec, tmp_path):
    def start(collective, late, stall, ranks=3, end=""):
        source = SCRIPT.format(collective=collective, late=late)
        env = {"MPICOMP_STALL": stall, "MPICOMP_STALL_END": end}
        return mpiexec(ranks, "-c", source, timeout=60, env=env, cwd=tmp_path)

    return start


@pytest.mark.parametrize("collective", ["allreduce", slow("ring")])
def test_the_ranks_that_are_missing_are_named(run, collective):
    done = run(collective, late="1,", stall="1")
    assert done.returncode == 0, done.stderr
    assert len(re.findall("mpicomp: rank", done.stderr)) == 1
    where = rf"in the \w+ of step 1, bucket 0 \('layer.weight' ...\) by {collective}: rank 1 is not there"
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


def test_a_file_has_the_stacks_of_all_ranks(run, tmp_path):
    done = run("allreduce", late="1,", stall="1")
    [file] = tmp_path.glob("mpicomp-stacks-*.txt")
    assert f"Stacks of all ranks that answer are in {file}" in done.stderr
    of_ranks = {own[0]: own for own in re.split(r"^rank (?=\d, process)", file.read_text(), flags=re.M)[1:]}
    assert set(of_ranks) == {"0", "1", "2"}
    assert all("thread MainThread:" in own and '"<string>", line' in own for own in of_ranks.values())
    waits = {rank: "in reduce" in own for rank, own in of_ranks.items()}
    assert waits == {"0": True, "1": False, "2": True}  # rank 1 is asleep, in the script itself


def test_the_job_ends_after_a_second_limit(run):
    done = run("allreduce", late="1,", stall="1", end="2")
    assert done.returncode != 0
    assert "rank 1 is not there for more than 2 s; ending the job (MPICOMP_STALL_END=0 waits for ever)" in done.stderr


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"stall": "soon"}, "MPICOMP_STALL"), slow({"stall": "1", "end": "never"}, "MPICOMP_STALL_END")],
    ids=str,
)
def test_a_number_of_seconds_that_is_none(run, settings, name):
    done = run("allreduce", late="9,", **settings)
    assert done.returncode != 0
    assert f"{name} must be a number of seconds" in done.stderr
