"""What a cost model remembers, and predictions for compressors whose first steps differ from later ones."""

import time
from itertools import count, pairwise

import numpy as np
import pytest
from networks import Link
from worlds import Ranks

import mpicomp
from mpicomp.collectives import bind
from mpicomp.cost import CostModel, Network, measure_kernels
from mpicomp.cost.calibrate import compilation_order
from mpicomp.cost.kernel_costs import KernelCost, measure_kernel
from mpicomp.cost.model import scheme_key
from mpicomp.cost.network_model import sample_views
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.rounds import layout_groups

LATENCY, BITS = 1e-5, 1e7
SHAPE = (400, 1000)  # so large that a library broadcasts in parts, as is assumed before a measurement


def known_model():
    """Return a model that knows its link and kernels, and a function that returns candidates for a length."""
    model, scheme = CostModel(Network(2)), bind(mpicomp.TopK(), "allgather")
    model.network.set_link("world", 1e-4, 1e-9, 0.1)
    model.kernels[scheme_key(scheme)] = KernelCost(1e-6, 1e-9, 1e-9)
    group, _ = layout_groups([0, 1], 0)
    return model, lambda numel: model.candidates([scheme], numel, np.dtype(np.float32), group)


def test_a_kernel_that_waits_for_a_core_takes_what_it_takes_without():
    """Two of three timed steps are interrupted for a second."""
    ticks = count()

    def clock():
        tick = next(ticks)
        step = tick // 2 % 6  # three steps of warming up, and three that are timed
        return 10.0 * (tick // 2) + (tick % 2) * (0.001 + (step in (3, 5)))

    fixed, per_element, _ = measure_kernel(bind(mpicomp.Dense(), "ring"), None, False, clock)
    assert fixed + per_element * (1 << 18) == pytest.approx(0.001, rel=0.2)


@pytest.mark.parametrize("times", [False, True])
def test_kernels_are_measured_on_clocks_that_pass_in_them(times):
    world, scheme = LocalWorld(2, hosts=2, network=Link(LATENCY, BITS)), bind(mpicomp.TopK(), "allgather")
    for end in world.transports:
        if times:
            end.clock, end.times_kernels = time.perf_counter, True
    models = [CostModel(Network(2)) for _ in world.transports]
    world.run([measure_kernels(each, [scheme], True, end) for each, end in zip(models, world.transports, strict=True)])
    assert models[0].kernels == models[1].kernels
    assert (models[0].kernels[scheme_key(scheme)].seconds(10**6, 10**4) > 0) == times


@pytest.mark.quick
def test_many_lengths_share_few_corrections():
    model, candidates = known_model()
    for numel in range(100, 3200):  # five octaves
        candidates(numel)
    for table in (model.speed_corrections, model.kernel_corrections, model.round_corrections):
        [lengths] = table.values()
        assert 20 <= len(lengths) <= 22
        known = sorted(lengths)
        assert all(1.15 < more / fewer < 1.23 for fewer, more in pairwise(known))
        assert known[0] < 1.1 * 100
        assert known[-1] > 3199 / 1.1


@pytest.mark.quick
def test_correction_holds_for_arrays_of_similar_length():
    _, candidates = known_model()

    def predicted(numel):
        return candidates(numel).prediction(0).kernels_s

    other = candidates(96_000)
    before = {numel: predicted(numel) for numel in (0, 1, 95_000, 96_000, 100_000)}
    candidates(100_000).observe(0, 100 * before[100_000], 1.0)
    after = {numel: predicted(numel) for numel in before}
    assert after[95_000] / before[95_000] == pytest.approx(after[100_000] / before[100_000])
    assert after[95_000] > 5 * before[95_000]
    assert after[0] == before[0]  # whose correction was there before
    assert after[1] == before[1]
    other.refresh_corrections()
    assert other.prediction(0).kernels_s == after[96_000]


@pytest.mark.quick
def test_change_of_the_network_inflates_each_variance_once():
    model, candidates = known_model()
    buckets = [candidates(numel) for numel in (95_000, 100_000, 100_000, 7)]
    [lengths] = model.round_corrections.values()
    before = {numel: correction.variance for numel, correction in lengths.items()}
    already = set()
    for bucket in buckets:
        bucket.inflate_variance(already)
    assert {numel: correction.variance - before[numel] for numel, correction in lengths.items()} == pytest.approx(
        dict.fromkeys(before, 0.01)
    )


CODE = {"encoder": (2,), "decoder": (2,), "passes": 1, "dense_steps": 1, "training_steps": 2}


@pytest.mark.parametrize(
    ("compressor", "collective"),
    [
        (mpicomp.LGC(ratio=0.1, **CODE), "learned:ring"),
        (mpicomp.LGC(ratio=0.1, **CODE, instance="server"), "learned:ring"),
    ],
)
def test_first_steps_predict_the_seconds_of_later_ones(compressor, collective):
    network = Network(3)
    network.set_link("world", LATENCY, 8 / BITS, 0.1)
    ranks = Ranks(3, compressor, collective, network=Link(LATENCY, BITS), cost=CostModel(network))
    ends = ranks.world.transports
    random = np.random.default_rng(0)
    predicted, took = [], []
    for _ in range(7):
        before = max(end.seconds for end in ends)
        ranks.reduce([{"w": random.standard_normal(SHAPE).astype(np.float32)} for _ in ends])
        took.append(max(end.seconds for end in ends) - before)
        predicted.append(ranks.reducers[0].last_step.buckets[0].predicted_s)
    assert predicted[0] == pytest.approx(took[-1], rel=0.1)
    assert took[0] > 2 * took[-1]


@pytest.mark.parametrize("layout", [[0], [0, 0], [0, 0, 0], [0, 1, 0, 1], [0] * 4 + [1] * 4, [0] * 7])
@pytest.mark.parametrize("number", [1, 2, 5, 24])
def test_compilation_order_shares_kernels_among_a_hosts_ranks(layout, number):
    """Ranks that take the next kernel that none has compiled are done as soon as so many ranks can be."""
    orders = [compilation_order(range(number), layout_groups(layout, rank)[0]) for rank in range(len(layout))]
    assert all(sorted(order) == list(range(number)) for order in orders)
    for host in set(layout):
        ranks = [rank for rank, other in enumerate(layout) if other == host]
        compiled, rounds = set(), 0
        while len(compiled) < number:
            taken = {next((item for item in orders[rank] if item not in compiled), None) for rank in ranks}
            compiled |= taken - {None}
            rounds += 1
        assert rounds <= -(-number // len(ranks)) + 1


@pytest.mark.parametrize(("hosts", "numel", "slower"), [(4, 2_000_000, 1.28), (4, 1000, 1.0), (1, 2_000_000, 1.0)])
def test_long_sums_of_a_library_are_taken_to_be_slow_until_they_have_run(hosts, numel, slower):
    group, _ = layout_groups(range(4) if hosts > 1 else [0] * 4, 0)
    model, scheme = CostModel(Network(hosts)), bind(mpicomp.Dense(), "allreduce")
    model.kernels[scheme_key(scheme)] = KernelCost(1e-6, 0, 0)
    candidates = model.candidates([scheme], numel, np.dtype(np.float32), group)
    views = sample_views(group)
    alone = model.network.seconds(
        model.network.coefficients([scheme.rounds(numel, np.dtype(np.float32), view) for view in views], views)
    )
    assert candidates.prediction(0).rounds_s == pytest.approx(slower * alone, rel=0.01)
    for _ in range(20):
        candidates.observe(0, 1e-6, alone + 1e-6)
        candidates.time_update()
    assert candidates.prediction(0).rounds_s == pytest.approx(alone, rel=0.05)
