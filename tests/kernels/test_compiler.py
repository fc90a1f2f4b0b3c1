"""Kernels where Numba does not compile."""

import json
import subprocess
import sys

CALLS = """
import json
import numpy as np
import mpicomp
from mpicomp import kernels
array = np.ones(9, np.float32)
said = []
for call in (
    mpicomp.Reducer,
    lambda: mpicomp.Reducer("topk"),
    lambda: mpicomp.allreduce(array),
    lambda: mpicomp.allreduce(array, error=0.1),
    lambda: kernels.energy(array),
):
    try:
        call()
    except mpicomp.errors.ConfigurationError as error:
        said.append(str(error))
print(json.dumps(said))
"""


def test_uncompiled_kernels_are_refused_when_a_reducer_is_made(clean_environ):
    env = {**clean_environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", CALLS], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said) == 5
    assert all("NUMBA_DISABLE_JIT=1" in words and "unset it" in words for words in said)
