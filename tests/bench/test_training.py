"""Rows of ``mpicomp bench training``, from scripted seconds and from real training."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from collections import Counter

import numpy as np
import torch
from mpicomp.bench.peers import INTERFACE, process_group
from mpicomp.bench.tasks import get_task
from mpicomp.bench.trainer import update
from mpicomp.bench.training import (
    BACKWARD,
    COMPRESS,
    DECODE,
    EXCHANGE,
    FIELDS,
    FORWARD,
    PROCESSOR,
    SECONDS,
    WIRE,
    Exchange,
    Settings,
    Trained,
    rows_of,
    slowest,
    train_in_turn,
    trainers,
)

from mpicomp import Dense, OneBit, TopK
from mpicomp.errors import ConfigurationError
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.comm import MPITransport
from mpicomp.torch import UpdateOptimizer


class Scripted:
    """A trainer whose blocks take scripted seconds."""

    order: list = []  # noqa: RUF012
    overlaps = False
    plans: Counter = Counter()  # noqa: RUF012

    def __init__(self, name, seconds):
        self.exchange = Exchange(name)
        self.seconds = iter(seconds)
        self.done = 0
        self.replica = self.model = self

    def block(self, steps):
        self.order.append((self.exchange.name, steps))
        numbers = np.zeros((steps, FIELDS))
        numbers[:, SECONDS] = next(self.seconds)
        numbers[:, WIRE] = 100
        self.done += steps
        return numbers

    def differing_ranks(self, transport):
        return []

    def evaluate(self, model):
        """Return the quality, as the task of these trainers."""
        return float(model.done)


def silent(*_):
    pass


def taken(name, blocks, forward=0.0, backward=0.0, compressor=None, quality=None):
    """Return a training, from the seconds of each step of each block."""
    steps = np.zeros((*np.shape(blocks), FIELDS))
    steps[:, :, SECONDS], steps[:, :, FORWARD], steps[:, :, BACKWARD] = blocks, forward, backward
    steps[:, :, PROCESSOR] = np.divide(blocks, 2)
    return Trained(Exchange(name, compressor), steps, None, None, name == "dense", quality is not None, quality)


def test_train_in_turn_begins_each_round_with_another_one():
    Scripted.order = []
    trainers = [Scripted("none", [9, 1, 2, 3]), Scripted("ddp", [9, 4, 5, 6]), Scripted("topk", [9, 7, 8, 9])]
    found = train_in_turn(trainers, trainers[0], Settings(2, 3, 5), LocalWorld(1).transports[0], silent)
    names = [name for name, _ in Scripted.order]
    assert names[:3] == ["none", "ddp", "topk"]
    assert names[3:] == ["none", "ddp", "topk", "ddp", "topk", "none", "topk", "none", "ddp"]
    assert [steps for _, steps in Scripted.order] == [5] * 3 + [2] * 9
    assert [training.exchange.name for training in found] == ["none", "ddp", "topk"]
    assert found[1].steps[:, :, SECONDS].tolist() == [[4, 4], [5, 5], [6, 6]]  # what warmed up is not among them
    assert [training.quality for training in found] == [11.0] * 3
    assert all(training.equal and training.link_bytes is None for training in found)


def test_slowest_returns_the_steps_of_one_rank():
    block = np.zeros((2, 3, FIELDS))
    block[0, :, SECONDS], block[1, :, SECONDS] = (1, 5, 1), (3, 2, 3)  # rank 0 has the longest step, rank 1 the block
    block[0, :, BACKWARD], block[1, :, BACKWARD] = 0.1, 0.2
    block[0, :, WIRE], block[1, :, WIRE] = 10, 30
    block[0, :, PROCESSOR], block[1, :, PROCESSOR] = 0.5, 1
    steps = slowest(block)
    assert steps[:, SECONDS].tolist() == [3, 2, 3]
    assert steps[:, BACKWARD].tolist() == [0.2] * 3
    assert steps[:, WIRE].tolist() == [20] * 3
    assert steps[:, PROCESSOR].tolist() == [0.75] * 3


def test_rows_are_those_computed_by_hand():
    blocks = [[1.0, 1.0, 4.0]] * 6
    trained = [
        taken("none", blocks, 0.25, 0.5),
        taken("dense", np.multiply(blocks, 2), 0.25, 1.5, Dense(), 0.9),
        taken("topk", np.multiply(blocks, 1.25), 0.25, 0.5, TopK(ratio=0.1), 0.8),
    ]
    rows = {row["exchange"]: row for row in rows_of(trained, 64, {"task": "digits"})}
    none, dense, topk = rows["none"], rows["dense"], rows["topk"]
    assert none["task"] == "digits"
    assert (none["median_s"], none["low_s"], none["high_s"], none["mean_s"], none["p95_s"]) == (1, 1, 1, 2, 4)
    assert (none["processor_s"], dense["processor_s"]) == (1, 2)
    assert (none["steps"], none["blocks"], none["samples_per_s"]) == (18, 6, 64)
    assert (none["of_none"], none["of_none_low"], none["of_none_high"]) == (1, 1, 1)
    assert (dense["of_none"], dense["of_none_low"], dense["of_none_high"]) == (0.5, 0.5, 0.5)
    assert (dense["samples_per_s"], dense["forward_s"], dense["backward_s"], dense["after_s"]) == (32, 0.25, 1.5, 0.25)
    assert (topk["compressor"], topk["ratio"], topk["collective"]) == ("topk", 0.1, "auto")
    assert [row["overlap"] for row in rows.values()] == [name == "dense" for name in rows]
    assert [row["collective"] for row in rows.values()] == [None, "auto", "auto"]


def test_rows_have_intervals_over_rounds():
    trained = [taken("none", [[1.0]] * 6), taken("ddp", [[2.0]] * 3 + [[4.0]] * 3)]
    row = rows_of(trained, 1, {})[1]
    assert row["of_none"] == pytest.approx(1 / 3)
    assert (row["of_none_low"], row["of_none_high"]) == (0.25, 0.5)
    # What fell on both of a round alike falls out.
    rounds = np.array([[1.0], [5.0], [2.0], [7.0], [3.0], [4.0]])
    row = rows_of([taken("none", rounds), taken("ddp", 2 * rounds)], 1, {})[1]
    assert (row["of_none_low"], row["of_none_high"]) == (0.5, 0.5)
    row = rows_of([taken("none", [[1.0]] * 5), taken("ddp", [[2.0]] * 5)], 1, {})[1]
    assert (row["of_none"], row["of_none_low"], row["low_s"]) == (0.5, None, None)


EXCHANGES = [
    Exchange("none"),
    Exchange("dense", Dense()),
    Exchange("topk:allgather", TopK(ratio=0.05), "allgather"),
    Exchange("ddp"),
    Exchange("ddp-fp16"),
    Exchange("ddp-powersgd"),
    Exchange("updates:topk:allgather", TopK(ratio=0.05), "allgather"),
]


def test_block_of_updates_has_means_over_steps():
    task, settings = get_task("digits", 1), Settings(6, 1, 3, every=3)
    with trainers([Exchange("updates:dense", Dense())], task, settings, LocalWorld(1).transports[0]) as [ours]:
        numbers = ours.block(6)
        last = ours.replica.optimizer.reducer.last_step
    assert numbers.shape == (6, FIELDS)
    assert (numbers[:3] == numbers[0]).all()
    assert (numbers[3:] == numbers[3]).all()
    assert last.step == 1  # the second exchange
    assert list(ours.plans) == [f"dense {last.buckets[0].collective}"]


def test_muon_is_exchanged_at_the_interval_of_the_job():
    exchange = Exchange("muon", OneBit())
    settings = Settings(4, 1, 0, every=2)
    with trainers([exchange], get_task("digits", 1), settings, LocalWorld(1).transports[0]) as [ours]:
        ours.block(4)
        assert [type(member).__name__ for member in ours.replica.optimizer.optimizers] == ["Muon", "AdamW"]
        assert ours.replica.optimizer.reducer.last_step.step == 1
    assert exchange.updates


@pytest.mark.mpi(max_size=3)
@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:The .warn. method is deprecated:DeprecationWarning")  # torchft's code
def test_torchft_diloco_ends_where_update_optimizer_does(comm):
    pytest.importorskip("torchft")
    every, steps = 2, 6
    transport, task = MPITransport(comm), get_task("digits", 1)
    with trainers([Exchange("torchft-diloco")], task, Settings(steps, 1, 0, every=every), transport) as [trainer]:
        numbers, theirs = trainer.block(steps), trainer.replica
    ring = 2 * (comm.size - 1) / comm.size * 4 * theirs.numel
    assert numbers[:, WIRE].mean() == pytest.approx(ring / every)

    model = task.model()
    optimizer = task.optimizer(model)
    outer = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    schedule = task.schedule(optimizer, steps)
    ours = UpdateOptimizer(optimizer, model.named_parameters(), every, "dense", outer=outer, comm=transport, warmup=0)
    for step in range(steps):
        ours.zero_grad()
        task.loss(model, task.batch(step, comm.rank, comm.size)).backward()
        update(task, optimizer, schedule)
    for parameter, other in zip(model.parameters(), theirs.parameters, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-3, atol=1e-5)
    assert theirs.differing_ranks(transport) == []
    ours.close()
    transport.close()


@pytest.mark.mpi(max_size=3)
@pytest.mark.timeout(120)
def test_ranks_train_with_each_exchange(comm):
    transport, task, settings = MPITransport(comm), get_task("digits", 1), Settings(2, 2, 3, seed=1)
    with trainers(EXCHANGES, task, settings, transport) as made:
        numel = made[0].replica.numel
        found = train_in_turn(made, task, settings, transport, silent)
    trained = {training.exchange.name: training for training in found}
    transport.close()
    assert trained["none"].equal == (comm.size == 1)
    assert all(training.equal for name, training in trained.items() if name != "none")
    for name, training in trained.items():
        assert training.steps.shape == (2, 2, FIELDS)
        assert (training.steps[:, :, SECONDS] > 0).all()
        assert training.steps[:, :, PROCESSOR].mean() > 0
        assert (training.quality is not None) == (comm.rank == 0 and (name != "none" or comm.size == 1))
        wire = training.steps[:, :, WIRE]
        ring = 2 * (comm.size - 1) / comm.size * 4 * numel
        expected = {"none": 0, "ddp": ring, "ddp-fp16": ring / 2}
        if name in expected:
            assert wire.mean() == pytest.approx(expected[name])
        elif name == "ddp-powersgd":
            assert wire.mean() <= ring / 5
        else:
            assert (wire.mean() > 0) == (comm.size > 1)
    assert numel > 30_000
    assert trained["topk:allgather"].ran == "topk allgather"
    assert trained["ddp"].ran is None
    assert (trained["topk:allgather"].steps[:, :, [COMPRESS, EXCHANGE, DECODE]] >= 0).all()
    assert np.isnan(trained["ddp"].steps[:, :, EXCHANGE]).all()
    if comm.size == 1:
        assert trained["ddp"].quality == trained["dense"].quality == trained["none"].quality
    gathered = comm.allgather([training.steps for training in trained.values()])
    for other in gathered:
        np.testing.assert_array_equal(other, gathered[0])
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("interface", ["lo", "nonexistent0"])
def test_process_group_with_a_named_interface(interface, monkeypatch):
    monkeypatch.setenv(INTERFACE, interface)
    if interface == "lo":
        with process_group(LocalWorld(1).transports[0]):
            assert torch.distributed.get_world_size() == 1
        return
    with (
        pytest.raises(ConfigurationError, match="set GLOO_SOCKET_IFNAME to the interface"),
        process_group(LocalWorld(1).transports[0]),
    ):
        pass


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.timeout(120)
def test_replica_of_ranks_on_several_hosts_overlaps_after_its_trial_steps(comm):
    transport = MPITransport(comm, layout=list(range(comm.size)))
    with trainers([Exchange("dense", Dense())], get_task("digits", 1), Settings(4, 1, 0), transport) as [trainer]:
        trainer.block(4)
        assert trainer.replica.overlaps
    transport.close()
