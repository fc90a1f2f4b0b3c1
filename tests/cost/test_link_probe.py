"""What probing finds out about networks whose messages are followed one by one."""

from functools import cache
from itertools import count

import numpy as np
import pytest
from marks import slow
from networks import INSIDE, Link

import mpicomp
from mpicomp.collectives import bind
from mpicomp.cost import Network
from mpicomp.cost.link_probe import probe, probe_link
from mpicomp.cost.network_model import sample_views
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.rounds import Round

NETWORKS = {"near": (2e-6, 25e9), "usual": (5e-5, 1e9), "far": (5e-3, 200e6)}
F4 = np.dtype(np.float32)
PLANS = [
    (mpicomp.Dense(), "allreduce"),
    (mpicomp.Dense(), "ring"),
    (mpicomp.Dense(wire="bf16"), "scatter-reduce"),
    (mpicomp.TopK(ratio=0.05), "allgather"),
    (mpicomp.TopK(ratio=0.05), "star-topk:allreduce"),
    (mpicomp.OneBit(), "two-phase"),
]


def probed(ranks, link, hosts=None):
    """Probe on every rank; return the transports and what rank 0 has found, which all have."""
    world = LocalWorld(ranks, hosts=hosts or ranks, network=link)
    networks = [Network(world.transports[0].group.hosts) for _ in world.transports]
    world.run([probe(network, end) for network, end in zip(networks, world.transports, strict=True)])
    assert all(network.to_json() == networks[0].to_json() for network in networks)
    return world, networks[0]


def seconds_of(world, scheme, numel):
    """Run a scheme's rounds with nothing between them, and return what the clocks show."""

    def rounds(end):
        for task in scheme.rounds(numel, F4, end.group):
            send, recv = _rooms(task, end.group.part(task.group))
            yield Round(
                task.operation, task.counts, task.dtype, task.root, send, recv, task.group, task.peers, task.received
            )

    before = max(end.clock() for end in world.transports)
    world.run([rounds(end) for end in world.transports])
    return max(end.clock() for end in world.transports) - before


def _rooms(task, group):
    sent = {"allgatherv": lambda: task.counts[group.rank], "alltoallv": lambda: sum(task.counts)}
    received = {
        "allgatherv": lambda: sum(task.counts),
        "alltoallv": lambda: task.counts[group.rank] * group.size,
        "sendrecv": lambda: task.counts[1],
    }
    send = np.zeros(sent.get(task.operation, lambda: task.counts[0])(), task.dtype)
    return send, np.zeros(received.get(task.operation, lambda: task.counts[0])(), task.dtype)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", NETWORKS)
def test_latency_and_bandwidth_are_found(ranks, name):
    latency, bits = NETWORKS[name]
    _, network = probed(ranks, Link(latency, bits))
    # A message of 64 bytes is the latency, and the time that these take.
    assert network.latency == pytest.approx(latency + 64 * 8 / bits, rel=0.02)
    assert network.seconds_per_byte == pytest.approx(8 / bits, rel=0.02)


@cache
def probed_before(name, ranks, hosts):
    return probed(ranks, Link(*NETWORKS[name]), hosts)


def predicted_and_taken(compressor, collective, name, ranks, numel, hosts=None):
    world, network = probed_before(name, ranks, hosts)
    scheme = bind(compressor, collective)
    views = sample_views(world.transports[0].group)
    predicted = network.seconds(network.coefficients([scheme.rounds(numel, F4, view) for view in views], views))
    return predicted, seconds_of(world, scheme, numel)


@pytest.mark.parametrize("numel", [100_000, 1_000_000, slow(3_000_000)])
@pytest.mark.parametrize("ranks", [2, slow(4), 8])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("compressor", "collective"), PLANS, ids=str)
def test_plans_of_other_sizes_are_predicted(compressor, collective, name, ranks, numel):
    predicted, took = predicted_and_taken(compressor, collective, name, ranks, numel)
    assert predicted == pytest.approx(took, rel=0.4)


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 1, 1, 2, 2, 3, 3)], ids=str)
@pytest.mark.parametrize(
    ("compressor", "collective"),
    [*PLANS, (mpicomp.Dense(), "hierarchical:ring"), (mpicomp.Dense(), "hierarchical:allreduce")],
    ids=str,
)
def test_plans_of_ranks_that_share_hosts_are_predicted(compressor, collective, hosts):
    predicted, took = predicted_and_taken(compressor, collective, "usual", len(hosts), 1_000_000, hosts)
    assert predicted == pytest.approx(took, rel=0.4)


def test_links_inside_hosts_differ_from_those_between():
    world, network = probed(8, Link(5e-5, 1e9), hosts=[0, 0, 0, 0, 1, 1, 1, 1])
    views = sample_views(world.transports[0].group)

    def seconds(group, peers):
        task = Round("sendrecv", (1_000_000, 1_000_000), F4, group=group, peers=peers)
        return network.seconds(network.coefficients([[task]] * len(views), views))

    assert seconds("across", (1, 1)) / seconds("host", (1, 3)) > INSIDE / 2


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 1, 1, 1]], ids=str)
def test_link_is_no_slower_for_ranks_that_share_it(hosts):
    _, network = probed(len(hosts), Link(5e-5, 1e9), hosts)
    assert network.seconds_per_byte == pytest.approx(8 / 1e9, rel=0.02)
    assert network.factors("across", "sendrecv") == pytest.approx((1, 1), rel=0.05)


def test_changed_link_is_measured_again():
    link = Link(5e-5, 1e9)
    world, network = probed(4, link)
    link.bits = 100e6
    networks = [Network.from_json(network.to_json()) for _ in world.transports]
    world.run([probe_link(network, end) for network, end in zip(networks, world.transports, strict=True)])
    assert networks[0].seconds_per_byte == pytest.approx(8 / 100e6, rel=0.02)


def test_connections_that_are_new_do_not_make_the_link_slow():
    """The first dozen long messages take twice as long, as TCP's do before its windows have grown."""
    link, long = Link(1e-3, 200e6), count()

    def growing(task, group):
        is_new = sum(task.counts) * task.dtype.itemsize > 1 << 14 and next(long) < 12
        return link(task, group) * (1 + is_new)

    _, network = probed(4, growing)
    assert network.seconds_per_byte == pytest.approx(8 / 200e6, rel=0.02)
