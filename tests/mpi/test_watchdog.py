"""A rank that does not come is named by those who wait for it, and programs end that never close their transport."""

import re
import subprocess
import sys

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
def test_missing_rank_is_named(run, tmp_path, collective):
    done = run(collective, late="1,", stall="1")
    assert done.returncode == 0, done.stderr
    assert len(re.findall("mpicomp: rank", done.stderr)) == 1
    where = rf"in the \w+ of step 1, bucket 0 \('layer.weight' ...\) by {collective}: rank 1 is not there"
    assert re.search(rf"mpicomp: rank 0 has waited for (\S+) s {where}", done.stderr)
    [file] = tmp_path.glob("mpicomp-stacks-*.txt")
    assert f"Stacks of all ranks that answer are in {file}" in done.stderr
    stacks = {text[0]: text for text in re.split(r"^rank (?=\d, process)", file.read_text(), flags=re.M)[1:]}
    assert all("thread MainThread:" in text and '"<string>", line' in text for text in stacks.values())
    waits = {rank: "in reduce" in text for rank, text in stacks.items()}
    assert waits == {"0": True, "1": False, "2": True}  # rank 1 is asleep, in the script itself


@pytest.mark.slow
def test_several_missing_ranks_are_named(run):
    done = run("allreduce", late="0, 1", stall="1")
    assert "rank 2 has waited" in done.stderr
    assert "ranks 0, 1 are not there" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("stall", ["0", "30"])
def test_nothing_is_printed_within_the_limit(run, stall):
    done = run("allreduce", late="1,", stall=stall)
    assert (done.returncode, done.stderr) == (0, "")


def test_job_ends_after_a_second_limit(run):
    done = run("allreduce", late="1,", stall="1", end="2")
    assert done.returncode != 0
    assert "rank 1 is not there for more than 2 s; ending the job (MPICOMP_STALL_END=0 waits for ever)" in done.stderr


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"stall": "soon"}, "MPICOMP_STALL"), slow({"stall": "1", "end": "never"}, "MPICOMP_STALL_END")],
    ids=str,
)
def test_wrong_number_of_seconds_is_refused(run, settings, name):
    done = run("allreduce", late="9,", **settings)
    assert done.returncode != 0
    assert f"{name} must be a number of seconds" in done.stderr


EXIT = """
import sys, time
import numpy as np
from mpicomp.mpi.rounds import Round
from mpicomp.mpi.comm import MPITransport

transport = MPITransport()
rank, ranks = transport.group.rank, transport.group.size
numel = int(sys.argv[1])

def exchange():
    for operation in ("allgatherv", "sendrecv", "allreduce"):
        counts = {"allgatherv": [numel] * ranks, "sendrecv": (numel, numel), "allreduce": (numel,)}[operation]
        peers = ((rank + 1) % ranks, (rank - 1) % ranks)
        recv = np.zeros(numel * (ranks if operation == "allgatherv" else 1))
        yield Round(operation, counts, recv.dtype, send=np.ones(numel), recv=recv, peers=peers, background=True)
    send = np.ones(10)
    yield Round("allreduce", (10,), send.dtype, send=send, recv=np.zeros(10))

transport.run(exchange())
if "forget" in sys.argv:
    del transport
time.sleep(0.3 * (rank % 2))  # not all of them end at once
"""


@pytest.mark.parametrize("numel", [3, 400_000])
def test_program_that_never_waits_or_closes_ends(mpiexec, numel):
    job = mpiexec(3, "-c", EXIT, numel, "forget")
    assert (job.returncode, job.stdout, job.stderr) == (0, "", "")


def test_program_without_a_launcher_ends(clean_environ):
    job = subprocess.run(
        [sys.executable, "-c", EXIT, "3"], env=clean_environ, capture_output=True, text=True, timeout=20, check=False
    )
    assert (job.returncode, job.stdout, job.stderr) == (0, "", "")
