"""Rounds of every kind that look at what they deliver themselves, for every transport.

Each is a generator that one rank runs. ``members`` are the ranks of the group that is meant, found from the layout by
hand; what is expected of a rank follows from what that rank sends.
"""

import numpy as np

from mpicomp.mpi.rounds import Round

LAYOUTS = {
    1: [[0]],
    2: [[0, 0], [0, 1]],
    3: [[0, 0, 0], [0, 1, 2], [0, 1, 0], [0, 0, 1]],
    4: [[0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 1]],
    6: [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 2, 2]],
}
DTYPES = [np.uint8, np.uint32, np.int64, np.uint64, np.float32, np.float64]


def members_of(layout, name, rank):
    """Give the ranks of a rank's group, None where it is in none, from the words of the definition."""
    if name == "world":
        return list(range(len(layout)))
    by_host = [[other for other, host in enumerate(layout) if host == number] for number in sorted(set(layout))]
    [members] = [ranks for ranks in by_host if rank in ranks]
    if name == "host":
        return members
    place = members.index(rank)
    return sorted(ranks[place] for ranks in by_host) if all(len(ranks) > place for ranks in by_host) else None


def of(rank, size, dtype, turn=0):
    return np.random.default_rng([rank, turn]).integers(0, 40, size).astype(dtype)


def count(rank, other=0):
    """Give a number of elements that differs from rank to rank; some are 0."""
    return (7 * rank + 5 * other) % 4 * 5


def allreduce(members, rank, name, dtype, **how):
    for size in (0, 1, 21):
        recv = np.zeros(size, dtype)
        yield Round("allreduce", (size,), recv.dtype, send=of(rank, size, dtype), recv=recv, group=name, **how)
        yield lambda recv=recv, size=size: np.testing.assert_array_equal(
            recv, sum(of(other, size, dtype) for other in members)
        )


def bcast(members, rank, name, dtype, **how):
    for root, sender in enumerate(members):
        for size in (0, 21):
            recv = np.zeros(size, dtype)
            send = of(rank, size, dtype) if rank == sender else None
            yield Round("bcast", (size,), recv.dtype, root, send, recv, name, **how)
            yield lambda recv=recv, sender=sender, size=size: np.testing.assert_array_equal(
                recv, of(sender, size, dtype)
            )


def allgatherv(members, rank, name, dtype, **how):
    for counts in ([count(other) for other in members], [7] * len(members), [0] * len(members)):
        length = counts[members.index(rank)]
        recv = np.zeros(sum(counts), dtype)
        yield Round("allgatherv", counts, recv.dtype, send=of(rank, length, dtype), recv=recv, group=name, **how)
        yield lambda recv=recv, counts=counts: np.testing.assert_array_equal(
            recv, np.concatenate([of(other, n, dtype) for other, n in zip(members, counts, strict=True)])
        )


def gatherv(members, rank, name, dtype, **how):
    for root, receiver in enumerate(members):
        for counts in ([count(other) for other in members], [7] * len(members), [0] * len(members)):
            length = counts[members.index(rank)]
            recv = np.zeros(sum(counts), dtype) if rank == receiver else None
            yield Round("gatherv", counts, np.dtype(dtype), root, of(rank, length, dtype), recv, name, **how)
            if recv is not None:
                yield lambda recv=recv, counts=counts: np.testing.assert_array_equal(
                    recv, np.concatenate([of(other, n, dtype) for other, n in zip(members, counts, strict=True)])
                )


def alltoallv(members, rank, name, dtype, **how):
    for counts in ([count(other) for other in members], [7] * len(members), [0] * len(members)):
        place, whole = members.index(rank), sum(counts)
        first = sum(counts[:place])
        recv = np.zeros(counts[place] * len(members), dtype)
        yield Round("alltoallv", counts, recv.dtype, send=of(rank, whole, dtype), recv=recv, group=name, **how)
        yield lambda recv=recv, first=first, count=counts[place], whole=whole: np.testing.assert_array_equal(
            recv, np.concatenate([of(other, whole, dtype)[first : first + count] for other in members])
        )


def alltoallv_of_any_lengths(members, rank, name, dtype, **how):
    sent = {other: [count(other, to) for to in members] for other in members}
    place = members.index(rank)
    received = [sent[other][place] for other in members]
    recv = np.zeros(sum(received), dtype)
    send = of(rank, sum(sent[rank]), dtype)
    yield Round("alltoallv", sent[rank], recv.dtype, send=send, recv=recv, group=name, received=received, **how)
    parts = []
    for other in members:
        first = sum(sent[other][:place])
        parts.append(of(other, sum(sent[other]), dtype)[first : first + sent[other][place]])
    yield lambda: np.testing.assert_array_equal(recv, np.concatenate(parts))


def sendrecv_to_the_right(members, rank, name, dtype, **how):
    """Everybody sends to one and receives from another one."""
    place, size = members.index(rank), len(members)
    if size == 1:
        return
    right, left = (place + 1) % size, (place - 1) % size
    for lengths in (lambda other: 21, count, lambda other: 0):
        recv = np.zeros(lengths(members[left]), dtype)
        length = lengths(rank)
        yield Round(
            "sendrecv",
            (length, recv.size),
            recv.dtype,
            send=of(rank, length, dtype),
            recv=recv,
            peers=(right, left),
            group=name,
            **how,
        )
        yield lambda recv=recv, lengths=lengths: np.testing.assert_array_equal(
            recv, of(members[left], lengths(members[left]), dtype)
        )


def sendrecv_down_a_chain(members, rank, name, dtype, **how):
    """The first only sends, the last only receives; in a second round nobody does anything but the last two."""
    place, size = members.index(rank), len(members)
    for first in (0, size - 2):
        to = place + 1 if first <= place < size - 1 else None
        source = place - 1 if place - 1 >= max(first, 0) else None
        send = None if to is None else of(rank, 21, dtype)
        recv = None if source is None else np.zeros(21, dtype)
        counts = (0 if to is None else 21, 0 if source is None else 21)
        yield Round("sendrecv", counts, np.dtype(dtype), 0, send, recv, name, (to, source), **how)
        if recv is not None:
            yield lambda recv=recv, source=source: np.testing.assert_array_equal(recv, of(members[source], 21, dtype))


OPERATIONS = [
    allreduce,
    bcast,
    allgatherv,
    gatherv,
    alltoallv,
    alltoallv_of_any_lengths,
    sendrecv_to_the_right,
    sendrecv_down_a_chain,
]


def at_once(layout, rank, operations=OPERATIONS, names=("world", "host", "across"), dtypes=DTYPES):
    """Run every operation in every group, one after the other; give how many deliveries were looked at."""
    looked = 0
    for name in names:
        members = members_of(layout, name, rank)
        for operation in operations if members is not None else []:
            for dtype in dtypes:
                for step in operation(members, rank, name, dtype):
                    if isinstance(step, Round):
                        yield step
                    else:
                        step()
                        looked += 1
    return looked


def in_the_background(layout, rank, names=("world", "host", "across")):
    """Start every operation in every group, wait for them backwards, run others in between."""
    pending, checks = [], []
    for name in names:
        members = members_of(layout, name, rank)
        for operation in OPERATIONS if members is not None else []:
            for step in operation(members, rank, name, np.float32, background=True):
                if isinstance(step, Round):
                    pending.append((yield step))
                else:
                    checks.append(step)
    yield from at_once(layout, rank, [allreduce, sendrecv_to_the_right], names, [np.float32])
    for started in reversed(pending):
        received = yield started
        assert started.test()
        assert received.dtype == np.float32
    for check in checks:
        check()
    return len(checks)
