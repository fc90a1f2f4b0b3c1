"""UpdateOptimizer: local steps, whose changes are averaged, against the same made by hand."""

import copy

import numpy as np
import pytest
from networks import Link

import mpicomp
from mpicomp.compressors import compressor_class
from mpicomp.errors import ConfigurationError
from mpicomp.transport import LocalWorld

torch = pytest.importorskip("torch")

from local_replicas import ByHand, Updates, adam, bits, loss_of, network, sgd, values  # noqa: E402


@pytest.mark.parametrize("base", [adam, sgd])
def test_one_rank_is_the_optimizer_itself(base):
    ranks, plain = Updates(1, base), ByHand(1, base)
    for step in range(5):
        ranks.step(step)
        plain.step(step)
    np.testing.assert_allclose(ranks.values(), plain.values(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("every", [1, 3])
def test_shared_parameters_move_by_the_mean_change(every):
    ranks, plain = Updates(3, compressor="dense", sync_every=every), ByHand(3)
    for step in range(2 * every):
        ranks.step(step)
        plain.step(step)
        if (step + 1) % every == 0:
            plain.move_by_mean()
        np.testing.assert_allclose(ranks.values(), plain.values(), rtol=1e-10, atol=1e-12)
    assert ranks.same()


def test_plain_descent_equals_an_exchange_of_gradients():
    ranks = Updates(2, sgd, compressor="dense")
    world, models = LocalWorld(2), [network(), network()]
    reducers = [mpicomp.Reducer("dense", comm=end) for end in world.transports]
    for number in range(4):
        ranks.step(number)
        for rank, model in enumerate(models):
            model.zero_grad()
            loss_of(model, rank, number).backward()
        gradients = [{name: p.grad for name, p in model.named_parameters()} for model in models]
        means = world.run([reducer.rounds(arrays) for reducer, arrays in zip(reducers, gradients, strict=True)])
        with torch.no_grad():
            for model, mean in zip(models, means, strict=True):
                for name, parameter in model.named_parameters():
                    parameter.sub_(0.1 * mean[name])
    np.testing.assert_allclose(ranks.values()[1], values(models[1]), rtol=1e-10)


@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_nothing_is_lost(size, decay):
    """Over all ranks: change + decay x residual = what the shared parameters moved by, and the residual after."""
    ranks, plain = Updates(size, compressor="topk", feedback_decay=decay, sync_every=2), ByHand(size)
    before = np.zeros(plain.shared.size)
    for number in range(8):
        ranks.step(number)
        plain.step(number)
        if number % 2:
            after, moved = np.sum(ranks.residuals(), axis=0), ranks.values()[0] - plain.shared
            expected = np.sum(plain.changes(), axis=0) + decay * before
            np.testing.assert_allclose(size * moved + after, expected, atol=1e-12)
            assert np.abs(after).max() > 1e-3
            before = after
            plain.set_all(ranks.values()[0])


COMPRESSORS = [
    name
    for name in mpicomp.list_compressors()
    if compressor_class(name).__module__.startswith("mpicomp.")  # other files register compressors of theirs
    and name not in ("lgc", "fetchsgd")  # whose first steps are dense
]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor_leaves_the_same_bits(name, size):
    ranks = Updates(size, compressor=name, make=lambda: network(torch.float32))
    start = ranks.values()[0]
    for number in range(3):
        ranks.step(number)
        assert ranks.same()
    assert np.isfinite(ranks.values()[0]).all()
    assert (ranks.values()[0] != start).any()


@pytest.mark.parametrize(("every", "delay"), [(1, 1), (3, 2), (3, 3)])
def test_delayed_outcome_keeps_what_a_rank_has_done_since(every, delay):
    ranks, plain = Updates(2, compressor="dense", sync_every=every, sync_delay=delay), ByHand(2)
    changes, began = None, None
    for step in range(1, 4 * every + 1):
        ranks.step(step)
        plain.step(step)
        if changes is not None and step == began + delay:
            since = np.array(plain.changes()) - changes
            plain.shared = plain.shared + np.mean(changes, axis=0)
            for rank, change in enumerate(since):
                plain.set(rank, plain.shared + change)
            changes = None
        if step % every == 0:
            changes, began = plain.changes(), step
        np.testing.assert_allclose(ranks.values(), plain.values(), rtol=1e-9, atol=1e-12)
    with pytest.raises(ConfigurationError, match=r"an exchange is under way; call synchronize\(\)"):
        ranks.optimizers[0].state_dict()
    ranks.world.run([optimizer.synchronizing() for optimizer in ranks.optimizers])
    assert ranks.same()
    expected = plain.shared + np.mean(changes, axis=0)
    expected += np.mean(np.array(plain.changes()) - changes, axis=0)
    np.testing.assert_allclose(ranks.values()[0], expected, rtol=1e-9, atol=1e-12)


def chosen_steps(rate, compute_s, steps=240):
    """Return the steps between exchanges, on links of a rate, where a step takes a rank ``compute_s`` seconds."""
    world = LocalWorld(4, True, 4, Link(50e-6, rate))
    torch.manual_seed(0)
    start, truth = torch.nn.Linear(64, 64, bias=False), torch.randn(64, 64)
    models = [copy.deepcopy(start) for _ in range(4)]
    optimizers = [
        mpicomp.torch.UpdateOptimizer(adam(model), model.named_parameters(), sync_every="auto", comm=end)
        for model, end in zip(models, world.transports, strict=True)
    ]
    seen, since = [], 0
    for number in range(steps):
        for rank, (model, optimizer, end) in enumerate(zip(models, optimizers, world.transports, strict=True)):
            optimizer.zero_grad()
            inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * number + rank))
            (model(inputs) - inputs @ truth).square().mean().backward()
            end.seconds += compute_s
        every = {optimizer.sync_every for optimizer in optimizers}
        assert len(every) == 1  # all ranks choose the same
        world.run([optimizer.rounds() for optimizer in optimizers])
        since += 1
        if since == every.pop():
            assert len({bits(model) for model in models}) == 1
            seen.append(since)
            since = 0
    return seen


def test_steps_to_an_exchange_are_chosen_where_they_pay():
    slow, fast = chosen_steps(rate=2e6, compute_s=0.01), chosen_steps(rate=1e10, compute_s=0.1)
    assert slow[0] == 1  # until something is known
    assert slow[-1] > 1
    assert set(fast) == {1}


def test_fragments_are_exchanged_at_different_steps():
    ranks = Updates(2, compressor="dense", sync_every=4, fragments=2)
    first, second = (set(state["shared"]) for state in ranks.optimizers[0].state_dict()["mpicomp"]["fragments"])
    assert (first, second) == ({"0.weight"}, {"0.bias", "2.weight", "2.bias"})  # of 211 elements 108 and 103
    same = []
    for number in range(8):
        ranks.step(number)
        left, right = (dict(model.named_parameters()) for model in ranks.models)
        same.append({name for name in left if torch.equal(left[name], right[name])})
    assert same == [set(), second, set(), first, set(), second, set(), first]
    assert len(ranks.optimizers[0].reducers) == 2
