"""PyTorch's own exchange among the ranks of an MPI job, when one of them fails."""

import pytest
from marks import slow

pytest.importorskip("torch")

SCRIPT = """
import numpy as np
import torch
from mpicomp.bench.measure.timings import gather
from mpicomp.bench.gloo import process_group
from mpicomp.transport.mpi import MPITransport
from torch import distributed

transport = MPITransport()
with process_group(transport):
    if transport.group.rank == 1:
        pending = distributed.all_reduce(torch.ones(4), async_op=True)
        raise RuntimeError("only this rank fails")
    gather(np.zeros(1), transport)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [slow(2), 3])
def test_failed_rank_waits_for_no_exchange(mpiexec, ranks):
    done = mpiexec(ranks, "-c", SCRIPT, timeout=120)
    assert done.returncode != 0
    assert "RuntimeError: only this rank fails" in done.stderr
