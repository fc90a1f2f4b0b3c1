"""Messages between the watchdogs of some ranks, which no rank waits for."""

from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomp.mpi.failures import completed, fault_tolerant

_NUMBERS, _TEXT = 0, 1  # tags
_FIELDS = 8  # numbers of a message: its kind, then its fields


class Kind(IntEnum):
    """Kinds of messages, with their fields."""

    QUESTION = 0  # channel and round
    ANSWER = 1  # channel, round and a `mpicomp.mpi.watchdog.Position`
    LEFT = 2  # the rank begins no more rounds at all
    BROKE_OFF = 3  # an exchange has failed on this rank alone
    CLOSED = 4  # a `mpicomp.mpi.channel_sets.Closing`
    WANTS_STACKS = 5  # the answer is a text


class Mailbox:
    """Sends and receives on a communicator of its own."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._comm = comm
        self.unsent: list[tuple[MPI.Request, Any]] = []
        """Messages that MPI has not sent yet, with their buffers."""

    def send(self, other: int, kind: Kind, *fields: int) -> None:
        message = np.zeros(_FIELDS, np.int64)
        message[: 1 + len(fields)] = kind, *fields
        self.unsent.append((self._comm.Isend(message, other, _NUMBERS), message))

    def send_all(self, kind: Kind, *fields: int) -> None:
        for other in range(self.size):
            if other != self.rank:
                self.send(other, kind, *fields)

    def send_text(self, other: int, text: str) -> None:
        content = np.frombuffer(text.encode(), np.uint8)
        self.unsent.append((self._comm.Isend(content, other, _TEXT), content))

    def receive(self) -> Iterator[tuple[int, Kind, list[int]]]:
        """Yield the messages that have arrived: sender, kind and fields, of which those at the end may be unused."""
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, _NUMBERS, status):
            message = np.empty(_FIELDS, np.int64)
            self._comm.Recv(message, status.Get_source(), _NUMBERS)
            kind, *fields = message.tolist()
            yield status.Get_source(), Kind(kind), fields

    def receive_texts(self) -> Iterator[str]:
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, _TEXT, status):
            text = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self._comm.Recv(text, status.Get_source(), _TEXT)
            yield text.tobytes().decode(errors="replace")

    def release_sent(self) -> None:
        """Free the buffers that MPI has sent."""
        if fault_tolerant():
            done = completed(self._comm, [request for request, _ in self.unsent])
            self.unsent = [sent for position, sent in enumerate(self.unsent) if position not in done]
        else:
            self.unsent = [(request, message) for request, message in self.unsent if not request.Test()]
