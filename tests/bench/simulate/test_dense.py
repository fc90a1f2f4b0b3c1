"""Dense exchanges that were timed by themselves: what they took is predicted, and carries over to other ranks."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from marks import slow
from mpicomp.bench.simulate.clock import Clock
from mpicomp.bench.simulate.compute_time import ComputeTime
from mpicomp.bench.simulate.dense_timing import Timed, time_dense
from mpicomp.bench.simulate.measured import Bucket, Gradient, Measured, read
from mpicomp.bench.simulate.rows import Plan, Simulation
from mpicomp.bench.simulate.topology import Links, Topology

import mpicomp
from mpicomp.collectives import bind
from mpicomp.cost import CostModel, Network
from mpicomp.policies.plan_selector import collectives_for
from mpicomp.rounds import WORLD
from mpicomp.transport import LocalWorld

pytestmark = pytest.mark.quick

N = 1 << 20
DENSE = mpicomp.Dense()


def measured(timed):
    network = Network(4)
    network.set_link(WORLD, 1e-4, 1e-8, 0.1)
    gradient = Gradient("w", (N,), 0.1)
    return Measured("some", 4, 4, CostModel(network), 0.1, 0.1, 0.0, [Bucket((gradient,))], dense=timed)


def exchange_s(steps, ranks=4, links=None, collective="ring", compressor=DENSE):
    topology = Topology(ranks, 1, steps.cost.network, 4, links or Links())
    row = Simulation(steps, topology, ComputeTime(steps.cost)).row(Plan(compressor, collective), overlap=False)
    return row["exchange_s"]


def test_timed_exchange_takes_what_it_took():
    steps = measured([Timed("ring", 4, N, 0.02, 0.5)])
    assert exchange_s(steps) == pytest.approx(0.52)


def test_untimed_exchange_is_the_cost_models():
    timed, untimed = measured([Timed("ring", 4, N, 0.02, 0.5)]), measured([])
    topology = Topology(4, 1, untimed.cost.network, 4)
    rounds = Clock(topology).seconds(bind(DENSE, "scatter-reduce"), N, np.dtype(np.float32))
    for steps in (timed, untimed):
        assert exchange_s(steps, collective="scatter-reduce") >= rounds
    topk = mpicomp.TopK(ratio=0.01)
    reported = [exchange_s(steps, collective="star-topk:ring", compressor=topk) for steps in (timed, untimed)]
    assert reported[0] == pytest.approx(reported[1], rel=0.5)  # computation is measured each time


def test_correction_carries_over_to_other_links():
    untimed = measured([])
    scheme, links = bind(DENSE, "ring"), Links(1 / 1e7, 1e-3)
    here, there = (
        Clock(Topology(ranks, 1, untimed.cost.network, 4, links)).seconds(scheme, N, np.dtype(np.float32))
        for ranks, links in ((4, None), (16, links))
    )
    steps = measured([Timed("ring", 4, N, 0.02, 1.3 * here)])
    assert exchange_s(steps, 16, links) == pytest.approx(0.02 + 1.3 * there)


def test_correction_between_lengths_is_between():
    timed = [Timed("ring", 4, N // 4, 0.01, 0.2), Timed("ring", 4, 4 * N, 0.04, 0.2)]
    corrections = measured(timed).corrections(4)
    ring = bind(DENSE, "ring")
    assert corrections.own_s(ring, 4 * N) == pytest.approx(0.04)
    assert corrections.own_s(ring, 8 * N) == pytest.approx(0.08)
    assert corrections.own_s(ring, N // 8) == pytest.approx(0.005)
    short, middle, long = (corrections.factor(ring, numel) for numel in (N // 4, N, 4 * N))
    assert long < middle < short
    assert corrections.knows(ring)
    assert not corrections.knows(bind(mpicomp.Dense(wire="bf16"), "scatter-reduce"))


def test_timed_exchanges_are_read_again(tmp_path):
    steps = measured([Timed("ring", 4, N, 0.02, 0.5)])
    path = tmp_path / "m.json"
    path.write_text(json.dumps(steps.to_json()))
    assert read(str(path)).dense == steps.dense
    assert read(str(path)).cut(1).dense == steps.dense
    older = {name: value for name, value in steps.to_json().items() if name != "dense"}
    path.write_text(json.dumps(older))
    assert read(str(path)).to_json() == replace(steps, dense=[]).to_json()


def test_time_dense_of_one_rank_is_empty():
    [alone] = LocalWorld(1).transports
    assert time_dense(N, alone) == []


@pytest.mark.mpi
@pytest.mark.parametrize("per_host", [slow(1), 2, slow(8)])  # 2 are one host, and 3 and 4 several
def test_time_dense_has_every_exchange_at_two_lengths(comm, per_host):
    from mpicomp.transport.mpi import MPITransport

    transport = MPITransport(comm, layout=[rank // per_host for rank in range(comm.size)])
    timed = [timing for timing in time_dense(N // 16, transport) if timing.ranks == comm.size]
    if comm.size > 1:
        names = collectives_for(DENSE, transport.group)
        assert ("hierarchical:ring" in names) == (1 < per_host < comm.size)
        assert [(timing.numel, timing.collective) for timing in timed] == list(product((N // 64, N // 16), names))
    assert all(timing.own_s > 0 and timing.rounds_s >= 0 for timing in timed)
    transport.close()


@pytest.mark.parametrize(("ranks", "expected"), [(2, 2), (3, 3), (4, 4), (5, 5), (8, 4), (1024, 4), (6, 5), (1000, 5)])
def test_correction_is_of_ranks_that_are_alike(ranks, expected):
    steps = measured([Timed("ring", ranks, N, 0.01 * ranks, 0.5) for ranks in (2, 3, 4, 5)])
    assert steps.corrections(ranks).own_s(bind(DENSE, "ring"), N) == pytest.approx(0.01 * expected)


@pytest.mark.mpi
@pytest.mark.parametrize("separate_hosts", [False, True])
def test_time_dense_of_hosts_has_fewer_ranks_too(comm, separate_hosts):
    from mpicomp.transport.mpi import MPITransport

    transport = MPITransport(comm, layout=range(comm.size) if separate_hosts else [0] * comm.size)
    timed = time_dense(1000, transport)
    assert timed == comm.bcast(timed)
    assert {timing.ranks for timing in timed} == ({*range(2, comm.size + 1)} if separate_hosts else {comm.size} - {1})
    transport.close()
