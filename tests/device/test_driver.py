"""Contexts of CUDA's driver, with a library that keeps what is current in each thread."""

import threading

import pytest

from mpicomp.device import driver


class Library:
    """What the driver's library does about contexts; everything else succeeds."""

    def __init__(self):
        self.threads = {}

    @property
    def stack(self):
        return self.threads.setdefault(threading.get_ident(), [])

    def cuDevicePrimaryCtxRetain(self, context, device):  # noqa: N802 (CUDA's names)
        context._obj.value = 7000 + device.value
        return 0

    def cuDeviceGet(self, handle, number):  # noqa: N802
        handle._obj.value = number.value
        return 0

    def cuCtxPushCurrent_v2(self, context):  # noqa: N802
        self.stack.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context):  # noqa: N802
        context._obj.value = self.stack.pop()
        return 0

    def cuCtxGetCurrent(self, context):  # noqa: N802
        context._obj.value = self.stack[-1] if self.stack else None
        return 0

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.stack[-1:] = [context.value]
        return 0

    def __getattr__(self, name):
        return lambda *arguments: 0


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(driver, "_in_use", [])
    return driver.Driver(Library())


def in_a_thread(run):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    return thread.ident


def test_a_thread_without_a_context_gets_that_of_its_device(cuda):
    cuda.record(3, 1, 1)
    assert not cuda._library.stack
    other = in_a_thread(driver.make_current)
    assert cuda._library.threads[other] == [7003]
    assert not cuda._library.stack


def test_a_context_that_a_thread_has_stays(cuda):
    cuda.record(3, 1, 1)
    cuda._library.stack.append(1)
    driver.make_current()
    assert cuda._library.stack == [1]


def test_where_no_device_is_used_nothing_is_made_current(cuda):
    driver.make_current()
    assert not cuda._library.stack
