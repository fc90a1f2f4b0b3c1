"""Programs that end while rounds in the background are under way, and never close what they opened."""

import subprocess
import sys

import pytest
from marks import slow

SCRIPT = """
import sys, time
import numpy as np
from mpicomp.rounds import Round
from mpicomp.transport.mpi import MPITransport

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


@pytest.mark.parametrize("ranks", [slow(1), slow(2), 3, slow(4)])
@pytest.mark.parametrize("numel", [3, 400_000])
def test_a_program_that_never_waits_and_never_closes(mpiexec, ranks, numel):
    job = mpiexec(ranks, "-c", SCRIPT, numel, "forget")
    assert (job.returncode, job.stdout, job.stderr) == (0, "", "")


def test_without_a_launcher(clean_environ):
    job = subprocess.run(
        [sys.executable, "-c", SCRIPT, "3"], env=clean_environ, capture_output=True, text=True, timeout=20, check=False
    )
    assert (job.returncode, job.stdout, job.stderr) == (0, "", "")
