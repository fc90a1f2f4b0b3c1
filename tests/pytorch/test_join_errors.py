"""What goes wrong where ranks have different numbers of batches, and what ends well."""

from pathlib import Path

import pytest
import torch
from counted import Count
from marks import slow
from replicas import BATCHES, assert_replicas, distribute, loop, network, square, steps_of, train

import mpicomp
from mpicomp.errors import ConfigurationError, DisagreementError, NonFiniteError
from mpicomp.transport import LocalWorld


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize("overlap", [True, slow(False)])
@pytest.mark.parametrize(("steps", "some"), [(0, 2), (2, 0), slow(0, 0), slow(2, 2)])
def test_rank_that_steps_without_join_is_refused(comm, steps, some, overlap):
    """At the first step of all, or later; the others may have no batches."""
    model = network()
    optimizer = distribute(model, comm, overlap=overlap)
    train(model, optimizer, range(steps), comm.rank)

    def run():
        if comm.rank < comm.size - 1:
            loop(model, optimizer, comm, some)
        else:
            optimizer.zero_grad()
            square(model, 9, comm.rank).backward()
            optimizer.step()

    with pytest.raises(DisagreementError, match=r"join\(\) must be the same on all ranks, got True on rank 0 and Fal"):
        run()
    # All ranks have raised it, and continue.
    optimizer.zero_grad()
    with optimizer.accumulate():
        square(model, 5, comm.rank).backward()
    optimizer.step()
    assert_replicas(model, comm)


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize("overlap", [True, slow(False)])
def test_error_that_leaves_the_context_sends_nothing(comm, overlap):
    model = network()
    optimizer = distribute(model, comm, overlap=overlap)
    square(model, 0, comm.rank).backward()
    optimizer.step()
    sent = []
    transport = optimizer.reducer.transport
    inner = transport.run
    transport.run = lambda exchange: sent.append(1) or inner(exchange)

    def fail():
        with optimizer.join():
            optimizer.zero_grad()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not sent
    del transport.run
    loop(model, optimizer, comm, 1 + comm.rank)
    assert_replicas(model, comm)


FAILS = """
import sys, torch, mpicomp
from mpi4py import MPI
sys.path.insert(0, sys.argv[1])
from replicas import distribute, network, square
comm, model = MPI.COMM_WORLD, network()
optimizer = distribute(model, comm, overlap=sys.argv[2] == "True")
try:
    with optimizer.join():
        for step in range(5 * comm.rank + 3):
            optimizer.zero_grad()
            square(model, step, comm.rank).backward()
            if comm.rank == 1 and step == 5:
                raise KeyError("of this rank alone")
            optimizer.step()
finally:
    optimizer.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "overlap"), [(2, True), slow(4, False)])
def test_error_of_one_rank_ends_the_job(mpiexec, ranks, overlap):
    """Rank 0 is done by then and goes along; whatever else closes things on the way out."""
    job = mpiexec(ranks, "-c", FAILS, Path(__file__).parents[1], overlap, timeout=60)
    assert job.returncode != 0
    assert "KeyError: 'of this rank alone'" in job.stderr


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize("overlap", [True, slow(False)])
def test_errors_of_a_step_reach_idle_ranks(comm, overlap):
    model = network()
    optimizer = distribute(model, comm, overlap=overlap, compare_every=0)

    def spoil():
        with torch.no_grad():
            if steps_of(optimizer) == 2:
                model[0].weight[0, 0] = torch.nan  # of the rank that goes on alone

    with pytest.raises(NonFiniteError):
        loop(model, optimizer, comm, 3 if comm.rank == 0 else 1, after_step=spoil)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_loop_that_ends_before_its_step_is_refused(comm):
    model = network()
    optimizer = distribute(model, comm)

    def run():
        with optimizer.join():
            for step in range(3):
                optimizer.zero_grad()
                square(model, step, comm.rank).backward()
                if comm.rank == 0 and step == 1:
                    break
                optimizer.step()

    with pytest.raises(ConfigurationError, match=r"ended between backward\(\) and step\(\).*\(on rank 0\)"):
        run()


@pytest.mark.mpi(min_size=2, max_size=2)
def test_parameters_changed_outside_steps_are_named(comm):
    model = network()
    optimizer = distribute(model, comm)

    def clamp():
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)

    with pytest.raises(DisagreementError, match="others changed it outside the optimizer's step"):
        loop(model, optimizer, comm, 1 + comm.rank, after_step=clamp)


def test_nested_contexts_are_refused():
    def alone(model):
        return distribute(model, LocalWorld(1).transports[0])

    one, two = network(), network(1)
    first, second = alone(one), alone(two)
    with first.join():
        for other in (first, second):
            with pytest.raises(ConfigurationError, match=r"one optimizer's join\(\) at a time"), other.join():
                pass
        square(one, 0, 0).backward()
        first.step()
    with second.join():
        square(two, 0, 0).backward()
        second.step()
    assert steps_of(first) == steps_of(second) == 1


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("overlap", [True, slow(False)])
def test_another_optimizer_in_the_loop_is_refused(comm, overlap):
    one, two = network(), network(1)
    first, second = distribute(one, comm, overlap=overlap), distribute(two, comm, overlap=overlap)

    def run():
        with first.join():
            square(two, 0, comm.rank).backward()
            second.step()

    with pytest.raises(ConfigurationError, match="another optimizer than the one that joins"):
        run()


@pytest.mark.mpi(max_size=3)
def test_record_has_the_bytes_of_join(comm, monkeypatch):
    model = network()
    count = Count(monkeypatch)
    optimizer = distribute(model, comm, compressor=mpicomp.TopK(ratio=0.2), collective="allgather")
    totals = []

    def look(*_):
        record = optimizer.reducer.last_step
        totals.append((record.sent_bytes, record.wire_bytes + record.once_wire_bytes))

    optimizer.register_step_post_hook(look)
    loop(model, optimizer, comm, BATCHES[comm.rank])
    optimizer.zero_grad()
    square(model, 0, comm.rank).backward()
    optimizer.step()
    sent, wire = (sum(column) for column in zip(*totals, strict=True))
    found = count.take()
    assert 0 <= found[0] - sent <= (comm.rank == 0)  # the byte that rank 0 broadcasts once, of its cost model
    assert found[1] == pytest.approx(wire, rel=1e-12)
