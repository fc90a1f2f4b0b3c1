"""One test of a kernel runs on the host, in an emulation of a GPU, and on a GPU where there is one."""

import numpy as np
import pytest
from device.kinds import GPUS, emulated, gpu_kernels, joining_place, kernels, place

__all__ = ["emulated", "gpu_kernels", "joining_place", "kernels", "place"]


# Families whose float64 is tried in every run, on the host: what selections and their sums are made of.
FLOAT64 = {"accumulate", "message_kernels", "moments", "scatter", "select", "elementwise", "above_threshold"}

HOST_ONLY = {"merge", "products"}  # families without kernels of a GPU, which lists no candidates either


def pytest_generate_tests(metafunc):
    """Run each test on every kind of device; float64 is slow in an emulation, and on the host but for some families."""
    if "kernels" not in metafunc.fixturenames:
        return
    module = metafunc.module.__name__.rpartition("test_")[2]
    hosts_only = module in HOST_ONLY or "candidates" in metafunc.function.__name__
    kinds = ["cpu"] if hosts_only else GPUS if "gpu_kernels" in metafunc.fixturenames else ["cpu", *GPUS]
    if "dtype" not in metafunc.fixturenames:
        metafunc.parametrize("kernels", kinds, indirect=True)
        return
    fast = {"cpu", "cuda"} if module in FLOAT64 else {"cuda"}
    cases = [
        pytest.param(kind, dtype, marks=[] if dtype == np.float32 or kind in fast else [pytest.mark.slow])
        for kind in kinds
        for dtype in (np.float32, np.float64)
    ]
    metafunc.parametrize(("kernels", "dtype"), cases, indirect=["kernels"])
