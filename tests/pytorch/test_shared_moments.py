"""Second moments that ranks share, against optimizers of all ranks written down in NumPy."""

import copy

import numpy as np
import pytest
from marks import slow

import mpicomp
from mpicomp.checkpoint import load_rounds, save_rounds
from mpicomp.errors import ConfigurationError, DisagreementError, NonFiniteError
from mpicomp.transport import LocalWorld

torch = pytest.importorskip("torch")

torch.set_num_threads(1)

TRUTH = np.random.default_rng(11).normal(size=(5, 3))
LOSSLESS = {"compressor": "dense"}


def network(dtype=torch.float64):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).to(dtype)


def adamw(model, **settings):
    """Groups of other decays, and one of the two with weight decay."""
    groups = [
        {"params": model[0].parameters(), "betas": (0.9, 0.9), "weight_decay": 0.1},
        {"params": model[2].parameters(), "betas": (0.8, 0.99), "weight_decay": 0.0, "eps": 1e-6},
    ]
    return torch.optim.AdamW(groups, lr=0.02, **settings)


def loss_of(model, rank, step):
    inputs = np.random.default_rng([rank, step]).normal(size=(4, 5))
    dtype = next(model.parameters()).dtype
    loss = (model(torch.from_numpy(inputs).to(dtype)) - torch.from_numpy(inputs @ TRUTH).to(dtype)).square().mean()
    return loss * (50 if (rank, step) == (0, 5) else 1)  # a burst on one rank


class Ranks:
    def __init__(self, size, base=adamw, make=network, moments=LOSSLESS, **settings):
        self.world = LocalWorld(size)
        self.models = [make() for _ in range(size)]
        settings = {"warmup": 0, "compressor": "dense"} | settings
        self.optimizers = [
            mpicomp.torch.UpdateOptimizer(
                base(model), model.named_parameters(), comm=end, second_moments=moments, **settings
            )
            for model, end in zip(self.models, self.world.transports, strict=True)
        ]

    def backward(self, step):
        for rank, (model, own) in enumerate(zip(self.models, self.optimizers, strict=True)):
            own.zero_grad()
            loss_of(model, rank, step).backward()

    def exchange(self):
        self.world.run([own.rounds() for own in self.optimizers])

    def step(self, number):
        self.backward(number)
        self.exchange()

    def values(self):
        return [values(model) for model in self.models]

    def bits(self):
        return [
            b"".join(own.detach().view(torch.uint8).numpy().tobytes() for own in m.parameters()) for m in self.models
        ]


def values(model):
    return torch.cat([own.detach().reshape(-1) for own in model.parameters()]).double().numpy()


class InNumPy:
    """All ranks' optimizers with flat arrays, by the definition.

    ``squares``: each rank's own second moments; ``divided_by``: those that stand in its optimizer.
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
            for own in self.model.parameters():
                own.copy_(torch.from_numpy(self.ranks[rank][place : place + own.numel()]).view(own.shape))
                place += own.numel()
        self.model.zero_grad()
        loss_of(self.model, rank, step).backward()
        return torch.cat([own.grad.reshape(-1) for own in self.model.parameters()]).numpy()

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
            mean = self.places + np.mean([own - self.places for own in self.ranks], axis=0)
            self.places = mean
            self.ranks = [mean.copy() for _ in self.ranks]
            if self.steps >= self.due:
                pairs = zip(self.squares, self.made, strict=True)
                self.held = np.mean([own / (1 - self.decay**made) for own, made in pairs], axis=0)
                self.divided_by = [self.expected(rank) for rank in range(len(self.ranks))]
                self.due = self.steps + min(self.most, max(1, self.steps // 2))


SIZES = [36, 21]  # elements in each group


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
def test_ranks_divide_by_what_they_have_averaged(size, every, most):
    ranks = Ranks(size, sync_every=every, moments=LOSSLESS | {"sync_every": most})
    plain = InNumPy(size, adamw_by_hand, by_element(0.9, 0.99), every, most)
    for number in range(13):
        ranks.step(number)
        plain.step(number)
        for own, other in zip(ranks.values(), plain.ranks, strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-9, atol=1e-11)
    assert plain.bursts
    assert len(set(ranks.bits())) == (1 if 13 % every == 0 else size)
    own = Ranks(size, sync_every=every, moments="local")
    for number in range(13):
        own.step(number)
    assert np.abs(own.values()[0] - ranks.values()[0]).max() > 1e-3  # it makes a difference


def test_shared_in_each_step_they_are_those_of_the_mean_square():
    """Then no rank's burst is left over: Adam's recurrence with the mean over ranks of gradients' squares."""
    ranks = Ranks(3, lambda model: torch.optim.Adam(model.parameters(), lr=0.01), moments=LOSSLESS | {"sync_every": 1})
    moment = np.zeros(57)
    for number in range(8):
        ranks.backward(number)
        squares = [
            torch.cat([own.grad.reshape(-1) for own in model.parameters()]).square().numpy() for model in ranks.models
        ]
        ranks.exchange()
        moment = 0.999 * moment + 0.001 * np.mean(squares, axis=0)
        for model, own in zip(ranks.models, ranks.optimizers, strict=True):
            states = [own.state[parameter]["exp_avg_sq"].reshape(-1) for parameter in model.parameters()]
            np.testing.assert_allclose(torch.cat(states).numpy(), moment, rtol=1e-9)


def test_alone_it_is_the_optimizer_itself():
    ranks, model = Ranks(1, moments="shared"), network()
    plain = adamw(model)
    for number in range(8):
        ranks.step(number)
        plain.zero_grad()
        loss_of(model, 0, number).backward()
        plain.step()
    np.testing.assert_allclose(ranks.values()[0], values(model), rtol=1e-12, atol=1e-13)


def test_of_rmsprop():
    base = lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, alpha=0.9)  # noqa: E731
    ranks = Ranks(3, base, moments=LOSSLESS | {"sync_every": 4})
    plain = InNumPy(3, rmsprop_by_hand, by_element(0.9, 0.9), 1, 4)
    for number in range(12):
        ranks.step(number)
        plain.step(number)
    np.testing.assert_allclose(ranks.values()[0], plain.places, rtol=1e-8, atol=1e-10)


def test_a_rank_that_leaves_out_a_step_has_its_own_count():
    ranks = Ranks(2, nonfinite="skip", moments=LOSSLESS | {"sync_every": 2})
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
def test_other_optimizers_in_few_bits(kind, dtype):
    """As powers of two, too, and twice rounded, averages are nearly the same, and bits on all ranks."""
    held = []
    for moments in (LOSSLESS, "shared"):
        ranks = Ranks(4, lambda model: kind(model.parameters(), lr=0.003), lambda: network(dtype), moments)
        for number in range(3):
            ranks.step(number)
            assert len(set(ranks.bits())) == 1
        states = [own.state_dict()["mpicomp"]["fragments"][0]["second_moments"]["held"] for own in ranks.optimizers]
        assert all(torch.equal(states[0][name], other[name]) for other in states for name in other)
        held.append(np.concatenate([own.reshape(-1).numpy() for own in states[0].values()]))
    exact, rounded = held
    assert (exact > 0).all()
    ratios = rounded / exact
    assert 0.2 < ratios.min() < 0.9
    assert ratios.max() < 4
    assert abs(ratios.mean() - 1) < 0.15


def test_bytes_are_in_the_record():
    size, numel, bytes_of = 4, 57, []
    ranks = Ranks(size, moments="shared", make=lambda: network(torch.float32), compare_every=0)
    for number in range(14):
        ranks.step(number)
        bytes_of.append([own.reducer.last_step.wire_bytes for own in ranks.optimizers])
    plain = Ranks(size, moments="local", make=lambda: network(torch.float32), compare_every=0)
    for number in range(14):
        plain.step(number)
    without = plain.optimizers[0].reducer.last_step.wire_bytes
    averaged = [number + 1 for number, own in enumerate(bytes_of) if own[0] > without]
    assert averaged == [1, 2, 3, 4, 6, 9, 13]
    # Two rounds of signs in words of 64 and exponents, of a quarter of the elements, to and from three others; headers.
    part = 8 + 8 * -(-numel // size // 8)
    assert 0 < bytes_of[12][0] - without - 2 * (size - 1) * part < 2 * (size - 1) * 80


def test_a_moment_of_one_rank_alone_counts_as_its_share():
    """Of a parameter that has had a gradient on one rank of two."""
    ranks = Ranks(2, lambda model: torch.optim.Adam(model.parameters(), lr=0.01))
    ranks.backward(0)
    ranks.models[1][0].weight.grad = None
    square = ranks.models[0][0].weight.grad.square()
    ranks.exchange()
    state = ranks.optimizers[0].state[ranks.models[0][0].weight]
    torch.testing.assert_close(state["exp_avg_sq"], 0.001 * square / 2)
    ranks.step(1)
    assert len(set(ranks.bits())) == 1


@pytest.mark.parametrize(
    "settings", [{"sync_every": 2}, {"sync_every": 4, "fragments": 2, "sync_delay": 1}, {"sync_every": "auto"}], ids=str
)
def test_a_run_that_is_resumed_is_the_same(settings):
    def make():
        return Ranks(
            2, moments="shared", make=lambda: network(torch.float32), policy="auto", compressor=None, **settings
        )

    ranks, again = make(), make()
    for number in range(7):
        ranks.step(number)
    if settings.get("sync_delay"):
        ranks.world.run([own.synchronizing() for own in ranks.optimizers])
    for one, other in zip(ranks.models, again.models, strict=True):
        other.load_state_dict(one.state_dict())
    for one, other in zip(ranks.optimizers, again.optimizers, strict=True):
        other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert again.bits() == ranks.bits()
    for number in range(7, 16):
        ranks.step(number)
        again.step(number)
        assert again.bits() == ranks.bits()


def test_a_checkpoint_goes_on_with_other_ranks(tmp_path):
    ranks = Ranks(4, moments="shared", compressor="topk")
    for number in range(6):
        ranks.step(number)
    states = [
        {"model": model.state_dict(), "optimizer": own.state_dict()}
        for model, own in zip(ranks.models, ranks.optimizers, strict=True)
    ]
    ranks.world.run(
        [save_rounds(tmp_path, state, 1, end.group) for state, end in zip(states, ranks.world.transports, strict=True)]
    )
    fewer = Ranks(2, moments="shared", compressor="topk")
    loaded = fewer.world.run([load_rounds(tmp_path, end.group) for end in fewer.world.transports])
    for model, own, state in zip(fewer.models, fewer.optimizers, loaded, strict=True):
        model.load_state_dict(state["model"])
        own.load_state_dict(state["optimizer"])
    before = states[0]["optimizer"]["mpicomp"]["fragments"][0]["second_moments"]
    for own in fewer.optimizers:
        moments = own.state_dict()["mpicomp"]["fragments"][0]["second_moments"]
        assert (moments["steps"], moments["next"]) == (before["steps"], before["next"]) == (6, 9)
        assert all(torch.equal(moments["held"][name], held) for name, held in before["held"].items())
    for number in range(6, 10):
        fewer.step(number)
        assert len(set(fewer.bits())) == 1


def test_a_plain_optimizers_state_is_averaged_at_once_and_back():
    ranks, plain = Ranks(2), [adamw(network()) for _ in range(2)]
    for number in range(3):
        ranks.step(number)
    for own, other in zip(ranks.optimizers, plain, strict=True):
        other.load_state_dict({key: value for key, value in own.state_dict().items() if key != "mpicomp"})
    after = Ranks(2)
    for own, model, other in zip(after.optimizers, after.models, plain, strict=True):
        own.load_state_dict(other.state_dict())
        model.load_state_dict(ranks.models[0].state_dict())
    after.step(3)
    first, second = (own.state_dict()["mpicomp"]["fragments"][0]["second_moments"]["held"] for own in after.optimizers)
    assert set(first) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_nothing_is_taken_up_of_an_exchange_that_is_undone():
    ranks = Ranks(2)
    ranks.step(0)
    before = copy.deepcopy(ranks.optimizers[0].state_dict()["mpicomp"]["fragments"][0]["second_moments"]["held"])
    ranks.backward(1)
    ranks.models[1][0].weight.grad[0, 0] = torch.inf
    with pytest.raises(NonFiniteError):
        ranks.exchange()
    after = ranks.optimizers[0].state_dict()["mpicomp"]["fragments"][0]["second_moments"]["held"]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_squares_that_overflow_leave_out_the_step():
    """A gradient that is finite and whose square is not."""
    ranks = Ranks(2, nonfinite="skip", make=lambda: network(torch.float32))
    ranks.step(0)
    before = ranks.values()[0]
    ranks.backward(1)
    ranks.models[1][0].weight.grad[0, 0] = 1e25
    ranks.exchange()
    assert ranks.optimizers[0].reducer.last_step.skipped
    np.testing.assert_array_equal(ranks.values(), [before, before])


def test_groups_that_are_added_and_parameters_that_are_frozen():
    ranks = Ranks(2, lambda model: torch.optim.Adam(model[0].parameters(), lr=0.01), moments="shared")
    ranks.step(0)
    for model, own in zip(ranks.models, ranks.optimizers, strict=True):
        own.add_param_group({"params": list(model[2].parameters()), "betas": (0.9, 0.9)})
        model[0].weight.requires_grad_(False)
    for number in range(1, 5):
        ranks.step(number)
        assert len(set(ranks.bits())) == 1
    held = ranks.optimizers[0].state_dict()["mpicomp"]["fragments"][0]["second_moments"]["held"]
    assert set(held) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(own.isfinite().all() for own in held.values())


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
def test_optimizers_that_are_refused(kind, settings, match):
    with pytest.raises(ConfigurationError, match=match):
        Ranks(2, lambda model: kind(model.parameters(), lr=0.01, **settings), moments="shared")


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
def test_settings_that_cannot_be(moments, match):
    with pytest.raises(ConfigurationError, match=match):
        Ranks(1, moments=moments)


def test_ranks_that_share_and_ranks_that_do_not():
    world, models = LocalWorld(2), [network(), network()]
    own = [
        mpicomp.torch.UpdateOptimizer(adamw(model), model.named_parameters(), comm=end, second_moments=moments)
        for model, end, moments in zip(models, world.transports, ("local", "shared"), strict=True)
    ]
    for rank, model in enumerate(models):
        loss_of(model, rank, 0).backward()
    with pytest.raises(DisagreementError, match="moments must be the same on all ranks, got local on rank 0 and"):
        world.run([optimizer.rounds() for optimizer in own])


def test_a_state_that_one_rank_alone_has_loaded():
    """It would wait for an average that the others do not make."""
    ranks = Ranks(2, moments=LOSSLESS)
    for number in range(4):
        ranks.step(number)
    state = {key: value for key, value in ranks.optimizers[1].state_dict().items() if key != "mpicomp"}
    ranks.optimizers[1].load_state_dict(state)
    with pytest.raises(
        DisagreementError, match=r"moments are averaged next, must be the same on all ranks, got \[5, 6\]"
    ):
        ranks.step(4)
