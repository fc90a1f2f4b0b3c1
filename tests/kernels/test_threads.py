"""Threads of the kernels: as many as the caller says, and none that Numba starts by itself, one for each core."""

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
import numpy as np
from mpicomp.kernels import cpu

def running():
    return len(os.listdir("/proc/self/task"))

threads = int(sys.argv[1])
gradient, residual = np.ones(1 << 20, np.float32), np.zeros(1 << 20, np.float32)
before = running()
cpu.accumulate(gradient, residual, np.empty_like(gradient), threads)
cpu.tail(gradient, 0.5, 1, threads)
cpu.kth_magnitude(gradient, 10)
print(running() - before)
"""


@pytest.mark.parametrize("threads", [1, 3])
def test_a_kernel_runs_on_the_threads_that_it_is_given(threads):
    # Numba starts all of its own with the first loop that is parallel.
    environment = {**os.environ, "NUMBA_NUM_THREADS": "6"}
    command = [sys.executable, "-c", CODE, str(threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert threads - 1 <= int(done.stdout) < threads + 3  # the compiler may have one of its own
