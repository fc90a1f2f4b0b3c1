"""UpdateOptimizer: local steps, whose changes are averaged, against the same made by hand."""

import copy
import json

import numpy as np
import oracle
import pytest
import scipy.fft
from networks import Link

import mpicomp
from mpicomp.checkpoint import load_rounds, save_rounds
from mpicomp.compressors import compressor_class
from mpicomp.errors import ConfigurationError, DisagreementError, NonFiniteError
from mpicomp.transport import LocalWorld

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


TRUTH = np.random.default_rng(11).normal(size=(9, 7))


def network(dtype=torch.float64):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(9, 12), torch.nn.Tanh(), torch.nn.Linear(12, 7)).to(dtype)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model, rank, step):
    inputs = np.random.default_rng([rank, step]).normal(size=(6, 9))
    dtype = next(model.parameters()).dtype
    return (model(torch.from_numpy(inputs).to(dtype)) - torch.from_numpy(inputs @ TRUTH).to(dtype)).square().mean()


def values(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).double().numpy()


def bits(model):
    return b"".join(parameter.detach().view(torch.uint8).numpy().tobytes() for parameter in model.parameters())


class Ranks:
    def __init__(self, size, base=adam, make=network, **settings):
        settings = {"warmup": 0} | settings
        self.world = LocalWorld(size)
        self.models = [make() for _ in range(size)]
        self.optimizers = [
            mpicomp.torch.UpdateOptimizer(base(model), model.named_parameters(), comm=end, **settings)
            for model, end in zip(self.models, self.world.transports, strict=True)
        ]

    def backward(self, number):
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()

    def exchange(self):
        return self.world.run([optimizer.rounds() for optimizer in self.optimizers])

    def step(self, number):
        self.backward(number)
        return self.exchange()

    def values(self):
        return [values(model) for model in self.models]

    def residuals(self):
        return [
            np.concatenate([own.reducer.residual(name).reshape(-1) for name in own.shared()]).astype(np.float64)
            for own in self.optimizers
        ]


class ByHand:
    """The same with plain optimizers: each rank's model begins at the shared parameters and makes some steps."""

    def __init__(self, size, base=adam, make=network):
        self.models = [make() for _ in range(size)]
        self.optimizers = [base(model) for model in self.models]
        self.shared = values(self.models[0])

    def step(self, number):
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            optimizer.step()

    def changes(self):
        return [values(model) - self.shared for model in self.models]

    def set(self, rank, flat):
        place = 0
        with torch.no_grad():
            for parameter in self.models[rank].parameters():
                part = torch.from_numpy(flat[place : place + parameter.numel()])
                parameter.copy_(part.view(parameter.shape))
                place += parameter.numel()

    def set_all(self, flat):
        self.shared = flat
        for rank in range(len(self.models)):
            self.set(rank, flat)


@pytest.mark.parametrize("base", [adam, sgd])
def test_alone_it_is_the_optimizer_itself(base):
    ranks, plain = Ranks(1, base), ByHand(1, base)
    for number in range(5):
        ranks.step(number)
        plain.step(number)
    np.testing.assert_allclose(ranks.values()[0], values(plain.models[0]), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("every", [1, 3])
def test_the_shared_parameters_move_by_the_mean_change(every):
    ranks, plain = Ranks(3, compressor="dense", every=every), ByHand(3)
    for number in range(2 * every):
        ranks.step(number)
        plain.step(number)
        if (number + 1) % every == 0:
            plain.set_all(plain.shared + np.mean(plain.changes(), axis=0))
        for own, other in zip(ranks.values(), [values(model) for model in plain.models], strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-10, atol=1e-12)
    assert len({bits(model) for model in ranks.models}) == 1


def test_with_plain_descent_it_is_the_exchange_of_gradients():
    ranks = Ranks(2, sgd, compressor="dense")
    world, models = LocalWorld(2), [network(), network()]
    reducers = [mpicomp.Reducer("dense", comm=end) for end in world.transports]
    for number in range(4):
        ranks.step(number)
        for rank, model in enumerate(models):
            model.zero_grad()
            loss_of(model, rank, number).backward()
        given = [{name: own.grad for name, own in model.named_parameters()} for model in models]
        means = world.run([own.rounds(grads) for own, grads in zip(reducers, given, strict=True)])
        with torch.no_grad():
            for model, mean in zip(models, means, strict=True):
                for name, own in model.named_parameters():
                    own.sub_(0.1 * mean[name])
    np.testing.assert_allclose(ranks.values()[1], values(models[1]), rtol=1e-10)


@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_nothing_is_lost(size, decay):
    """Over all ranks: change + decay x residual = what the shared parameters moved by, and the residual after."""
    ranks, plain = Ranks(size, compressor="topk", feedback_decay=decay, every=2), ByHand(size)
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
    and name not in ("lgc", "fetchsgd")  # which have steps of their own, below
]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor_leaves_the_same_bits(name, size):
    ranks = Ranks(size, compressor=name, make=lambda: network(torch.float32))
    start = ranks.values()[0]
    for number in range(3):
        ranks.step(number)
        assert len({bits(model) for model in ranks.models}) == 1
    assert np.isfinite(ranks.values()[0]).all()
    assert (ranks.values()[0] != start).any()


@pytest.mark.parametrize(
    "outer", [{"lr": 0.7, "momentum": 0.9, "nesterov": True}, {"lr": 0.5}, {"lr": 0.8, "momentum": 0.5}], ids=str
)
def test_an_outer_optimizer(outer):
    """DiLoCo by hand: Nesterov's momentum as Sutskever's form has it in torch, of the mean change."""
    ranks, plain = Ranks(2, compressor="dense", every=3, outer=outer), ByHand(2)
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


def largest_of_chunks(array, chunk, ratio):
    """The array with zeros where it is not among the largest of its chunk, by the definition."""
    chosen = np.zeros(array.size)
    for start in range(0, array.size, chunk):
        part = array[start : start + chunk]
        for place in oracle.largest(part, oracle.kept(ratio, part.size)):
            chosen[start + place] = part[place]
    return chosen


def test_sparseloco():
    """Arxiv 2508.15706 by hand: residuals decay, chunks are selected from, and the mean is over ranks, not senders."""
    settings = {"compressor": {"id": "chunktopk", "ratio": 0.1, "chunk": 16}, "feedback_decay": 0.95}
    ranks = Ranks(3, make=matrix, every=4, outer={"lr": 0.8}, **settings)
    plain, residuals = ByHand(3, make=matrix), np.zeros((3, 63))
    for number in range(12):
        ranks.step(number)
        plain.step(number)
        if number % 4 == 3:
            residuals = 0.95 * residuals + plain.changes()
            sent = np.array([largest_of_chunks(own, 16, 0.1) for own in residuals])
            residuals -= sent
            plain.set_all(plain.shared + 0.8 * sent.mean(axis=0))
            np.testing.assert_allclose(ranks.values()[0], plain.shared, rtol=1e-9, atol=1e-12)
    assert len({bits(model) for model in ranks.models}) == 1


def test_sparseloco_with_two_bits_an_element_comes_as_far():
    """Rounded values of a decaying residual: nothing grows, and the loss falls as it does with values as they are."""
    losses = []
    for wire in (None, "q2"):
        compressor = {"id": "chunktopk", "ratio": 0.1, "chunk": 16, "wire": wire}
        ranks = Ranks(2, make=matrix, every=4, outer={"lr": 0.8}, compressor=compressor, feedback_decay=0.95)
        before = loss_of(ranks.models[0], 0, 10**6).item()
        for number in range(200):
            ranks.step(number)
        losses.append(loss_of(ranks.models[0], 0, 10**6).item() / before)
    assert max(losses) < 0.3
    assert losses[1] < 2 * losses[0]


def test_demo():
    """Arxiv 2411.19870 by hand: momentum that decays, coefficients of 2 x 2 elements, a step along their signs."""

    def transformed(array, transform):
        whole = transform(array[:60].reshape(15, 2, 2), axes=(1, 2), norm="ortho").reshape(-1)
        return np.concatenate([whole, transform(array[60:62], norm="ortho"), array[62:]])

    ranks = Ranks(
        3,
        sgd,
        make=matrix,
        compressor={"id": "dcttopk", "ratio": 0.5, "side": 2},
        feedback_decay=0.999,
        outer={"sign": True, "lr": 0.5},
    )
    plain, memory = ByHand(3, sgd, make=matrix), np.zeros((3, 63))
    for number in range(8):
        ranks.step(number)
        plain.step(number)
        memory = 0.999 * memory + plain.changes()  # changes are -lr g
        coefficients = [transformed(own, scipy.fft.dctn) for own in memory]
        chosen = np.array([largest_of_chunks(own, 4, 0.5) for own in coefficients])
        memory -= [transformed(own, scipy.fft.idctn) for own in chosen]
        sign = np.sign(transformed(chosen.mean(axis=0), scipy.fft.idctn))
        plain.set_all(plain.shared + 0.5 * 0.1 * sign)  # times the rate of the inner optimizer
        np.testing.assert_allclose(ranks.values()[0], plain.shared, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("every", "late"), [(1, 1), (3, 2), (3, 3)])
def test_an_outcome_that_comes_late(every, late):
    """What is exchanged after a step is taken up some steps later; what a rank has done since stays."""
    ranks, plain = Ranks(2, compressor="dense", every=every, late=late), ByHand(2)
    changes, began = None, None
    for number in range(4 * every):
        ranks.step(number)
        plain.step(number)
        steps = number + 1
        if changes is not None and steps == began + late:
            since = [values(model) - plain.shared - own for model, own in zip(plain.models, changes, strict=True)]
            plain.shared = plain.shared + np.mean(changes, axis=0)
            for rank, own in enumerate(since):
                plain.set(rank, plain.shared + own)
            changes = None
        if steps % every == 0:
            changes, began = plain.changes(), steps
        for own, model in zip(ranks.values(), plain.models, strict=True):
            np.testing.assert_allclose(own, values(model), rtol=1e-9, atol=1e-12)
    with pytest.raises(ConfigurationError, match=r"an exchange is under way; call synchronize\(\)"):
        ranks.optimizers[0].state_dict()
    ranks.world.run([own.synchronizing() for own in ranks.optimizers])
    assert len({bits(model) for model in ranks.models}) == 1
    expected = plain.shared + np.mean(changes, axis=0)
    expected += np.mean([own - change for own, change in zip(plain.changes(), changes, strict=True)], axis=0)
    np.testing.assert_allclose(ranks.values()[0], expected, rtol=1e-9, atol=1e-12)


def chosen_steps(rate, compute_s, steps=240):
    """Run some steps, each of which takes a rank so long, on links of a rate; return the steps between exchanges."""
    world = LocalWorld(4, True, 4, Link(50e-6, rate))
    torch.manual_seed(0)
    start, truth = torch.nn.Linear(64, 64, bias=False), torch.randn(64, 64)
    models = [copy.deepcopy(start) for _ in range(4)]
    optimizers = [
        mpicomp.torch.UpdateOptimizer(adam(model), model.named_parameters(), every="auto", comm=end)
        for model, end in zip(models, world.transports, strict=True)
    ]
    seen, since = [], 0
    for number in range(steps):
        for rank, (model, optimizer, end) in enumerate(zip(models, optimizers, world.transports, strict=True)):
            optimizer.zero_grad()
            inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * number + rank))
            (model(inputs) - inputs @ truth).square().mean().backward()
            end.seconds += compute_s
        every = {optimizer.every for optimizer in optimizers}
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


def test_a_chosen_number_of_steps_is_resumed():
    def make():
        world = LocalWorld(2, True, 2, Link(50e-6, 2e6))
        models = [network() for _ in range(2)]
        own = [
            mpicomp.torch.UpdateOptimizer(adam(model), model.named_parameters(), every="auto", comm=end)
            for model, end in zip(models, world.transports, strict=True)
        ]
        return world, models, own

    world, models, optimizers = make()
    optimizers[0]._mpicomp_every = optimizers[1]._mpicomp_every = 4
    for number in range(2):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
        world.run([optimizer.rounds() for optimizer in optimizers])
    again, models_again, optimizers_again = make()
    for here, there, own, other in zip(models, models_again, optimizers, optimizers_again, strict=True):
        there.load_state_dict(here.state_dict())
        other.load_state_dict(copy.deepcopy(own.state_dict()))
    assert [own.every for own in optimizers_again] == [4, 4]
    same = []
    for number in range(2, 4):
        for rank, (model, optimizer) in enumerate(zip(models_again, optimizers_again, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
        again.run([optimizer.rounds() for optimizer in optimizers_again])
        same.append(bits(models_again[0]) == bits(models_again[1]))
    assert same == [False, True]


def test_fragments_are_exchanged_at_different_steps():
    ranks = Ranks(2, compressor="dense", every=4, fragments=2)
    first, second = (set(own.values) for own in ranks.optimizers[0]._mpicomp_parts)
    assert (first, second) == ({"0.weight"}, {"0.bias", "2.weight", "2.bias"})  # of 211 elements 108 and 103
    same = []
    for number in range(8):
        ranks.step(number)
        left, right = (dict(model.named_parameters()) for model in ranks.models)
        same.append({name for name in left if torch.equal(left[name], right[name])})
    assert same == [set(), second, set(), first, set(), second, set(), first]
    assert len(ranks.optimizers[0].reducers) == 2


def save(ranks):
    kept = [
        (copy.deepcopy(model.state_dict()), copy.deepcopy(own.state_dict()))
        for model, own in zip(ranks.models, ranks.optimizers, strict=True)
    ]
    json.dumps(kept[0][1]["mpicomp"]["parts"][0]["reducer"]["policy"])
    return kept


@pytest.mark.parametrize("after", [4, 5])
@pytest.mark.parametrize(
    "settings",
    [
        {"compressor": "topk", "outer": {"lr": 0.7, "momentum": 0.9}, "feedback_decay": 0.95},
        {"compressor": "qsgd"},
        {"compressor": "dense", "fragments": 2},
    ],
    ids=str,
)
def test_a_run_that_is_resumed_is_the_same(settings, after):
    ranks = Ranks(2, every=2, **settings)
    for number in range(after):
        ranks.step(number)
    kept = save(ranks)
    again = Ranks(2, every=2, **settings)
    for model, own, (parameters, state) in zip(again.models, again.optimizers, kept, strict=True):
        own.load_state_dict(state)
        model.load_state_dict(parameters)
    for number in range(after, after + 5):
        ranks.step(number)
        again.step(number)
        assert [bits(model) for model in ranks.models] == [bits(model) for model in again.models]


def test_a_checkpoint_goes_on_with_other_ranks(tmp_path):
    ranks = Ranks(4, compressor="topk")
    for number in range(3):
        ranks.step(number)
    owed = np.mean(ranks.residuals(), axis=0)
    states = [{"model": model, "optimizer": optimizer} for model, optimizer in save(ranks)]
    ranks.world.run(
        [save_rounds(tmp_path, state, 1, end.group) for state, end in zip(states, ranks.world.transports, strict=True)]
    )
    fewer = Ranks(2, compressor="topk")
    loaded = fewer.world.run([load_rounds(tmp_path, end.group) for end in fewer.world.transports])
    for model, own, state in zip(fewer.models, fewer.optimizers, loaded, strict=True):
        model.load_state_dict(state["model"])
        own.load_state_dict(state["optimizer"])
    np.testing.assert_allclose(fewer.values()[0], ranks.values()[0])
    np.testing.assert_allclose(np.mean(fewer.residuals(), axis=0), owed, atol=1e-12)
    fewer.step(3)
    assert len({bits(model) for model in fewer.models}) == 1


def test_what_a_script_writes_on_all_ranks_is_taken_over():
    ranks = Ranks(2, compressor="topk")
    for number in range(3):
        if number == 2:
            for model in ranks.models:
                with torch.no_grad():
                    model[0].weight.data.mul_(0.5)  # torch counts no version of that
                    model[2].bias.zero_()
            before = values(ranks.models[0])
        ranks.step(number)
    shared = ranks.optimizers[0].shared()
    assert torch.equal(shared["0.weight"], ranks.models[0][0].weight)
    assert len({bits(model) for model in ranks.models}) == 1
    # It was not sent as a change, of which topk selects one element.
    assert (values(ranks.models[0]) != before).sum() <= 2 * 4


def test_what_is_written_on_one_rank_is_refused_on_all():
    ranks = Ranks(3)
    ranks.step(0)
    with torch.no_grad():
        ranks.models[2][0].bias.add_(1)
    with pytest.raises(DisagreementError, match=r"parameter '0.bias' has other values on rank 2 .* on all ranks alike"):
        ranks.step(1)


def test_other_parameters_at_the_start_are_refused():
    ranks = Ranks(2)
    with torch.no_grad():
        ranks.models[1][0].bias.add_(1)
    with pytest.raises(DisagreementError, match="has other values on rank 1"):
        ranks.step(0)


@pytest.mark.parametrize("settings", [{"every": 2}, {"outer": {"lr": 0.5}}], ids=str)
def test_other_settings_are_refused(settings):
    world, models = LocalWorld(2), [network(), network()]
    own = [
        mpicomp.torch.UpdateOptimizer(adam(model), model.named_parameters(), comm=end, **({} if rank else settings))
        for rank, (model, end) in enumerate(zip(models, world.transports, strict=True))
    ]
    for rank, model in enumerate(models):
        loss_of(model, rank, 0).backward()
    if settings == {"every": 2}:
        assert list(own[0].rounds()) == []  # nothing is exchanged in its first step
    with pytest.raises(DisagreementError, match=f"{next(iter(settings))} must be the same on all ranks"):
        world.run([optimizer.rounds() for optimizer in own])


def test_gradients_that_are_not_finite_raise_on_all_ranks():
    ranks = Ranks(3)
    ranks.step(0)
    before = ranks.values()
    ranks.backward(1)
    ranks.models[1][0].weight.grad[0, 0] = torch.nan
    with pytest.raises(NonFiniteError):
        ranks.exchange()
    np.testing.assert_array_equal(ranks.values(), before)  # nothing was delivered


def test_a_rank_leaves_out_a_step_that_is_not_finite():
    ranks, plain = Ranks(2, nonfinite="skip", compressor="dense"), ByHand(2)
    for number in range(4):
        ranks.backward(number)
        if number == 1:
            ranks.models[0][0].weight.grad[0, 0] = torch.inf
        ranks.exchange()
        assert ranks.models[0][0].weight.grad is not None
        for rank, (model, optimizer) in enumerate(zip(plain.models, plain.optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            if (number, rank) != (1, 0):
                optimizer.step()
        plain.set_all(plain.shared + np.mean(plain.changes(), axis=0))
    np.testing.assert_allclose(ranks.values()[0], plain.shared, rtol=1e-9, atol=1e-12)


def test_a_grad_scaler_of_each_rank():
    """A loss that overflows on one rank leaves out that rank's step alone; scales may differ then."""
    make = lambda: network(torch.float32)  # noqa: E731
    ranks, plain = Ranks(2, compressor="dense", make=make), ByHand(2, make=make)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    for number in range(3):
        exchanges = []
        for rank, (model, own, scaler) in enumerate(zip(ranks.models, ranks.optimizers, scalers, strict=True)):
            own.zero_grad()
            loss = loss_of(model, rank, number) * (torch.inf if (number, rank) == (1, 1) else 1)
            scaler.scale(loss).backward()
            if number == 2:
                scaler.unscale_(own)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            own._mpicomp_exchanges = False
            scaler.step(own)
            own._mpicomp_exchanges = True
            scaler.update()
            exchanges.append(own._mpicomp_rounds())
        ranks.world.run(exchanges)
        for rank, (model, optimizer) in enumerate(zip(plain.models, plain.optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            if (number, rank) != (1, 1):
                optimizer.step()
        plain.set_all((plain.shared + np.mean(plain.changes(), axis=0)).astype(np.float32).astype(np.float64))
    assert [scaler.get_scale() for scaler in scalers] == [2.0**10, 2.0**9]
    np.testing.assert_allclose(ranks.values()[0], plain.shared, rtol=2e-4, atol=1e-5)


def test_16_bit_parameters_are_shared_in_32():
    """Steps that are too small for 16 bits add up in the shared parameters."""
    ranks = Ranks(2, lambda model: torch.optim.SGD(model.parameters(), lr=1e-3), lambda: network(torch.bfloat16))
    for number in range(6):
        ranks.step(number)
        assert len({bits(model) for model in ranks.models}) == 1
    shared = ranks.optimizers[0].shared()
    assert {own.dtype for own in shared.values()} == {torch.float32}
    for name, own in ranks.models[0].named_parameters():
        assert torch.equal(own, shared[name].to(torch.bfloat16))


def test_parameters_that_are_frozen_later_and_thawed():
    ranks = Ranks(2, compressor="dense")
    ranks.step(0)
    for model in ranks.models:
        model[0].weight.requires_grad_(False)
    frozen = ranks.models[0][0].weight.clone()
    for number in (1, 2):
        ranks.step(number)
    assert torch.equal(ranks.models[0][0].weight, frozen)
    for model in ranks.models:
        model[0].weight.requires_grad_(True)
    ranks.step(3)
    assert not torch.equal(ranks.models[0][0].weight, frozen)
    assert len({bits(model) for model in ranks.models}) == 1


def test_sparse_gradients_and_closures():
    def make():
        torch.manual_seed(0)
        return torch.nn.Embedding(20, 4, sparse=True)

    ranks = Ranks(2, lambda model: torch.optim.SparseAdam(model.parameters(), lr=0.1), make, compressor="dense")
    before = ranks.values()[0]
    for rank, model in enumerate(ranks.models):
        model(torch.tensor([rank, 5])).sum().backward()
    ranks.exchange()
    moved = (ranks.values()[0] != before).reshape(20, 4).any(axis=1)
    assert np.flatnonzero(moved).tolist() == [0, 1, 5]

    world, models = LocalWorld(2), [network(), network()]
    own = [
        mpicomp.torch.UpdateOptimizer(
            torch.optim.LBFGS(model.parameters(), max_iter=4), model.named_parameters(), comm=end
        )
        for model, end in zip(models, world.transports, strict=True)
    ]

    def closure_of(rank):
        def closure():
            own[rank].zero_grad()
            loss = loss_of(models[rank], 0, 0)
            loss.backward()
            return loss

        return closure

    losses = [world.run([own[rank].rounds(closure_of(rank)) for rank in range(2)])[0].item() for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    assert bits(models[0]) == bits(models[1])


def test_added_groups_and_schedulers():
    ranks = Ranks(2, lambda model: torch.optim.SGD(model[0].parameters(), lr=0.1), compressor="dense")
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(own, 0.5) for own in ranks.optimizers]
    ranks.step(0)
    for model, own, scheduler in zip(ranks.models, ranks.optimizers, schedulers, strict=True):
        own.add_param_group({"params": list(model[2].parameters())})
        scheduler.step()
    assert ranks.optimizers[0].param_groups[0]["lr"] == 0.05
    before = ranks.models[0][2].weight.clone()
    ranks.step(1)
    assert not torch.equal(ranks.models[0][2].weight, before)
    assert ranks.optimizers[0].reducer.last_step.lr == 0.05
    with pytest.raises(ConfigurationError, match="a parameter of the new group has no name"):
        ranks.optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"every": 0}, "every must be a whole number of at least 1, got 0"),
        ({"late": 2}, r"late must be at most every // fragments = 1"),
        ({"fragments": 2}, "fragments must be at most every=1, got 2"),
        ({"fragments": 5, "every": 8}, "fragments must be at most 4, as many as parameters"),
        ({"every": "often"}, "every must be a whole number of at least 1, or 'auto', got 'often'"),
        ({"every": "auto", "late": 1}, "every='auto' chooses anew after each exchange"),
        ({"every": "auto", "compressor": "topk"}, "is chosen by policy='auto', got policy='static'"),
        ({"outer": {"rate": 1}}, "outer must have some of lr, momentum"),
        ({"outer": {"sign": 1.0}}, r"outer\['sign'\] must be True or False, got 1.0"),
        ({"outer": {"sign": True, "momentum": 0.9}}, "outer has momentum and takes the sign of changes"),
        ({"outer": {"lr": -1}}, "outer: Invalid learning rate"),
        ({"outer": 0.7}, "outer must have some of"),
        ({"compressor": {"id": "dgc", "momentum": 0.9}}, "applies momentum to gradients"),
        ({"feedback_decay": 1.5, "compressor": "topk"}, "feedback_decay must be above 0 and at most 1, got 1.5"),
        ({"feedback_decay": 0.9, "compressor": "dense"}, "has no residual to act on, since dense runs without"),
    ],
)
def test_settings_that_cannot_be(settings, match):
    with pytest.raises(ConfigurationError, match=match):
        Ranks(1, **settings)


def test_what_cannot_be_wrapped():
    model = network()
    alone = LocalWorld(1).transports[0]
    own = mpicomp.torch.UpdateOptimizer(adam(model), model.named_parameters(), comm=alone)
    with pytest.raises(ConfigurationError, match="exchanges already"):
        mpicomp.torch.UpdateOptimizer(own, model.named_parameters(), comm=alone)
    with pytest.raises(ConfigurationError, match="exchanges by itself"):
        mpicomp.torch.DistributedOptimizer(own, model.named_parameters(), comm=alone)
    with pytest.raises(ConfigurationError, match="neither copied nor pickled"):
        copy.deepcopy(own)
    with pytest.raises(ConfigurationError, match="a torch optimizer is needed, got str"):
        mpicomp.torch.UpdateOptimizer("adam", model.named_parameters(), comm=alone)
    own.close()
    own.close()
    again = mpicomp.torch.UpdateOptimizer(own, model.named_parameters(), comm=alone)
    loss_of(model, 0, 0).backward()
    again.step()


def test_states_of_other_models_are_refused():
    ranks = Ranks(1)
    ranks.step(0)
    state = ranks.optimizers[0].state_dict()
    other = mpicomp.torch.UpdateOptimizer(
        torch.optim.AdamW((model := torch.nn.Linear(2, 2)).parameters()),
        model.named_parameters(),
        comm=LocalWorld(1).transports[0],
    )
    with pytest.raises(ConfigurationError, match="the state is of another model: parameter 'weight'"):
        other.load_state_dict(state)
    fragments = Ranks(1, fragments=2, every=2).optimizers[0]
    with pytest.raises(ConfigurationError, match="the state has 1 fragments and the optimizer 2"):
        fragments.load_state_dict(state)
    plain = adam(network()).state_dict()
    ranks.optimizers[0].load_state_dict(plain)  # a plain optimizer's goes on with the model's parameters
