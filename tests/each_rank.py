"""Ranks that are simulated one by one: slow, obvious, and for comparison only.

Every rank has a clock of its own. A message leaves when both sides have come to it, and takes the link's latency and
its bytes; ranks of a host that send to others at the same time share the host's link. An operation of a library begins
when the last rank of its group is there, and takes all of them the same.
"""

from collections import Counter

import numpy as np

from mpicomp.cost.formulas import terms
from mpicomp.mpi.rounds import layout_groups

LATER = 1 << 30


def simulate(scheme, numel, layout, between, inside):
    """Return the seconds until the last rank is through.

    Parameters
    ----------
    scheme : Scheme
    numel : int
    layout : list of int
        The host of every rank.
    between, inside : (float, float)
        Seconds of latency and of a byte, between hosts and in one.
    """
    ranks = range(len(layout))
    groups = [layout_groups(layout, rank) for rank in ranks]
    left = [list(scheme.rounds(numel, np.dtype(np.float32), groups[rank][0], LATER)) for rank in ranks]
    done = [Counter() for _ in ranks]  # rounds of each group that were made
    clocks = [0.0 for _ in ranks]
    while any(left):
        asked = {rank: left[rank][0] for rank in ranks if left[rank]}
        # Every rank whose whole group has come to the same place takes its round.
        ready = {
            rank: task
            for rank, task in asked.items()
            if all(
                other in asked
                and asked[other].group == task.group
                and done[other][task.group] == done[rank][task.group]
                for other in groups[rank][1][task.group]
            )
        }
        assert ready, "ranks wait for each other"
        leaving, coming = Counter(), Counter()
        for rank, task in ready.items():
            for count, peer in zip((leaving, coming), task.peers, strict=True):
                if task.operation == "sendrecv" and peer is not None:
                    count[layout[rank]] += layout[groups[rank][1][task.group][peer]] != layout[rank]
        now = list(clocks)
        for rank, task in ready.items():
            members = groups[rank][1][task.group]
            left[rank].pop(0)
            done[rank][task.group] += 1
            if task.operation != "sendrecv":
                begin = max(clocks[other] for other in members)
                links = inside if task.group == "host" or len(set(layout)) == 1 else between
                costs = [terms(asked[other], groups[other][0].part(task.group)) for other in members]
                seconds = max(cost.latency for cost in costs) * links[0] + max(cost.volume for cost in costs) * links[1]
                now[rank] = begin + seconds
                continue
            for side, peer in enumerate(task.peers):
                if peer is None:
                    continue
                other = members[peer]
                nbytes = task.counts[side] * task.dtype.itemsize
                source, target = (other, rank) if side else (rank, other)
                if layout[source] == layout[target]:
                    links, sharing = inside, 1
                else:
                    links, sharing = between, max(leaving[layout[source]], coming[layout[target]])
                seconds = links[0] + nbytes * links[1] * sharing
                now[rank] = max(now[rank], max(clocks[rank], clocks[other]) + seconds)
        clocks = now
    return max(clocks)
