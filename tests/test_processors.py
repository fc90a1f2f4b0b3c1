"""OpenMP binds the main thread, and the threads that exchange keep the processors that the process had."""

import os

import pytest

pytest.importorskip("torch")

PROGRAM = """
import os
had = os.sched_getaffinity(0)
{imports}
import threading, time
import numpy as np
from mpicomp.transport.scheduler import ProgressThread
reducer = mpicomp.Reducer("dense")
thread = ProgressThread(reducer.transport, channels=1).start()
reducer.reduce({{"w": np.ones(4)}})
deadline = time.monotonic() + 5
while any(os.sched_getaffinity(thread.native_id) != had for thread in threading.enumerate()[1:]):
    assert time.monotonic() < deadline, [os.sched_getaffinity(thread.native_id) for thread in threading.enumerate()]
    time.sleep(0.01)
assert os.sched_getaffinity(0) < had
print(sorted(thread.name for thread in threading.enumerate()[1:]), flush=True)
thread.stop()
reducer.close()
"""


@pytest.mark.skipif(os.cpu_count() == 1, reason="one processor cannot be narrowed")
@pytest.mark.parametrize("imports", ["import torch, mpicomp", "import mpicomp, torch"])
def test_threads_have_the_mask_of_the_process(mpiexec, imports):
    env = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
    done = mpiexec(2, "-c", PROGRAM.format(imports=imports), timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("['mpicomp progress', 'mpicomp watch']") == 2
    assert done.stderr.count("OMP_PROC_BIND=true OMP_PLACES=cores has bound the main thread to 1 of the") == 1
