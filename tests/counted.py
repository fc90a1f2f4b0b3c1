"""Bytes that ranks hand to MPI, counted by the arrays alone."""

import functools

from mpicomp.reducer import Reducer


class Count:
    """Bytes of everything that this rank has handed to MPI since a reducer was made, or since they were taken."""

    def __init__(self, monkeypatch):
        from mpicomp.mpi.comm import MPITransport

        self.sent, self.wire, self._performing = 0, 0.0, set()
        for name in ("start", "perform"):
            monkeypatch.setattr(MPITransport, name, self._counting(getattr(MPITransport, name)))
        make = Reducer.__init__

        @functools.wraps(make)
        def init(reducer, *args, **settings):
            make(reducer, *args, **settings)
            self.take()

        monkeypatch.setattr(Reducer, "__init__", init)

    def take(self):
        found = self.sent, self.wire
        self.sent, self.wire = 0, 0.0
        return found

    def _counting(self, inner):
        def counting(lane, task):
            if id(task) in self._performing:  # perform calls start
                return inner(lane, task)
            ranks, rank = lane.group.size, lane.group.rank
            match task.operation:
                case "allgatherv" if ranks > 1:
                    self.sent += task.send.nbytes
                    parts = [count * task.dtype.itemsize for count in task.counts]
                    # Round a ring: in every turn a rank passes on the part that has come to it.
                    self.wire += sum(parts[(rank - turn) % ranks] for turn in range(ranks - 1))
                case "allreduce" if ranks > 1:
                    self.sent += task.send.nbytes
                    self.wire += 2 * task.send.nbytes * (ranks - 1) / ranks
                case "bcast" if ranks > 1:
                    nbytes = task.counts[0] * task.dtype.itemsize
                    self.sent += nbytes * (rank == task.root)
                    self.wire += nbytes * (ranks - 1) / ranks
                case _:
                    assert ranks == 1
            self._performing.add(id(task))
            try:
                return inner(lane, task)
            finally:
                self._performing.discard(id(task))

        return counting
