"""Second moments that ranks share, against optimizers of all ranks written down in NumPy."""

import copy

import numpy as np
import pytest
import torch
from local_replicas import Updates, network, values
from local_replicas import loss_of as plain_loss
from marks import slow

import mpicomp
from mpicomp.errors import ConfigurationError, DisagreementError, NonFiniteError
from mpicomp.transport import LocalWorld

LOSSLESS = {"compressor": "dense"}


def adamw(model, **settings):
    """Groups of other decays, and one of the two with weight decay."""
    groups = [
        {"params": model[0].parameters(), "betas": (0.9, 0.9), "weight_decay": 0.1},
        {"params": model[2].parameters(), "betas": (0.8, 0.99), "weight_decay": 0.0, "eps": 1e-6},
    ]
    return torch.optim.AdamW(groups, lr=0.02, **settings)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def loss_of(model, rank, step):
    return plain_loss(model, rank, step) * (50 if (rank, step) == (0, 5) else 1)  # a burst on one rank


def sharing(size, base=adamw, make=network, moments=LOSSLESS, **settings):
    return Updates(size, base, make, loss_of, second_moments=moments, **{"compressor": "dense"} | settings)


def state_of(optimizer):
    return optimizer.state_dict()["mpicomp"]["fragments"][0]["second_moments"]


class InNumPy:
    """All ranks' optimizers with flat arrays, by the definition.

    ``squares``: local second moments of each rank; ``divided_by``: those in its optimizer.
    """

    def __init__(self, size, apply, decays, every, most):
        self.model = network()
        self.places = values(self.model)
        self.ranks = [self.places.copy() for _ in range(size)]
        self.apply, self.decay, self.every, self.most = apply, decays, every, most
        self.squares = [np.zeros(self.places.size) for _ in range(size)]
        self.divided_by = [np.zeros(self.places.size) for _ in range(size)]
        self.memory = [np.zeros(self.places.size) for _ in range(size)]
        self.made = [0] * size
        self.held, self.due, self.steps, self.bursts = None, 1, 0, 0

    def gradient(self, rank, step):
        place = 0
        with torch.no_grad():
            for parameter in self.model.parameters():
                part = self.ranks[rank][place : place + parameter.numel()]
                parameter.copy_(torch.from_numpy(part).view(parameter.shape))
                place += parameter.numel()
        self.model.zero_grad()
        loss_of(self.model, rank, step).backward()
        return torch.cat([p.grad.reshape(-1) for p in self.model.parameters()]).numpy()

    def expected(self, rank):
        bound, least = self.held * (1 - self.decay ** self.made[rank]), self.squares[rank] / 4
        self.bursts += (least > bound).sum()
        return np.maximum(bound, least)

    def step(self, number, left_out=()):
        self.steps += 1
        for rank in range(len(self.ranks)):
            if rank in left_out:
                continue
            gradient = self.gradient(rank, number)
            self.made[rank] += 1
            self.squares[rank] = self.decay * self.squares[rank] + (1 - self.decay) * gradient**2
            self.divided_by[rank] = self.decay * self.divided_by[rank] + (1 - self.decay) * gradient**2
            self.apply(self, rank, gradient)
            if self.held is not None:
                self.divided_by[rank] = self.expected(rank)
        if self.steps % self.every == 0:
            mean = self.places + np.mean(np.array(self.ranks) - self.places, axis=0)
            self.places = mean
            self.ranks = [mean.copy() for _ in self.ranks]
            if self.steps >= self.due:
                pairs = zip(self.squares, self.made, strict=True)
                self.held = np.mean([square / (1 - self.decay**made) for square, made in pairs], axis=0)
                self.divided_by = [self.expected(rank) for rank in range(len(self.ranks))]
                self.due = self.steps + min(self.most, max(1, self.steps // 2))


SIZES = [120, 91]  # elements in each group


def by_element(first, second):
    return np.repeat([first, second], SIZES)


def adamw_by_hand(ranks, rank, gradient):
    b1, b2, eps = by_element(0.9, 0.8), by_element(0.9, 0.99), by_element(1e-8, 1e-6)
    made = ranks.made[rank]
    ranks.ranks[rank] *= 1 - 0.02 * by_element(0.1, 0.0)
    ranks.memory[rank] = b1 * ranks.memory[rank] + (1 - b1) * gradient
    root = np.sqrt(ranks.divided_by[rank] / (1 - b2**made)) + eps
    ranks.ranks[rank] -= 0.02 * ranks.memory[rank] / (1 - b1**made) / root


def rmsprop_by_hand(ranks, rank, gradient):
    ranks.ranks[rank] -= 0.01 * gradient / (np.sqrt(ranks.divided_by[rank]) + 1e-8)


@pytest.mark.parametrize(
    ("size", "every", "most"),
    [(2, 1, 1), (3, 2, 3), (7, 3, 100), *(slow(4, 1, most) for most in (1, 3, 100)), slow(7, 3, 1), slow(2, 1, 100)],
)
def test_ranks_divide_by_the_average(size, every, most):
    ranks = sharing(size, sync_every=every, moments=LOSSLESS | {"sync_every": most})
    plain = InNumPy(size, adamw_by_hand, by_element(0.9, 0.99), every, most)
    for number in range(13):
        ranks.step(number)
        plain.step(number)
        np.testing.assert_allclose(ranks.values(), plain.ranks, rtol=1e-9, atol=1e-11)
    assert plain.bursts
    assert len(set(ranks.bits())) == (1 if 13 % every == 0 else size)
    local = sharing(size, sync_every=every, moments="local")
    local.run(range(13))
    assert np.abs(local.values()[0] - ranks.values()[0]).max() > 1e-3


def test_one_rank_is_the_optimizer_itself():
    ranks, model = sharing(1, moments="shared"), network()
    plain = adamw(model)
    for number in range(8):
        ranks.step(number)
        plain.zero_grad()
        loss_of(model, 0, number).backward()
        plain.step()
    np.testing.assert_allclose(ranks.values()[0], values(model), rtol=1e-12, atol=1e-13)


def test_rmsprop_divides_by_the_average():
    base = lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, alpha=0.9)  # noqa: E731
    ranks = sharing(3, base, moments=LOSSLESS | {"sync_every": 4})
    plain = InNumPy(3, rmsprop_by_hand, by_element(0.9, 0.9), 1, 4)
    for number in range(12):
        ranks.step(number)
        plain.step(number)
    np.testing.assert_allclose(ranks.values()[0], plain.places, rtol=1e-8, atol=1e-10)


def test_rank_that_skips_a_step_has_its_count():
    ranks = sharing(2, nonfinite="skip", moments=LOSSLESS | {"sync_every": 2})
    plain = InNumPy(2, adamw_by_hand, by_element(0.9, 0.99), 1, 2)
    for number in range(9):
        ranks.backward(number)
        if number == 4:
            ranks.models[1][0].weight.grad[0, 0] = torch.nan
        ranks.exchange()
        plain.step(number, left_out=[1] if number == 4 else [])
    np.testing.assert_allclose(ranks.values()[0], plain.places, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (torch.optim.NAdam, torch.float32),
        (torch.optim.RMSprop, torch.bfloat16),
        slow(torch.optim.Adam, torch.float32),
        slow(torch.optim.Adam, torch.bfloat16),
        slow(torch.optim.RAdam, torch.float32),
    ],
)
def test_averages_in_few_bits_are_nearly_exact(kind, dtype):
    """As powers of two, too, and twice rounded, averages are nearly the same, and bits on all ranks."""
    held = []
    for moments in (LOSSLESS, "shared"):
        ranks = sharing(4, lambda model: kind(model.parameters(), lr=0.003), lambda: network(dtype), moments)
        for number in range(3):
            ranks.step(number)
            assert ranks.same()
        states = [state_of(optimizer)["averages"] for optimizer in ranks.optimizers]
        assert all(torch.equal(states[0][name], other[name]) for other in states for name in other)
        held.append(np.concatenate([average.reshape(-1).numpy() for average in states[0].values()]))
    exact, rounded = held
    assert (exact > 0).all()
    ratios = rounded / exact
    assert 0.2 < ratios.min() < 0.9
    assert ratios.max() < 4
    assert abs(ratios.mean() - 1) < 0.15


def test_record_has_the_bytes_of_averages():
    size, numel, bytes_of = 4, 211, []
    ranks = sharing(size, moments="shared", make=lambda: network(torch.float32), compare_every=0)
    for number in range(14):
        ranks.step(number)
        bytes_of.append(ranks.optimizers[0].reducer.last_step.wire_bytes)
    plain = sharing(size, moments="local", make=lambda: network(torch.float32), compare_every=0)
    plain.run(range(14))
    without = plain.optimizers[0].reducer.last_step.wire_bytes
    averaged = [number + 1 for number, sent in enumerate(bytes_of) if sent > without]
    assert averaged == [1, 2, 3, 4, 6, 9, 13]
    # Two rounds of signs in words of 64 and exponents, of a quarter of the elements, to and from three others; headers.
    part = 8 + 8 * -(-numel // size // 8)
    assert 0 < bytes_of[12] - without - 2 * (size - 1) * part < 2 * (size - 1) * 80


def test_moment_of_one_rank_counts_as_its_share():
    """Of a parameter that has had a gradient on one rank of two."""
    ranks = sharing(2, adam)
    ranks.backward(0)
    ranks.models[1][0].weight.grad = None
    square = ranks.models[0][0].weight.grad.square()
    ranks.exchange()
    state = ranks.optimizers[0].state[ranks.models[0][0].weight]
    torch.testing.assert_close(state["exp_avg_sq"], 0.001 * square / 2)
    ranks.step(1)
    assert ranks.same()


def test_checkpoint_resumes_with_fewer_ranks(tmp_path):
    ranks, fewer = (sharing(size, moments="shared", compressor="topk") for size in (4, 2))
    ranks.run(range(6))
    ranks.through_a_checkpoint(tmp_path, fewer)
    before = state_of(ranks.optimizers[0])
    for optimizer in fewer.optimizers:
        after = state_of(optimizer)
        assert (after["steps"], after["next"]) == (before["steps"], before["next"]) == (6, 9)
        assert all(torch.equal(after["averages"][name], held) for name, held in before["averages"].items())
    for number in range(6, 10):
        fewer.step(number)
        assert fewer.same()


def test_state_of_a_plain_optimizer_is_averaged_at_once():
    ranks, after = sharing(2), sharing(2)
    ranks.run(range(3))
    states = ranks.states()
    for state in states:
        plain = adamw(network())
        plain.load_state_dict({key: value for key, value in state["optimizer"].items() if key != "mpicomp"})
        state["optimizer"] = plain.state_dict()
    after.load(states)
    after.step(3)
    first, second = (state_of(optimizer)["averages"] for optimizer in after.optimizers)
    assert set(first) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_exchange_that_is_undone_changes_no_average():
    ranks = sharing(2)
    ranks.step(0)
    before = copy.deepcopy(state_of(ranks.optimizers[0])["averages"])
    ranks.backward(1)
    ranks.models[1][0].weight.grad[0, 0] = torch.inf
    with pytest.raises(NonFiniteError):
        ranks.exchange()
    after = state_of(ranks.optimizers[0])["averages"]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_squares_that_overflow_skip_the_step():
    """A gradient that is finite and whose square is not."""
    ranks = sharing(2, nonfinite="skip", make=lambda: network(torch.float32))
    ranks.step(0)
    before = ranks.values()[0]
    ranks.backward(1)
    ranks.models[1][0].weight.grad[0, 0] = 1e25
    ranks.exchange()
    assert ranks.optimizers[0].reducer.last_step.skipped
    np.testing.assert_array_equal(ranks.values(), [before, before])


def test_added_groups_and_frozen_parameters_are_averaged():
    ranks = sharing(2, lambda model: torch.optim.Adam(model[0].parameters(), lr=0.01), moments="shared")
    ranks.step(0)
    for model, optimizer in ranks.pairs:
        optimizer.add_param_group({"params": list(model[2].parameters()), "betas": (0.9, 0.9)})
        model[0].weight.requires_grad_(False)
    for number in range(1, 5):
        ranks.step(number)
        assert ranks.same()
    held = state_of(ranks.optimizers[0])["averages"]
    assert set(held) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(average.isfinite().all() for average in held.values())


class Unsteady(torch.optim.Adam):
    """It keeps something else under the name of a second moment."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["exp_avg_sq"] += 1


@pytest.mark.parametrize(
    ("kind", "settings", "match"),
    [
        (torch.optim.SGD, {}, "needs an optimizer with second moments, and SGD has none; what fits: Adam, AdamW"),
        (torch.optim.Adamax, {}, "Adamax has none"),
        (torch.optim.Adagrad, {}, "Adagrad has none"),
        (torch.optim.SparseAdam, {}, "SparseAdam cannot be tried out"),
        (torch.optim.LBFGS, {}, "LBFGS cannot be tried out"),
        (torch.optim.Adadelta, {}, "has 'square_avg', which is no mean square with the decay of its group"),
        (Unsteady, {}, "has 'exp_avg_sq', which is no mean square"),
        (torch.optim.Adam, {"amsgrad": True}, "does not divide by them alone with amsgrad=True"),
        (torch.optim.RMSprop, {"centered": True}, "does not divide by them alone with centered=True"),
    ],
)
def test_optimizers_without_a_mean_square_are_refused(kind, settings, match):
    with pytest.raises(ConfigurationError, match=match):
        sharing(2, lambda model: kind(model.parameters(), lr=0.01, **settings), moments="shared")


@pytest.mark.parametrize(
    ("moments", "match"),
    [
        ("mine", r"second_moments must be 'local', 'shared' or a mapping, got 'mine'"),
        ({"ratio": 1}, "second_moments must have some of compressor, sync_every, got 'ratio'"),
        ({"sync_every": 0}, r"second_moments\['sync_every'\] must be an integer of at least 1, got 0"),
        ({"compressor": "topk"}, r"second_moments\['compressor'\] must be 'natural' or 'dense', got TopK"),
        (
            {"compressor": {"id": "dense", "wire": "fp16"}},
            r"second_moments\['compressor'\] must be 'natural' or 'dense'",
        ),
    ],
)
def test_impossible_settings_are_refused(moments, match):
    with pytest.raises(ConfigurationError, match=match):
        sharing(1, moments=moments)


def test_ranks_that_differ_in_sharing_are_refused():
    world, models = LocalWorld(2), [network(), network()]
    optimizers = [
        mpicomp.torch.UpdateOptimizer(adamw(model), model.named_parameters(), comm=end, second_moments=moments)
        for model, end, moments in zip(models, world.transports, ("local", "shared"), strict=True)
    ]
    for rank, model in enumerate(models):
        loss_of(model, rank, 0).backward()
    with pytest.raises(DisagreementError, match="moments must be the same on all ranks, got local on rank 0 and"):
        world.run([optimizer.rounds() for optimizer in optimizers])


def test_state_loaded_on_one_rank_alone_is_refused():
    """It would wait for an average that the others do not make."""
    ranks = sharing(2, moments=LOSSLESS)
    ranks.run(range(4))
    state = {key: value for key, value in ranks.optimizers[1].state_dict().items() if key != "mpicomp"}
    ranks.optimizers[1].load_state_dict(state)
    with pytest.raises(
        DisagreementError, match=r"moments are averaged next, must be the same on all ranks, got \[5, 6\]"
    ):
        ranks.step(4)
