"""The offsets of the ranks' clocks, by which times of different ranks are compared."""

import math

import numpy as np

from mpicomp.mpi.rounds import Group, Round, Rounds
from mpicomp.mpi.transport import Transport

_QUESTIONS = 5  # questions to a clock; one before them opens the connection and does not count


def compare_clocks(transport: Transport) -> Rounds[float]:
    """Set ``transport.offset`` so that `Transport.clock` shows rank 0's time on all ranks. Collective, as rounds.

    The first rank of each host, one after the other, asks rank 0 for the time and takes the answer for that of the
    middle between question and answer; of five answers the fastest counts. Ranks of one host have one clock: with one
    host nothing is asked. Return the largest error in seconds, half of the longest of the hosts' fastest answers, the
    same on all ranks. An offset no larger than its error is taken for none. Clocks of two machines part by some
    microseconds a second: compare them again now and then.
    """
    group = transport.group
    transport.offset = 0.0
    if group.hosts == 1:
        return 0.0
    layout = group.layout or tuple(range(group.size))
    first_on = dict(zip(reversed(layout), reversed(range(group.size)), strict=True))
    hosts = list(dict.fromkeys(layout))
    firsts = [first_on[host] for host in hosts]
    offset, fastest = 0.0, 0.0
    for first in firsts[1:]:
        answers = []
        for _ in range(1 + _QUESTIONS):
            asked = transport.clock()
            yield _send_number(group, first, 0, math.nan)
            reply = yield _send_number(group, 0, first, transport.clock())
            answered = transport.clock()
            if group.rank == first:
                answers.append((answered - asked, reply[0] - (asked + answered) / 2))
        if group.rank == first:
            fastest, offset = min(answers[1:])
    counts = [2 if rank == first_on[host] else 0 for rank, host in enumerate(layout)]
    send = np.array([offset, fastest / 2] if counts[group.rank] else [])
    recv = np.empty(2 * len(firsts))
    everyones = yield Round("allgatherv", counts, recv.dtype, send=send, recv=recv)
    of_host = everyones.reshape(-1, 2)
    offset, error = of_host[hosts.index(layout[group.rank])].tolist()
    transport.offset = offset if abs(offset) > error else 0.0
    return float(of_host[:, 1].max())


def _send_number(group: Group, source: int, to: int, number: float) -> Round:
    sends, receives = group.rank == source, group.rank == to
    return Round(
        "sendrecv",
        (int(sends), int(receives)),
        np.dtype(np.float64),
        send=np.array([number]) if sends else None,
        recv=np.empty(1) if receives else None,
        peers=(to if sends else None, source if receives else None),
    )
