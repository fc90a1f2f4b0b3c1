"""One test of a kernel runs on the host, in an emulation of a GPU, and on a GPU where there is one."""

import numpy as np
import pytest
from device.kinds import GPUS, _built, emulated, gpu_kernels, joining_place, kernels, place

__all__ = ["_built", "emulated", "gpu_kernels", "joining_place", "kernels", "place"]


def pytest_generate_tests(metafunc):
    """Run each test on every kind of device; float64 is slow in an emulation."""
    if "kernels" not in metafunc.fixturenames:
        return
    kinds = GPUS if "gpu_kernels" in metafunc.fixturenames else ["cpu", *GPUS]
    if "dtype" not in metafunc.fixturenames:
        metafunc.parametrize("kernels", kinds, indirect=True)
        return
    cases = [
        pytest.param(kind, dtype, marks=[pytest.mark.slow] * (kind == "emulated" and dtype == np.float64))
        for kind in kinds
        for dtype in (np.float32, np.float64)
    ]
    metafunc.parametrize(("kernels", "dtype"), cases, indirect=["kernels"])
