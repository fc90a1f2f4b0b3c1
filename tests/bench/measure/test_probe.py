"""Probes of exchanges, by a clock that the test moves."""

import pytest
from mpicomp.bench.measure import probe
from mpicomp.bench.timed_kernels import Kernel, take_turns

from mpicomp.mpi import LocalWorld


class Clock:
    """A clock that moves by what each exchange takes; calls of a collective are counted."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.calls, self.seconds = 0.0, [], seconds
        monkeypatch.setattr(probe.time, "perf_counter", lambda: self.now)
        original = probe.Reducer
        clock = self

        class Timed(original):
            def __init__(self, compressor, collective, **more):
                super().__init__(compressor, "allreduce", **more)
                self.name = collective

            def reduce(self, gradients, lr=None):
                times = clock.seconds[self.name]
                clock.now += times[min(clock.calls.count(self.name), len(times) - 1)]
                clock.calls.append(self.name)
                return super().reduce(gradients, lr)

        monkeypatch.setattr(probe, "Reducer", Timed)
        monkeypatch.setattr(probe, "fitting", lambda compressor: list(seconds))


@pytest.fixture
def measured(monkeypatch):
    """Return a function that returns the best of scripted collectives, and how often each was called."""

    def start(**seconds):
        clock = Clock(monkeypatch, seconds)
        found = probe.probe_dense(100, LocalWorld(1).transports[0])
        return found, {name: clock.calls.count(name) for name in seconds}

    return start


def test_probe_dense_returns_the_fastest(measured):
    found, calls = measured(one=[9.0, 0.2], two=[0.1], three=[0.25])
    assert (found.collective, found.seconds, found.repeats) == ("two", pytest.approx(0.1), 5)
    assert calls == {"one": 6, "two": 8, "three": 8}


def test_slow_collective_is_dropped_when_warm(measured):
    found, calls = measured(one=[0.1], two=[0.5], three=[0.29])
    assert found.collective == "one"
    assert calls == {"one": 8, "two": 2, "three": 8}


def test_slow_network_is_measured_fewer_times(measured):
    found, calls = measured(one=[4.0])
    assert (found.seconds, found.repeats) == (4.0, 2)
    assert calls == {"one": 3}


def test_slow_kernels_are_repeated_less():
    class Nap(Kernel):
        def run(self):
            for _ in range(1 if self.name == "quick" else 100_000):
                pass

    quick, slow, copy = Nap("quick"), Nap("slow"), Nap("quick")
    take_turns([quick, slow], copy, 1, 16)
    assert (len(quick.seconds), len(slow.seconds), len(copy.seconds)) == (16, 4, 20)
