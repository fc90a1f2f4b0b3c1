"""Fixtures of tests that need a device: stand-ins for CuPy, whose streams take their time, and what runs on them."""

import pytest
from device import fake_cuda
from device.kinds import emulated, joining_place, place, torch_memory
from marks import slow

__all__ = ["emulated", "joining_place", "place", "torch_memory"]


@pytest.fixture(params=["lazy", slow("eager"), slow("random")])
def cupy(request, monkeypatch):
    """With kernels of the host, and work that is done when somebody waits for it."""
    return fake_cuda.install(monkeypatch, request.param)


@pytest.fixture
def eager(monkeypatch):
    """With kernels of the host, and work that is done at once."""
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def emulated_cupy(emulated, monkeypatch):
    """With kernels of CUDA, which run at once."""
    return fake_cuda.install(monkeypatch, emulated=True)
