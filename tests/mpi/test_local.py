"""Ranks inside one process: each operation in each group, ranks that do not meet, and simulated time."""

import numpy as np
import pytest
from exchanges import at_once, in_the_background

from mpicomp.errors import MpicompError
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.rounds import Round

pytestmark = pytest.mark.quick


def ask(operation, value):
    send = np.array([value], np.float64)
    received = yield Round(operation, (1,), send.dtype, send=send, recv=np.empty(1))
    return received.tolist()


@pytest.mark.parametrize("layout", [[0], [0, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1, 2, 2]], ids=str)
@pytest.mark.parametrize("program", [at_once, in_the_background])
def test_every_operation_in_every_group(layout, program):
    looked = LocalWorld(len(layout), hosts=layout).run([program(layout, rank) for rank in range(len(layout))])
    assert min(looked) > 0


def test_ranks_in_different_rounds_are_an_error():
    with pytest.raises(MpicompError, match=r"rank 0 asks for .*allreduce.* and rank 1 for .*bcast"):
        LocalWorld(2).run([ask("allreduce", 1.0), ask("bcast", 1.0)])


def test_rank_that_returns_early_is_an_error():
    def silent():
        return 1
        yield

    with pytest.raises(MpicompError, match="1 ranks are done while others still ask for allreduce"):
        LocalWorld(2).run([silent(), ask("allreduce", 1.0)])


def test_rank_that_raises_closes_the_others():
    closed = []

    def fails():
        raise ValueError("here")
        yield

    def waits():
        try:
            yield from ask("allreduce", 1.0)
        finally:
            closed.append(True)

    with pytest.raises(ValueError, match="here"):
        LocalWorld(2).run([waits(), fails()])
    assert closed == [True]


def test_one_rank_of_several_is_refused():
    with pytest.raises(MpicompError, match=r"use LocalWorld\.run"):
        LocalWorld(2).transports[0].run(ask("allreduce", 1.0))
    assert LocalWorld(1).transports[0].run(ask("allreduce", 4.0)) == [4.0]


def test_background_rounds_pass_the_link_in_turn():
    """Two of a second each: a rank that computes for no time waits for both, and for a third that is not background."""
    world = LocalWorld(2, hosts=2, network=lambda task, group: 1.0)

    def program(end):
        arrays = [np.ones(1), np.empty(2)]
        begun = []
        for _ in range(2):
            begun.append((yield Round("allgatherv", [1, 1], arrays[0].dtype, 0, *arrays, background=True)))
        seconds = [end.clock()]
        for pending in begun:
            yield pending
            seconds.append(end.clock())
        yield Round("allgatherv", [1, 1], arrays[0].dtype, 0, *arrays)
        return [*seconds, end.clock()]

    assert world.run([program(end) for end in world.transports]) == [[0.0, 1.0, 2.0, 3.0]] * 2
