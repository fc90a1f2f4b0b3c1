"""A rank that is asked to stop: all of them know after the same step, at no cost before, and no number changes."""

import os
import signal
import threading

import numpy as np
import pytest

import mpicomp
from mpicomp.errors import ConfigurationError
from mpicomp.job import stop

ASKED_AT, STEPS = 3, 6


@pytest.fixture
def signals(monkeypatch):
    """Have SIGTERM and SIGUSR1 ask, and put back what they did before."""
    monkeypatch.setattr(stop, "asked", False)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    mpicomp.stop_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def gradients(rank, step):
    rng = np.random.default_rng((rank, step))
    return {name: rng.standard_t(3, size).astype(np.float32) for name, size in {"a": 700, "b": 3000, "c": 5}.items()}


def run(comm, compressor, collective, ask=lambda step: None):
    reducer = mpicomp.Reducer(compressor, collective, policy={"warmup": 0}, comm=comm, bucket_bytes=2000)
    means, records = [], []
    for step in range(STEPS):
        ask(step)
        means.append({name: np.array(mean) for name, mean in reducer.reduce(gradients(comm.rank, step), 0.1).items()})
        records.append(reducer.last_step)
    reducer.close()
    return means, records


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize(
    ("compressor", "collective"),
    [(mpicomp.TopK(ratio=0.05), "allgather"), ("dense", "allreduce"), ("powersgd", "low-rank")],
    ids=str,
)
def test_signal_on_one_rank_stops_all_after_the_same_step(comm, signals, compressor, collective):
    def ask(step):
        if step == ASKED_AT and comm.rank == comm.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    straight, before = run(comm, compressor, collective)
    means, records = run(comm, compressor, collective, ask)
    assert [record.stop for record in before] == [False] * STEPS
    assert [record.stop for record in records] == [False] * ASKED_AT + [True] * (STEPS - ASKED_AT)
    # Rounds are spent on it in the first step alone, where ranks compare all that there is, and where one was asked.
    assert [record.agreed for record in before] == [step == 0 for step in range(STEPS)]
    assert [record.agreed for record in records] == [step in (0, ASKED_AT) for step in range(STEPS)]
    for one, other in zip(straight, means, strict=True):
        assert one.keys() == other.keys()
        assert all(one[name].tobytes() == other[name].tobytes() for name in one)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_signals_in_different_steps_stop_all_ranks(comm, signals):
    def ask(step):
        if step == ASKED_AT + comm.rank:
            os.kill(os.getpid(), signal.SIGTERM)

    _, records = run(comm, "topk", "allgather", ask)
    assert [record.stop for record in records] == [step >= ASKED_AT for step in range(STEPS)]
    assert not any(record.agreed for record in records[ASKED_AT + 1 :])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_asks_to_stop(signals, number):
    assert not stop.asked
    os.kill(os.getpid(), number)
    assert stop.asked


def test_stop_on_signals_needs_the_main_thread():
    problems = []

    def call():
        with pytest.raises(ConfigurationError, match="main thread alone") as caught:
            mpicomp.stop_on_signals()
        problems.append(caught)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(problems) == 1
