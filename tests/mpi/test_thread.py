"""Generators in a thread, in a world of one rank and on a transport whose rounds are done when the test says so."""

import gc
import threading

import numpy as np
import pytest

from mpicomp.errors import ClosedError, MpicompError
from mpicomp.mpi import LocalWorld, Transport
from mpicomp.mpi.rounds import Group, Pending, Round
from mpicomp.mpi.thread import ProgressThread


class Held(Pending):
    def __init__(self, task):
        self.task = task
        self.done = False

    def test(self):
        return self.done


class Slow(Transport):
    """One rank, whose rounds are done when somebody says so."""

    def __init__(self):
        super().__init__()
        self.group = Group(0, 1)
        self.started = []

    def channel(self):
        return self

    def start(self, task):
        self.started.append(Held(task))
        return self.started[-1]

    def wait(self, pending):
        assert pending.done
        pending.task.recv[:] = pending.task.send
        return pending.task.recv


def ask(number, rounds=1):
    for _ in range(rounds):
        send = np.array([number])
        received = yield Round("allreduce", (1,), send.dtype, send=send, recv=np.zeros(1))
    return received.tolist()


def in_the_background(number):
    send = np.array([number])
    pending = yield Round("allreduce", (1,), send.dtype, send=send, recv=np.zeros(1), background=True)
    middle = yield from ask(number + 1)
    last = yield pending
    return [*middle, *last.tolist()]


def fails(after):
    yield from ask(1.0, after)
    raise ValueError("here")


@pytest.fixture
def alone():
    return LocalWorld(1).transports[0]


def test_end_of_a_block_waits_for_jobs_which_have_logs(alone):
    with ProgressThread(alone) as thread:
        jobs = [thread.submit(exchange) for exchange in (ask(1.0, rounds=3), in_the_background(8.0))]
    assert [job.result(timeout=0) for job in jobs] == [[1.0], [9.0, 8.0]]
    assert [len([entry for entry in job.log if entry.sends]) for job in jobs] == [3, 2]
    assert [len([entry for entry in job.log if not entry.sends]) for job in jobs] == [0, 1]  # waits for the last one
    assert all(entry.operation == "allreduce" and entry.seconds >= 0 for job in jobs for entry in job.log)


def test_rounds_begin_in_the_order_of_the_jobs():
    transport = Slow()
    with ProgressThread(transport) as thread:
        jobs = [thread.submit(ask(float(number), rounds=2)) for number in range(3)]
        assert not jobs[0].cancel()
        while not jobs[-1].done():
            begun = len(transport.started)
            done = [job.done() for job in reversed(jobs)]  # in this order, since the thread does not stop meanwhile
            assert done == sorted(done)
            assert [held.done for held in transport.started[: begun - 1]] == [True] * max(begun - 1, 0)
            for held in transport.started[:begun]:
                held.done = True
    assert [held.task.send[0] for held in transport.started] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert [job.result() for job in jobs] == [[0.0], [1.0], [2.0]]


def test_thread_runs_generators_and_ends(alone):
    before = threading.active_count()
    thread = ProgressThread(alone)
    with pytest.raises(MpicompError, match="call start"):
        thread.submit(ask(1.0))
    thread.start()
    jobs = [thread.submit(ask(float(number), rounds=3)) for number in range(5)]
    assert [job.result(timeout=10) for job in jobs] == [[float(number)] for number in range(5)]
    failed = thread.submit(fails(1))
    with pytest.raises(ValueError, match="here"):
        failed.result(timeout=10)
    assert thread.submit(ask(7.0)).result(timeout=10) == [7.0]
    thread.stop()
    thread.stop()
    assert threading.active_count() == before
    with pytest.raises(MpicompError, match="nothing after stop"):
        thread.submit(ask(1.0))
    with pytest.raises(MpicompError, match="started once"):
        thread.start()


def test_thread_without_references_is_collected(alone):
    before = threading.active_count()
    thread = ProgressThread(alone).start()
    assert thread.submit(ask(1.0)).result(timeout=10) == [1.0]
    del thread
    gc.collect()
    assert threading.active_count() == before


def test_failure_in_a_block_stops_the_thread_which_waits_for_no_rank():
    jobs = []

    def block():
        with ProgressThread(Slow()) as thread:
            jobs.append(thread.submit(ask(1.0)))
            raise ValueError("elsewhere")

    with pytest.raises(ValueError, match="elsewhere"):
        block()
    with pytest.raises(ClosedError, match="before this was done"):
        jobs[0].result(timeout=0)


LEVELS = """
import sys
import numpy as np
from mpicomp.mpi.rounds import Round
from mpicomp.errors import LaunchError
from mpicomp.mpi.thread import ProgressThread
from mpicomp.mpi.comm import MPITransport

def ask():
    send = np.ones(1)
    return (yield Round("allreduce", (1,), send.dtype, send=send, recv=np.zeros(1)))

transport = MPITransport()
try:
    with ProgressThread(transport, alone="alone" in sys.argv) as thread:
        said = thread.submit(ask()).result()[0]
except LaunchError as error:
    said = error
if transport.group.rank == 0:
    print(said)
"""


@pytest.mark.parametrize(
    ("level", "alone", "said"),
    [
        ("multiple", "", "2.0"),
        ("serialized", "alone", "2.0"),
        ("serialized", "", "needs MPI_THREAD_MULTIPLE, and this MPI provides MPI_THREAD_SERIALIZED; set "),
        ("funneled", "alone", "needs MPI_THREAD_SERIALIZED, and this MPI provides MPI_THREAD_FUNNELED; set "),
    ],
)
def test_thread_without_its_mpi_level_is_refused(mpiexec, level, alone, said):
    job = mpiexec(2, "-c", LEVELS, alone, env={"MPI4PY_RC_THREAD_LEVEL": level})
    assert job.returncode == 0, job.stderr
    assert said in job.stdout
