"""Generators in a thread while others run over MPI, on ranks that go at different speeds."""

import time

import numpy as np
import pytest
from exchanges import DTYPES, LAYOUTS, OPERATIONS, allreduce, at_once, in_the_background

from mpicomp.errors import MessageError
from mpicomp.mpi.rounds import Round, observe

pytestmark = pytest.mark.mpi(max_size=3)


@pytest.fixture(params=["0", "1"], ids=["blocking", "naps"])
def transports(comm, request, monkeypatch):
    from mpicomp.mpi.comm import MPITransport

    monkeypatch.setenv("MPICOMP_NAPS", request.param)
    layouts = LAYOUTS.get(comm.size, [[0] * comm.size])
    made = [(layout, MPITransport(comm, layout=layout)) for layout in (layouts[0], layouts[-1])]
    yield made
    for _, transport in made:
        transport.close()


def unsteady(exchange, seed, asked_for):
    """Run a generator of rounds with pauses that are others on every rank; note the operations that it waits for."""
    rng = np.random.default_rng(seed)

    def pause(asked):
        if rng.random() < 0.1:
            time.sleep(rng.random() * 1e-3)
        if isinstance(asked, Round) and not asked.background:
            asked_for.append(asked.operation)

    return observe(exchange, before=pause)


def programs(layout, rank):
    """Give programs of all kinds; they are the same on all ranks and look at their results themselves."""
    made = [at_once(layout, rank, [operation], dtypes=[np.float64]) for operation in OPERATIONS]
    made += [in_the_background(layout, rank), at_once(layout, rank, [allreduce], ["world"])]
    asked_for = [[] for _ in made]
    return [unsteady(program, [rank, place], asked_for[place]) for place, program in enumerate(made)], asked_for


def test_thread_runs_generators_during_other_rounds(transports, comm):
    from mpicomp.mpi.thread import ProgressThread

    def fails():
        yield from at_once([0] * comm.size, comm.rank, [allreduce], ["world"])
        raise MessageError("on every rank")

    for layout, transport in transports:
        with ProgressThread(transport) as thread:
            failed = thread.submit(fails())
            made, asked_for = programs(layout, comm.rank)
            jobs = [thread.submit(program) for program in made]
            assert transport.run(at_once(layout, comm.rank, dtypes=[np.float32])) > 0
            looked = [job.result(timeout=60) for job in jobs]
        assert looked[-1] == 3 * len(DTYPES)  # sums of each type
        assert [[entry.operation for entry in job.log if not entry.task.background] for job in jobs] == asked_for
        with pytest.raises(MessageError, match="on every rank"):
            failed.result()
