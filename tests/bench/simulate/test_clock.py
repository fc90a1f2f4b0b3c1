"""The clock: closed forms, each rank by itself, and the exchanges themselves."""

import math

import numpy as np
import pytest
from each_rank import simulate
from marks import slow
from mpicomp.bench.simulate.clock import Clock
from mpicomp.bench.simulate.topology import Links, Topology

import mpicomp
from mpicomp.collectives import Context, bind, variants
from mpicomp.compressors.gradient_with_residual import GradientWithResidual, Piece
from mpicomp.cost import Network
from mpicomp.cost.formulas import terms
from mpicomp.errors import ConfigurationError
from mpicomp.rounds import HOST, WORLD, layout_groups
from mpicomp.transport import LocalWorld
from mpicomp.workspace import Workspace

FLOAT = np.dtype(np.float32)
TRAILER = 4  # numbers that travel behind an array
BETWEEN, INSIDE = (1e-3, 1e-8), (1e-5, 1e-10)
N = 60_000


def topology(ranks, per_host=1, links=None, **words):
    network = Network(2)
    network.set_link(WORLD, *BETWEEN, 0.1)
    network.set_link(HOST, *INSIDE, 0.1)
    return Topology(ranks, per_host, network, 4, links or Links(), **words)


def seconds(compressor, name, ranks, per_host=1, numel=N):
    return Clock(topology(ranks, per_host)).seconds(bind(compressor, name), numel, FLOAT)


@pytest.mark.quick
@pytest.mark.parametrize("ranks", [2, 4, 16, 1000])
def test_ring_takes_its_closed_form(ranks):
    numel = 1000 * ranks - TRAILER  # so that all parts are as long
    alpha, beta = BETWEEN
    expected = 2 * (ranks - 1) * (alpha + 4 * 1000 * beta)
    assert seconds(mpicomp.Dense(), "ring", ranks, numel=numel) == pytest.approx(expected)


@pytest.mark.quick
def test_ring_of_halves_hides_short_latencies():
    ranks = 4
    numel = ranks * (1 << 20)  # parts of 4 MiB, each of which travels in two halves
    alpha, beta = BETWEEN
    volume = 2 * (ranks - 1) * 4 * (1 << 20) * beta
    assert alpha < 2 * (1 << 20) * beta
    assert seconds(mpicomp.Dense(), "ring", ranks, numel=numel) == pytest.approx(volume + alpha, rel=1e-3)


@pytest.mark.quick
def test_ring_of_halves_waits_for_long_latencies():
    ranks, alpha, beta = 4, 0.5, 1e-8
    half = 2 * (1 << 20) * beta
    clock = Clock(topology(ranks, links=Links(beta, alpha)))
    steps = 2 * (ranks - 1)
    # A half leaves when the one that came two before it is there: each step takes a latency and a half.
    expected = steps * (alpha + half) + half
    assert clock.seconds(bind(mpicomp.Dense(), "ring"), ranks * (1 << 20), FLOAT) == pytest.approx(expected, rel=1e-3)


@pytest.mark.quick
@pytest.mark.parametrize("ranks", [2, 8, 4096])
def test_recursive_doubling_takes_its_closed_form(ranks):
    alpha, beta = BETWEEN
    expected = math.log2(ranks) * (alpha + 4 * (N + TRAILER) * beta)
    assert seconds(mpicomp.Dense(), "recursive-doubling", ranks) == pytest.approx(expected)


@pytest.mark.quick
def test_recursive_doubling_shares_the_links_of_hosts():
    alpha, beta = BETWEEN
    nbytes = 4 * (N + TRAILER)
    inside = 2 * (INSIDE[0] + nbytes * INSIDE[1])  # at distances 1 and 2
    between = 2 * (alpha + 4 * nbytes * beta)  # at 4 and 8, all four ranks of a host at once
    assert seconds(mpicomp.Dense(), "recursive-doubling", 16, 4) == pytest.approx(inside + between)


@pytest.mark.quick
def test_allgatherv_takes_its_closed_form():
    alpha, beta = BETWEEN
    topk = mpicomp.TopK(ratio=0.01)
    [task] = bind(topk, "allgather").rounds(N, FLOAT, topology(8).group(0))
    expected = 3 * alpha + 7 * task.counts[0] * beta
    assert seconds(topk, "allgather", 8) == pytest.approx(expected)


@pytest.mark.quick
def test_alltoallv_shares_the_links_of_hosts():
    alpha, beta = BETWEEN
    ranks, per_host = 16, 4
    numel = 1600
    part = 4 * 100
    scatter, _ = bind(mpicomp.Dense(), "scatter-reduce").rounds(numel, FLOAT, topology(ranks, per_host).group(0))
    assert set(scatter.counts) == {scatter.counts[0]}
    assert scatter.counts[0] >= part
    length = scatter.counts[0]
    elsewhere = ranks - per_host
    expected = 15 * alpha + elsewhere * length * per_host * beta + 4 * alpha + 15 * length * beta
    assert seconds(mpicomp.Dense(), "scatter-reduce", ranks, per_host, numel) == pytest.approx(expected)


COMPRESSORS = [
    mpicomp.Dense(),
    mpicomp.Dense(wire="bf16"),
    mpicomp.TopK(ratio=0.01),
    mpicomp.get_compressor({"id": "threshold"}),
    mpicomp.get_compressor({"id": "qsgd", "rounding": "nearest"}),
    mpicomp.get_compressor({"id": "powersgd", "rank": 1}),
]


@pytest.mark.parametrize(
    ("compressor", "name"),
    [
        (mpicomp.Dense(), "allreduce"),
        (mpicomp.Dense(), "ring"),
        (mpicomp.Dense(), "scatter-reduce"),
        (mpicomp.Dense(), "parameter-server"),
        (mpicomp.TopK(ratio=0.01), "allgather"),
        (mpicomp.TopK(ratio=0.01), "star-topk:ring"),
        (mpicomp.get_compressor({"id": "qsgd", "rounding": "nearest"}), "two-phase"),
        (mpicomp.get_compressor({"id": "powersgd", "rank": 1}), "low-rank:allreduce"),
    ],
)
def test_exchanges_take_as_long_as_their_shapes_say(compressor, name):
    ranks = 4
    seconds_of = {"latency": BETWEEN[0], "seconds_per_byte": BETWEEN[1]}
    world = LocalWorld(ranks, hosts=ranks, network=lambda task, group: terms(task, group).seconds(**seconds_of))
    scheme = bind(compressor.bind(["w"], [N], [(200, 300)], warm_up=False), name)
    memories, spaces = [{} for _ in range(ranks)], [Workspace() for _ in range(ranks)]
    for step in range(2):  # in the first one some schemes ask more
        before = world.transports[0].seconds
        exchanges = []
        for rank, end in enumerate(world.transports):
            gradient = np.random.default_rng([rank, step]).laplace(size=N).astype(FLOAT)
            accumulated = GradientWithResidual(np.empty(N + TRAILER, FLOAT), None, [Piece(0, gradient)])
            context = Context(group=end.group, step=step, memory=memories[rank], workspace=spaces[rank])
            exchanges.append(scheme.exchange(accumulated, context))
        world.run(exchanges)
    assert world.transports[0].seconds - before == pytest.approx(seconds(scheme.compressor, name, ranks), rel=1e-3)


LAYOUTS = [
    (2, 1), (5, 1), (7, 2), (16, 4), (24, 6), (18, 4), slow(33, 4), slow(48, 8), slow(64, 1), slow(64, 8), slow(40, 64)
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "per_host"), LAYOUTS)
def test_clock_of_all_ranks_is_that_of_each_rank(ranks, per_host):
    there = topology(ranks, per_host)
    clock = Clock(there)
    layout = [rank // per_host for rank in range(ranks)]
    looked = 0
    for compressor in COMPRESSORS:
        bound = compressor.bind(["w"], [N], [(200, 300)], warm_up=False)
        for name in variants(bound):
            scheme = bind(bound, name)
            expected = simulate(scheme, N, layout, BETWEEN, INSIDE)
            reported = clock.seconds(scheme, N, FLOAT)
            assert reported == pytest.approx(expected, rel=1e-4), (compressor, name)
            looked += 1  # parts of arrays differ by an element between ranks, which is less than the tolerance
    assert looked > 50


@pytest.mark.quick
@pytest.mark.parametrize(("ranks", "per_host"), LAYOUTS)
def test_topology_groups_ranks_as_transports_do(ranks, per_host):
    layout = [rank // per_host for rank in range(ranks)]
    there = topology(ranks, per_host)
    for rank in range(ranks):
        assert there.group(rank) == layout_groups(layout, rank)[0]


@pytest.mark.quick
def test_switch_gives_every_host_an_even_share():
    clocks = [Clock(topology(8, links=Links(1e-9, 1e-6, switch))) for switch in (None, 1e-9 / 16, 1e-9)]
    free, wide, narrow = (clock.seconds(bind(mpicomp.Dense(), "allreduce"), 10**7, FLOAT) for clock in clocks)
    assert wide == free
    assert narrow == pytest.approx(8 * free, rel=1e-3)


@pytest.mark.quick
def test_switch_is_shared_by_those_that_send():
    latency, per_byte, hosts = 1e-6, 1e-9, 8
    clocks = [Clock(topology(hosts, links=Links(per_byte, latency, switch))) for switch in (None, per_byte / 4)]
    free, shared = (clock.seconds(bind(mpicomp.Dense(), "parameter-server"), 10**7, FLOAT) for clock in clocks)
    gathered, back = 7, 2 * 7 / 8  # arrays through the server's link; all 7 pass the switch on their way back
    assert shared / free == pytest.approx((gathered + 7 / 4) / (gathered + back), rel=1e-3)


@pytest.mark.quick
def test_exchange_is_no_slower_on_a_faster_link():
    for compressor in COMPRESSORS:
        bound = compressor.bind(["w"], [N], [(200, 300)], warm_up=False)
        for name in variants(bound):
            reported = [
                Clock(topology(12, 2, Links(1 / rate, 1e-4))).seconds(bind(bound, name), N, FLOAT)
                for rate in (1e6, 1e7, 1e8, 1e10)
            ]
            assert reported == sorted(reported, reverse=True), (compressor, name)


@pytest.mark.quick
def test_allreduce_folds_only_without_a_power_of_two():
    def volume(measured_ranks, factor, ranks, per_host=1):
        network = Network(measured_ranks // per_host)
        for group in (WORLD, "across"):
            network.set_factors(group, "allreduce", 1.0, factor, 0.1)
        return Topology(ranks, per_host, network, measured_ranks).network.factors(WORLD, "allreduce")[1]

    folded = 3.5 / 1.6  # of 5 ranks one gives its array to another and gets the sum: 2 more than the 1.5 of 4 ranks
    assert volume(5, folded, 8) == pytest.approx(1)
    assert volume(5, folded, 3) == pytest.approx(3 / (4 / 3))
    assert volume(5, 1.2 * folded, 5) == pytest.approx(1.2 * folded)
    assert volume(5, 1.1, 8) == pytest.approx(1.1)  # a ring, which does not fold
    assert volume(4, 1.1, 3) == pytest.approx(1.1)  # it is unknown
    assert volume(10, folded, 12, per_host=2) == pytest.approx(3.5 / (10 / 6))  # of 5 hosts, and 6


@pytest.mark.quick
def test_unmeasured_links_are_an_error():
    with pytest.raises(ConfigurationError, match=r"measured on one host, and 8 ranks are on 2.*--bandwidth"):
        Topology(8, 4, Network(1), 4)
    assert Topology(8, 4, Network(1), 4, Links(1e-9, 1e-5)).network.seconds_per_byte == pytest.approx(1e-9)


@pytest.mark.quick
def test_clock_stops_at_the_limit():
    clock = Clock(topology(64))
    ring = bind(mpicomp.Dense(), "ring")
    whole = clock.seconds(ring, N, FLOAT)
    assert clock.seconds(ring, N, FLOAT, most=2 * whole) == whole
    assert clock.seconds(ring, N, FLOAT, most=0.1 * whole) == math.inf
