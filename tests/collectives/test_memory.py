"""Memory of exchanges: what a collective announces covers what it takes, and plans that need much are not tried."""

import itertools
import weakref
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import mpicomp
from mpicomp.collectives import Context, bind, variants
from mpicomp.compressors.accumulated import TRAILER, Accumulated, Piece
from mpicomp.gpu import HOST
from mpicomp.mpi import LocalWorld
from mpicomp.policies import POLICIES, Plan, Policy, Shape
from mpicomp.workspace import Scratch, Workspace

NUMEL, STEPS = 40_000, 3
TRIED = [
    mpicomp.Dense(),
    mpicomp.Dense(wire="fp16"),
    mpicomp.TopK(ratio=0.05),
    mpicomp.TopK(ratio=0.05, wire="q4"),
    mpicomp.QSGD(bits=4, rounding="nearest"),
    mpicomp.QSGD(bits=8),
    mpicomp.OneBit(),
    mpicomp.OneBit(block=None, bits=2),
]
PAIRS = [(compressor, name) for compressor in TRIED for name in variants(compressor) if name.count(":") < 2]
DENSE = ["allreduce", "ring", "recursive-doubling", "scatter-reduce", "parameter-server"]
WORLDS = [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (3, 3)]  # ranks, hosts


def taken(compressor, collective, ranks, hosts, identical_sums=True, numel=NUMEL):
    """Run a few steps of a bucket; return the scheme, the ranks' groups and their bytes of scratch and held arrays."""
    world, scheme = LocalWorld(ranks, identical_sums, hosts), bind(compressor, collective)
    groups = [end.group for end in world.transports]
    scratches = [Scratch() for _ in groups]
    workspaces = [Workspace(scratch=scratch) for scratch in scratches]
    buffers = [np.zeros(numel + TRAILER, np.float32) for _ in groups]
    memories = [{} for _ in groups]
    for step in range(STEPS):
        exchanges = []
        for rank, group in enumerate(groups):
            array = np.random.default_rng([step, rank]).standard_normal(numel).astype(np.float32)
            accumulated = Accumulated(buffers[rank], None, [Piece(0, array)])
            accumulated.may_be_overwritten = True
            context = Context(group=group, step=step, memory=memories[rank], workspace=workspaces[rank])
            exchanges.append(scheme.exchange(accumulated, context))
        world.run(exchanges)
    return scheme, groups, [(one.nbytes, other.nbytes) for one, other in zip(scratches, workspaces, strict=True)]


@pytest.mark.parametrize(("compressor", "collective"), PAIRS, ids=str)
def test_memory_that_is_announced_covers_what_is_taken(compressor, collective):
    for (ranks, hosts), identical in itertools.product(WORLDS, (True, False)):
        scheme, groups, bytes_of_ranks = taken(compressor, collective, ranks, hosts, identical)
        announced = [scheme.memory(NUMEL, np.dtype(np.float32), group) for group in groups]
        scratch, held = (max(column) for column in zip(*announced, strict=True))
        for used_scratch, used_held in bytes_of_ranks:
            small = 4096  # headers, counts, trailers
            assert used_held <= held + small, f"{ranks} ranks on {hosts} hosts"
            assert used_scratch + used_held <= scratch + held + small, f"{ranks} ranks on {hosts} hosts"


@pytest.mark.parametrize("collective", ["allreduce", "ring"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_long_dense_array_needs_less_than_half_as_much_again(collective, ranks):
    numel = 3_000_000
    _, _, bytes_of_ranks = taken(mpicomp.Dense(), collective, ranks, 1, numel=numel)
    assert max(map(sum, bytes_of_ranks)) <= 0.51 * 4 * numel


def reducers_of(ranks, **settings):
    world = LocalWorld(ranks)
    return world, [mpicomp.Reducer(comm=end, bucket_bytes=400_000, **settings) for end in world.transports]


@pytest.mark.parametrize("collective", DENSE)
def test_buckets_share_one_scratch_and_hold_nothing_that_is_dense(collective):
    world, reducers = reducers_of(3, compressor="dense", collective=collective)
    gradients = {name: np.ones(100_000, np.float32) for name in "abcd"}
    world.run([reducer.rounds(gradients) for reducer in reducers])
    for reducer in reducers:
        buckets = reducer.layout.buckets
        assert len(buckets) == 4
        assert len({id(bucket.scratch) for bucket in buckets}) == 1
        assert sum(bucket.workspace.nbytes for bucket in buckets) == 0
        assert buckets[0].scratch.nbytes <= reducer.last_step.buckets[0].memory_bytes


@dataclass(eq=False)
class DenseInTurn(Policy):
    """Every dense collective for a step."""

    id: ClassVar[str] = "test-dense-in-turn"

    def configure(self, settings):
        self.compressor, self.feedback = mpicomp.Dense(), True
        self._schemes = [bind(mpicomp.Dense(), name) for name in DENSE]
        self._step = 0

    def on_step_end(self, step, outcomes):
        self._step += 1

    def plan(self, bucket):
        return Plan(self._schemes[self._step % len(DENSE)], "in turn")


def test_what_another_plan_needed_is_released(monkeypatch):
    """Of collectives in turn the scratch of none is left, nor an array that a record holds."""
    POLICIES.names()  # built-in ones are there
    monkeypatch.setattr(POLICIES, "_classes", dict(POLICIES._classes))
    mpicomp.register(DenseInTurn)
    world, reducers = reducers_of(3, policy=DenseInTurn.id)
    gradients = {name: np.ones(100_000, np.float32) for name in "abcd"}
    before = []
    for step in range(2 * len(DENSE)):
        world.run([reducer.rounds(gradients) for reducer in reducers])
        [bucket, *_] = reducers[0].layout.buckets
        record = reducers[0].last_step.buckets[0]
        assert record.collective == DENSE[step % len(DENSE)]
        assert bucket.scratch.nbytes <= record.memory_bytes
        assert all(array() is None for array in before)
        before = [weakref.ref(array) for array in bucket.scratch.slots.values()]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_plans_that_auto_may_try_need_half_of_the_gradients_at_most(ranks):
    """As announced, without the arrays: a model of 40 million parameters."""
    world, reducers = reducers_of(ranks)
    shapes = [Shape((name,), (NUMEL * 200,), ((NUMEL * 200,),), np.dtype(np.float32), HOST) for name in "abcde"]
    world.run([reducer.policy.start(shapes, end) for reducer, end in zip(reducers, world.transports, strict=True)])
    total = sum(4 * shape.numel for shape in shapes)
    tables = reducers[0].policy._selector.tables
    assert {scheme.compressor.id for table in tables for scheme in table.schemes} == {"dense", "topk", "qsgd"}
    for table, shape in zip(tables, shapes, strict=True):
        for scheme in table.schemes:
            by_view = [scheme.memory(shape.numel, shape.dtype, end.group) for end in world.transports]
            scratch, held = (max(column) for column in zip(*by_view, strict=True))
            assert scratch + held * total / (4 * shape.numel) <= 0.5 * total, scheme.id
