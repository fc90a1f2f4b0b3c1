"""Clocks that are set wrong on purpose are corrected."""

import numpy as np
import pytest

from mpicomp.mpi import LocalWorld
from mpicomp.mpi.clocks import compare_clocks
from mpicomp.mpi.local import LocalTransport
from mpicomp.mpi.rounds import Round, layout_groups

LAYOUTS = [[0, 0], [0, 1], [0, 1, 1, 0, 2, 2]]


WRONG_BY = [50.0, -1000.0, 3.25]  # seconds of each host's clock: far more than any message takes


class Wrong(LocalTransport):
    """A transport whose clock is wrong as its host's is."""

    host: int

    def clock(self):
        return super().clock() + WRONG_BY[self.host]


def wrong_world(layout):
    world = LocalWorld(len(layout), hosts=layout)
    world.transports = [Wrong(*layout_groups(layout, rank), None) for rank in range(len(layout))]
    for end, host in zip(world.transports, layout, strict=True):
        end.host = host
    return world


def compare(world):
    return world.run([compare_clocks(end) for end in world.transports])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_wrong_clocks_are_corrected_within_the_error(layout):
    world = wrong_world(layout)
    for _ in range(2):  # a second comparison begins from nothing
        errors = compare(world)
        assert len(set(errors)) == 1
        assert (errors[0] > 0) == (len(set(layout)) > 1)
        assert errors[0] < 0.5
        for end, host in zip(world.transports, layout, strict=True):
            assert abs(end.offset + WRONG_BY[host] - WRONG_BY[layout[0]]) <= errors[0]
            assert end.offset == world.transports[layout.index(host)].offset


def test_right_clocks_need_no_offset():
    simulated = [LocalWorld(len(hosts), hosts=hosts, network=lambda task, group: 0.1 + 1e-9) for hosts in LAYOUTS]
    for world in (LocalWorld(3, hosts=3), *simulated):
        compare(world)
        assert {end.offset for end in world.transports} == {0.0}
    assert all(len({end.clock() for end in world.transports}) == 1 for world in simulated)


@pytest.mark.mpi
def test_wrong_clocks_over_mpi_are_corrected(comm):
    from mpicomp.mpi.comm import MPITransport

    layout = [rank // 2 for rank in range(comm.size)]

    class Shifted(MPITransport):
        def clock(self):
            return super().clock() + 100.0 * layout[comm.rank]

    transport = Shifted(comm, layout=layout)
    error = transport.run(compare_clocks(transport))
    assert comm.allgather(error) == [error] * comm.size
    assert abs(transport.offset + 100.0 * layout[comm.rank]) <= error
    assert error < 1

    # What one rank did before another one is earlier on the common clock.
    times = np.array([transport.clock()])
    all_times = np.empty(comm.size)
    transport.perform(Round("allgatherv", [1] * comm.size, times.dtype, send=times, recv=all_times))
    assert all_times.max() <= transport.clock() + 2 * error
    transport.close()
