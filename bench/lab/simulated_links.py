"""Links without a lab: ranks of one machine whose rounds take as long as the links of as many hosts would.

Nothing is emulated: the bytes go through shared memory, and each rank then waits for the rest of the time that a link
of the given rate needs for them, one round after the other. It knows no latency, no packets and no protocol, and of an
operation that a library makes of several messages only the bytes. Importing this module starts MPI.
"""

import time
from typing import Any

from numpy.typing import NDArray

from mpicomp.mpi.comm import MPITransport
from mpicomp.mpi.rounds import WORLD, Pending, Round


class SimulatedLinks(MPITransport):
    """A rank that takes itself to be alone on its host, whose link passes ``bandwidth`` bits a second. Collective."""

    def __init__(self, hosts: int, bandwidth: int) -> None:
        super().__init__(layout=range(hosts))
        self._byte_s = 8 / bandwidth
        self._link_free = 0.0
        self._due: dict[Pending, float] = {}  # of rounds that were begun and not waited for

    def start(self, task: Round) -> Pending:
        due = self._occupy_link(task)
        pending = super().start(task)
        self._due[pending] = due
        return pending

    def wait(self, pending: Pending) -> NDArray[Any]:
        array = super().wait(pending)
        time.sleep(max(0.0, self._due.pop(pending) - time.perf_counter()))
        return array

    def perform(self, task: Round) -> NDArray[Any]:
        return self.wait(self.start(task))

    def _occupy_link(self, task: Round) -> float:
        # Returns when the link has carried a round, in either direction, after those before it.
        group = self.group if task.group == WORLD else self.group.part(task.group)
        assert group is not None
        received = 0.0 if task.recv is None else task.recv.nbytes * (group.size - 1) / group.size
        seconds = max(task.wire_bytes(group), received) * self._byte_s
        self._link_free = max(self._link_free, time.perf_counter()) + seconds
        return self._link_free
