"""UpdateOptimizer: local steps, whose changes are averaged, against the same made by hand."""

import contextlib
import gc

import numpy as np
import oracle
import pytest
import torch
from local_replicas import ByHand, Updates, adam, bits, exchanges_of, loss_of, network, pair, sgd
from networks import Link

import mpicomp
from mpicomp.errors import DisagreementError


class InTurn:
    """Both optimizers of a pair, which know nothing of each other."""

    def __init__(self, model):
        self.members = pair(model)

    def zero_grad(self):
        for member in self.members:
            member.zero_grad()

    def step(self):
        for member in self.members:
            member.step()


@pytest.mark.parametrize(("base", "by_hand", "every"), [(adam, adam, 1), (adam, adam, 3), (pair, InTurn, 2)])
def test_shared_parameters_move_by_the_mean_change(base, by_hand, every):
    ranks, plain = Updates(3, base, compressor="dense", sync_every=every), ByHand(3, by_hand)
    for step in range(2 * every):
        ranks.step(step)
        plain.step(step)
        if (step + 1) % every == 0:
            plain.move_by_mean()
        np.testing.assert_allclose(ranks.values(), plain.values(), rtol=1e-10, atol=1e-12)
    assert ranks.same()


@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_nothing_is_lost(size, decay):
    """Over all ranks: residual after = decay x (change + residual before - what the shared parameters moved by)."""
    ranks, plain = Updates(size, compressor="topk", feedback_decay=decay, sync_every=2), ByHand(size)
    before = np.zeros(plain.shared.size)
    for number in range(8):
        ranks.step(number)
        plain.step(number)
        if number % 2:
            after, moved = np.sum(ranks.residuals(), axis=0), ranks.values()[0] - plain.shared
            left = np.sum(plain.changes(), axis=0) + before - size * moved
            np.testing.assert_allclose(after, decay * left, atol=1e-12)
            assert np.abs(after).max() > 1e-3
            before = after
            plain.set_all(ranks.values()[0])


@pytest.mark.parametrize(("rate", "compute_s", "pays"), [(2e6, 0.01, True), (1e10, 0.1, False)])
def test_steps_to_an_exchange_are_chosen_where_they_pay(rate, compute_s, pays):
    def make(model, end):
        return mpicomp.torch.UpdateOptimizer(adam(model), model.named_parameters(), sync_every="auto", comm=end)

    exchanges = exchanges_of(make, torch.nn.Linear(64, 64, bias=False), Link(50e-6, rate), compute_s, 240)
    steps = [steps for steps, _ in exchanges]
    assert steps[0] == 1  # until something is known
    assert (steps[-1] > 1) == pays
    assert pays or set(steps) == {1}


@pytest.mark.parametrize("outer", [{"lr": 0.7, "momentum": 0.9, "nesterov": True}, {"lr": 0.5}], ids=str)
def test_outer_optimizer_is_diloco(outer):
    """DiLoCo by hand: Nesterov's momentum as Sutskever's form has it in torch, of the mean change."""
    ranks, plain = Updates(2, compressor="dense", sync_every=3, outer=outer), ByHand(2)
    velocity = np.zeros(plain.shared.size)
    momentum = outer.get("momentum", 0.0)
    for number in range(12):
        ranks.step(number)
        plain.step(number)
        if number % 3 == 2:
            mean = np.mean(plain.changes(), axis=0)
            velocity = momentum * velocity + mean
            direction = mean + momentum * velocity if outer.get("nesterov") else velocity
            plain.set_all(plain.shared + outer["lr"] * direction)
    np.testing.assert_allclose(ranks.values()[0], plain.shared, rtol=1e-9, atol=1e-12)


def matrix():
    torch.manual_seed(5)
    return torch.nn.Linear(9, 7, bias=False).double()  # 63 elements, which are a bucket


def test_sparseloco_by_hand():
    """Arxiv 2508.15706 by hand: residuals decay, and the mean is over ranks, not senders."""
    settings = {"compressor": {"id": "topk", "ratio": 0.1}, "feedback_decay": 0.95}
    ranks = Updates(3, make=matrix, sync_every=4, outer={"lr": 0.8}, **settings)
    plain, residuals = ByHand(3, make=matrix), np.zeros((3, 63))
    for number in range(12):
        ranks.step(number)
        plain.step(number)
        if number % 4 == 3:
            residuals = 0.95 * residuals + plain.changes()
            sent = np.zeros_like(residuals)
            for part, residual in zip(sent, residuals, strict=True):
                chosen = oracle.largest(residual, oracle.kept(0.1, residual.size))
                part[chosen] = residual[chosen]
            residuals -= sent
            plain.set_all(plain.shared + 0.8 * sent.mean(axis=0))
            np.testing.assert_allclose(ranks.values()[0], plain.shared, rtol=1e-9, atol=1e-12)
    assert ranks.same()


def test_no_exchange_is_dense_where_signs_are_taken():
    ranks = Updates(3, sgd, make=matrix, compressor="topk", warmup=None, outer={"sign": True, "lr": 0.5})
    for number in range(3):
        ranks.step(number)
        [bucket] = ranks.optimizers[0].reducer.last_step.buckets
        assert (bucket.compressor["id"], bucket.collective) == ("topk", "allgather")


def wrap(model, comm, base=adam, **settings):
    return mpicomp.torch.UpdateOptimizer(base(model), model, comm=comm, **({"warmup": 0} | settings))


def backward(model, optimizer, rank, step):
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()


def step_all(model, optimizer, comm, step):
    """Step on all ranks, after which they hold the same bits."""
    backward(model, optimizer, comm.rank, step)
    optimizer.step()
    assert len(set(comm.allgather(bits(model)))) == 1


@pytest.mark.mpi
@pytest.mark.parametrize(
    "settings",
    [
        {"compressor": "topk", "feedback_decay": 0.9},
        {"compressor": "topk", "collective": "star-topk:ring", "sync_every": 3, "outer": {"lr": 0.7, "momentum": 0.9}},
        {"compressor": "qsgd", "collective": "two-phase", "sync_every": 4},
    ],
    ids=str,
)
def test_bits_equal_those_of_ranks_in_one_process(comm, settings):
    if "collective" not in settings:
        settings = settings | {"collective": "allgather"}
    model = network()
    optimizer = wrap(model, comm, **settings)
    for step in range(9):
        backward(model, optimizer, comm.rank, step)
        optimizer.step()
    optimizer.synchronize()
    ranks = Updates(comm.size, **settings)
    ranks.run(range(9))
    ranks.world.run([optimizer.synchronizing() for optimizer in ranks.optimizers])
    assert set(comm.allgather(bits(model))) == {bits(ranks.models[0])}
    optimizer.close()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("every", [1, 3])
def test_means_are_of_ranks_with_batches(comm, every):
    """Means are those of the ranks that had batches since the exchange before."""
    batches = [5, 2, 0][: comm.size]
    model, other = network(), [network() for _ in batches]
    optimizer = wrap(model, comm, sync_every=every, compressor="dense")
    with optimizer.join():
        for step in range(batches[comm.rank]):
            backward(model, optimizer, comm.rank, step)
            optimizer.step()
    bases = [adam(member) for member in other]
    shared = [parameter.detach().clone() for parameter in other[0].parameters()]
    for first in range(0, max(batches), every):
        changes = []
        for rank, (member, base) in enumerate(zip(other, bases, strict=True)):
            for step in range(first, min(first + every, batches[rank])):
                backward(member, base, rank, step)
                base.step()
            if first < batches[rank]:
                changes.append([p.detach() - at for p, at in zip(member.parameters(), shared, strict=True)])
        shared = [at + torch.stack(parts).mean(0) for at, parts in zip(shared, zip(*changes), strict=True)]  # noqa: B905
        with torch.no_grad():
            for member in other:
                for parameter, at in zip(member.parameters(), shared, strict=True):
                    parameter.copy_(at)
    for parameter, at in zip(model.parameters(), shared, strict=True):
        torch.testing.assert_close(parameter.detach(), at, rtol=1e-4, atol=1e-5)
    backward(model, optimizer, comm.rank, 20)  # all have batches again
    for _ in range(every):
        optimizer.step()
    assert len(set(comm.allgather(bits(model)))) == 1
    optimizer.close()


@pytest.mark.mpi(min_size=2)
def test_rank_without_join_is_refused(comm):
    model = network()
    optimizer = wrap(model, comm, compressor="dense")
    backward(model, optimizer, comm.rank, 0)
    optimizer.step()

    def step():
        with optimizer.join() if comm.rank else contextlib.nullcontext():
            backward(model, optimizer, comm.rank, 1)
            optimizer.step()

    with pytest.raises(DisagreementError, match=r"join\(\) must be the same on all ranks"):
        step()
    optimizer.close()


OWN_STEPS = "UpdateOptimizer ends with steps that were not exchanged, so that the ranks' models differ; call"


@pytest.mark.parametrize(
    ("end", "steps", "reported"), [("close", 4, True), ("collection", 4, True), ("close", 3, False)]
)
def test_end_between_two_exchanges_is_reported(capsys, end, steps, reported):
    ranks = Updates(2, sync_every=3)
    ranks.run(range(steps))
    for optimizer in ranks.optimizers if end == "close" else ():
        optimizer.close()
        optimizer.close()
    del ranks
    optimizer = None
    gc.collect()
    said = capsys.readouterr().err
    assert [said.count(f"rank {rank}: {OWN_STEPS} optimizer.synchronize()") for rank in range(2)] == [reported] * 2


def test_end_between_two_exchanges_is_not_reported_of_one_rank_or_after_an_error(capsys):
    alone = Updates(1, sync_every=3)
    alone.step(0)
    alone.optimizers[0].close()
    ranks = Updates(2, sync_every=3)
    ranks.step(0)
    with pytest.raises(KeyError), ranks.optimizers[0], ranks.optimizers[1]:
        raise KeyError
    assert OWN_STEPS not in capsys.readouterr().err


def test_state_between_two_exchanges_says_so_once(capsys):
    ranks = Updates(2, sync_every=2)
    for step in range(3):
        ranks.step(step)
        for optimizer in ranks.optimizers:
            optimizer.state_dict()
    said = capsys.readouterr().err
    for rank in range(2):
        assert said.count(f"rank {rank}: UpdateOptimizer: state_dict() between two exchanges") == 1
        assert "optimizer.synchronize()" in said
