"""A network whose messages are followed one by one: what a cost model has to find out, and not its own formulas.

Every host has a port that sends and one that receives, each of which passes one message at a time. Operations are the
algorithms that libraries have: rings, trees, pairwise exchanges; which one depends on the size.
"""

import functools

from mpicomp.mpi.rounds import ACROSS, HOST

SMALL = 8192  # bytes: below it libraries take the algorithm with the fewest messages
INSIDE = 20  # how many times faster messages are that stay on their host


class Link:
    """Seconds of a round: `LocalWorld` calls it.

    Parameters
    ----------
    latency, bits : float
        Seconds that a message is under way, and bits that a port passes in a second. They may be changed meanwhile.
    factors : dict of str to float
        How many times longer an operation takes than its messages.
    small : int
        Bytes below which an operation takes the algorithm with the fewest messages.
    """

    def __init__(self, latency, bits, factors=None, small=SMALL):
        self.latency, self.bits, self.factors, self.small = latency, bits, factors or {}, small

    def __call__(self, task, group):
        if group.size == 1:
            return 0.0
        hosts = (0,) * group.size if group.name == HOST else group.layout or tuple(range(group.size))
        shared = group.sharing if group.name == ACROSS else 1
        sizes = tuple(int(count) * task.dtype.itemsize for count in task.counts)
        shift = 0
        if task.operation == "sendrecv":
            to, source = task.peers
            shift = (to - group.rank) % group.size if to is not None else (group.rank - (source or 0)) % group.size
        seconds = followed(
            task.operation, sizes, task.root, shift, hosts, self.latency, 8 * shared / self.bits, self.small
        )
        return seconds * self.factors.get(task.operation, 1.0)


@functools.lru_cache(maxsize=100_000)
def followed(operation, sizes, root, shift, hosts, latency, per_byte, small):
    """Seconds until the last message of an operation has arrived."""
    wires = Wires(hosts, latency, per_byte)
    ranks = len(hosts)
    match operation:
        case "allgatherv":
            ring(wires, lambda rank, step: sizes[(rank - step) % ranks], ranks - 1)
        case "allreduce" if sizes[0] < small:
            doubling(wires, sizes[0])
        case "allreduce":
            ring(wires, lambda rank, step: sizes[0] / ranks, 2 * (ranks - 1))
        case "bcast":
            tree(wires, root, sizes[0] if sizes[0] < small else sizes[0] / ranks)
            if sizes[0] >= small:  # scattered, then gathered in a ring
                ring(wires, lambda rank, step: sizes[0] / ranks, ranks - 1)
        case "gatherv":
            wires.exchange([(rank, root, sizes[rank]) for rank in range(ranks) if rank != root])
        case "alltoallv":
            for step in range(1, ranks):
                wires.exchange([(rank, (rank + step) % ranks, sizes[(rank + step) % ranks]) for rank in range(ranks)])
        case "sendrecv":
            wires.exchange([(rank, (rank + shift) % ranks, max(sizes)) for rank in range(ranks)])
        case _:
            raise AssertionError(operation)
    return max(wires.ready)


class Wires:
    """The ports of all hosts, and when each rank goes on."""

    def __init__(self, hosts, latency, per_byte):
        self.hosts, self.latency, self.per_byte = hosts, latency, per_byte
        self.ready = [0.0] * len(hosts)
        self.sending, self.receiving = {}, {}

    def exchange(self, messages):
        """Send messages of (rank, rank, bytes) that all ranks begin when they come to them."""
        arrived = list(self.ready)
        for sender, receiver, nbytes in messages:
            inside = self.hosts[sender] == self.hosts[receiver]
            wire = nbytes * self.per_byte / (INSIDE if inside else 1)
            out, into = (("rank", sender), ("rank", receiver)) if inside else (self.hosts[sender], self.hosts[receiver])
            begin = max(self.ready[sender], self.sending.get(out, 0.0))
            self.sending[out] = begin + wire
            there = max(begin + self.latency / (INSIDE if inside else 1), self.receiving.get(into, 0.0)) + wire
            self.receiving[into] = there
            arrived[receiver] = max(arrived[receiver], there)
            arrived[sender] = max(arrived[sender], begin + wire)
        self.ready = arrived


def ring(wires, size, steps):
    """Pass a part to the right neighbour, and so on with what has come."""
    ranks = len(wires.ready)
    for step in range(steps):
        wires.exchange([(rank, (rank + 1) % ranks, size(rank, step)) for rank in range(ranks)])


def doubling(wires, nbytes):
    """Exchange with partners whose distance doubles; ranks beyond a power of two join one that is within."""
    ranks = len(wires.ready)
    power = 1 << (ranks.bit_length() - 1)
    beyond = [(rank, rank - power) for rank in range(power, ranks)]
    wires.exchange([(rank, other, nbytes) for rank, other in beyond])
    distance = 1
    while distance < power:
        wires.exchange([(rank, rank ^ distance, nbytes) for rank in range(power)])
        distance *= 2
    wires.exchange([(other, rank, nbytes) for rank, other in beyond])


def tree(wires, root, nbytes):
    ranks = len(wires.ready)
    reached = 1
    while reached < ranks:
        pairs = [(place, place + reached) for place in range(reached) if place + reached < ranks]
        wires.exchange([((root + a) % ranks, (root + b) % ranks, nbytes) for a, b in pairs])
        reached *= 2
