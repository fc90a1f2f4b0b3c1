"""How much is copied between device and host, how often the host waits for numbers, and how much is launched."""

import numpy as np
import pytest
from gpu import device
from worlds import Ranks

import mpicomp
from mpicomp.places.cuda import CudaPlace

NUMEL = 40_000
STEPS = 3


@pytest.fixture
def cupy(emulated, monkeypatch):
    return device.install(monkeypatch, emulated=True)


def counted(cupy, compressor, collective, size, parameters=1):
    """Give, of a rank and a step, bytes up and down, reads of numbers, launches, and the message's bytes."""
    ranks = Ranks(size, compressor, collective, feedback=None if compressor.contractive else False)
    random = np.random.default_rng(0)
    driver = cupy.driver
    names = [str(number) for number in range(parameters)]
    given = [{name: cupy.empty(NUMEL // parameters, np.float32) for name in names} for _ in range(size)]
    for step in range(STEPS):
        for array in (own[name] for own in given for name in names):  # where they were before, as frameworks have it
            array._host[:] = random.laplace(size=array.size)
        if step == STEPS - 1:  # rooms are made and bounds are known by now
            driver.to_host_bytes = driver.from_host_bytes = 0
            cupy.launches.clear()
            places = [place_of(reducer) for reducer in ranks.reducers]
            before = cupy.reads, sum(place.reads for place in places)
        ranks.reduce(given)
    sent = ranks.reducers[0].last_step.buckets[0].sent_bytes
    reads = cupy.reads - before[0] + sum(place.reads for place in places) - before[1]
    return driver.to_host_bytes / size, driver.from_host_bytes / size, reads / size, len(cupy.launches) / size, sent


def place_of(reducer):
    place = reducer._core.layout.buckets[0].place
    assert isinstance(place, CudaPlace)
    return place


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("parameters", [1, 5])
def test_topk_by_allgather(size, parameters, cupy):
    up, down, reads, launches, sent = counted(cupy, mpicomp.TopK(ratio=0.01), "allgather", size, parameters)
    assert sent <= up <= sent + 64
    assert down == size * sent
    assert reads <= 1
    assert launches <= 12
