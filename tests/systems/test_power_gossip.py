"""PowerGossip around optimizers: local steps, then models that come nearer to their neighbours'."""

import copy

import numpy as np
import pytest

import mpicomp
from mpicomp.errors import ConfigurationError, DisagreementError, NonFiniteError, UnknownNameError
from mpicomp.rounds import make_graph
from mpicomp.transport import LocalWorld

torch = pytest.importorskip("torch")

from local_replicas import TRUTH, Replicas, values  # noqa: E402

from mpicomp.systems.optimizers.power_gossip import PowerGossip  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(9, 12), torch.nn.Tanh(), torch.nn.Linear(12, 7)).double()


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)


def loss_of(model, rank, step):
    """Of a batch of one rank; each rank sees a part of the space of inputs alone."""
    inputs = np.random.default_rng([rank, step]).normal(size=(6, 9)) * (np.arange(9) % 3 != rank % 3)
    return (model(torch.from_numpy(inputs)) - torch.from_numpy(inputs @ TRUTH)).square().mean()


class Ranks(Replicas):
    def __init__(self, size, graph="ring", make=network, base=sgd, **settings):
        self.loss, self.world = loss_of, LocalWorld(size)
        self.models = [make(rank) for rank in range(size)]
        self.optimizers = [
            PowerGossip(base(model), graph, comm=end, **settings)
            for model, end in zip(self.models, self.world.transports, strict=True)
        ]

    def step(self, number=None):
        """Step on the losses of a number, or with gradients as they are."""
        return self.exchange() if number is None else super().step(number)

    def values(self):
        return np.array(super().values())


def distance(models):
    return np.linalg.norm(models - models.mean(axis=0))


@pytest.mark.parametrize(("size", "graph"), [(2, "ring"), (4, "torus"), (3, [(0, 1), (1, 2)])], ids=str)
def test_a_step_is_the_local_one_and_then_the_exchange(size, graph):
    ranks = Ranks(size, graph, rank=2)
    alone = [copy.deepcopy(model) for model in ranks.models]
    optimizers = [sgd(model) for model in alone]
    for number in range(4):
        for rank, (item, model) in enumerate(zip(alone, ranks.models, strict=True)):
            item.load_state_dict(model.state_dict())
            optimizers[rank].zero_grad()
            loss_of(item, rank, number).backward()
            optimizers[rank].step()
        ranks.step(number)
        local, exchanged = np.array([values(model) for model in alone]), ranks.values()
        np.testing.assert_allclose(exchanged.sum(axis=0), local.sum(axis=0), atol=1e-12)
        assert distance(exchanged) < distance(local)
        # What has one dimension is averaged plainly.
        biases = np.array([model[0].bias.detach().numpy() for model in alone])
        edges = make_graph(graph, size)
        for rank, model in enumerate(ranks.models):
            expected = biases[rank].copy()
            for other in edges.neighbours(rank):
                expected += edges.weight(rank, other) * (biases[other] - biases[rank])
            np.testing.assert_allclose(model[0].bias.detach(), expected, rtol=1e-12)


def test_more_iterations_and_a_smaller_rate():
    once, thrice, slow = Ranks(3), Ranks(3, iterations=3), Ranks(3, rate=0.5)
    for ranks in (once, thrice, slow):
        ranks.step()
    for _ in range(2):
        once.step()
    np.testing.assert_allclose(once.values(), thrice.values(), rtol=1e-12)
    assert [len(ranks.world.transports[0].log) for ranks in (once, thrice, slow)] == [4, 4, 2]  # agreement, exchanges
    start = np.array([values(network(rank)) for rank in range(3)])
    fast = Ranks(3)
    fast.step()
    np.testing.assert_allclose(slow.values() - start, 0.5 * (fast.values() - start), atol=1e-13)


@pytest.mark.parametrize(
    "base", [sgd, lambda model: torch.optim.Adam(model.parameters(), lr=0.02)], ids=["sgd", "adam"]
)
def test_ranks_learn_from_each_other(base):
    """No rank alone sees all inputs; connected their models come to the truth on all of them."""
    inputs = torch.from_numpy(np.random.default_rng(5).normal(size=(200, 9)))
    truth = torch.from_numpy(inputs.numpy() @ TRUTH)

    def make(seed):
        torch.manual_seed(seed)
        return torch.nn.Linear(9, 7, bias=False).double()

    connected, alone = Ranks(3, make=make, base=base, rank=2), Ranks(1, make=make, base=base)
    for number in range(400):
        connected.step(number)
        alone.step(number)
    errors = [(model(inputs) - truth).square().mean().item() for model in [*connected.models, *alone.models]]
    assert max(errors[:3]) < 0.05
    assert errors[3] > 1
    assert distance(connected.values()) < 0.3


def test_it_is_an_optimizer_like_the_one_it_was_made_of():
    model = network()
    inner = sgd(model)
    optimizer = PowerGossip(inner, comm=LocalWorld(1).transports[0])
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "GossipingSGD"
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    plain = network()
    expected = sgd(plain)

    def closure(trained=model, of=optimizer):
        of.zero_grad()
        loss = loss_of(trained, 0, 0)
        loss.backward()
        return loss

    for _ in range(3):
        assert optimizer.step(closure) == expected.step(lambda: closure(plain, expected))
        scheduler.step()
        for group in expected.param_groups:
            group["lr"] *= 0.5
    np.testing.assert_array_equal(values(model), values(plain))
    assert optimizer.param_groups[0]["lr"] == 0.1 / 8
    assert optimizer.transport.log == [] or all(entry.sent_bytes == 0 for entry in optimizer.transport.log)
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_and_parameters_that_stay(dtype):
    def make(seed):
        model = network(seed).to(dtype)
        model[0].bias.requires_grad_(False)
        return model

    ranks = Ranks(2, make=make, base=lambda model: torch.optim.SGD(model.parameters(), lr=0.0))
    before, kept = ranks.values(), [model[0].bias.clone() for model in ranks.models]
    for _ in range(60):
        ranks.step()
    after = ranks.values()
    where = np.ones(after.shape[1], bool)
    where[9 * 12 : 9 * 12 + 12] = False
    eps = torch.finfo(dtype).eps
    assert distance(after[:, where]) < max(1e-3, 10 * eps) * distance(before[:, where])
    np.testing.assert_allclose(after.sum(axis=0), before.sum(axis=0), atol=100 * eps)
    for model, bias in zip(ranks.models, kept, strict=True):
        assert torch.equal(model[0].bias, bias)


def test_going_on_from_a_state(tmp_path):
    ranks = Ranks(3)
    for number in range(3):
        ranks.step(number)
    states = [
        copy.deepcopy((m.state_dict(), o.state_dict())) for m, o in zip(ranks.models, ranks.optimizers, strict=True)
    ]
    torch.save(states[0][1], tmp_path / "state")
    states[0] = states[0][0], torch.load(tmp_path / "state", weights_only=False)
    resumed = Ranks(3, make=lambda seed: network(seed + 50))
    for model, optimizer, (item, state) in zip(resumed.models, resumed.optimizers, states, strict=True):
        model.load_state_dict(item)
        optimizer.load_state_dict(state)
        assert optimizer.state_dict()["mpicomp"]["turn"] == 3
    for number in range(3, 6):
        ranks.step(number)
        resumed.step(number)
    np.testing.assert_array_equal(ranks.values(), resumed.values())
    # On another graph it begins with new vectors; all ranks do.
    other = Ranks(3, [(0, 1), (1, 2)])
    for optimizer, (_, state) in zip(other.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    before = other.values()
    other.step()
    assert other.optimizers[0].state_dict()["mpicomp"]["turn"] == 1
    assert distance(other.values()) < distance(before)
    # A plain optimizer's state has none.
    other.optimizers[0].load_state_dict(sgd(network()).state_dict())
    assert other.optimizers[0].state_dict()["mpicomp"] == {}


def test_rank_that_goes_on_differs_from_one_that_begins():
    ranks = Ranks(2)
    ranks.step(0)
    states = [optimizer.state_dict() for optimizer in ranks.optimizers]
    fresh = Ranks(2)
    fresh.optimizers[1].load_state_dict(states[1])
    with pytest.raises(
        DisagreementError, match="PowerGossip: turn must be the same on all ranks, got 0 on rank 0 and 1"
    ):
        fresh.step()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rank": 2}, "rank must be the same on all ranks, got 1 on rank 0 and 2 on rank 1"),
        (
            {"graph": [(0, 1), (1, 2)]},
            r"graph must be the same on all ranks, got \[\[0, 1\], \[0, 2\], \[1, 2\]\] on rank 0",
        ),
        ({"seed": 5}, "seed must be the same on all ranks"),
    ],
)
def test_ranks_that_were_given_different_things(change, text):
    world = LocalWorld(3)
    optimizers = [
        PowerGossip(sgd(network()), comm=end, **(change if end is world.transports[1] else {}))
        for end in world.transports
    ]
    with pytest.raises(DisagreementError, match=f"PowerGossip: {text}"):
        world.run([optimizer.rounds() for optimizer in optimizers])


def test_ranks_with_other_models():
    world = LocalWorld(2)
    models = [torch.nn.Linear(4, 3), torch.nn.Linear(4, 5)]
    optimizers = [PowerGossip(sgd(model), comm=end) for model, end in zip(models, world.transports, strict=True)]
    with pytest.raises(DisagreementError, match="'0' must have the same shape on all ranks"):
        world.run([optimizer.rounds() for optimizer in optimizers])


def test_parameters_that_come_later():
    ranks = Ranks(2)
    ranks.step(0)
    added = [torch.nn.Parameter(torch.full((3,), float(rank))) for rank in range(2)]
    for optimizer, parameter in zip(ranks.optimizers, added, strict=True):
        optimizer.add_param_group({"params": [parameter]})
    ranks.step(1)
    assert [parameter.tolist() for parameter in added] == [[0.5] * 3] * 2


def test_a_model_that_is_not_finite():
    ranks = Ranks(3)
    ranks.step(0)
    ranks.models[2][0].weight.data[1, 1] = torch.nan
    before = ranks.values()
    with pytest.raises(NonFiniteError, match="or that of its neighbor 2 holds NaN"):
        ranks.step()
    assert np.isfinite(before[:2]).all()
    assert np.isfinite(ranks.values()[:2]).all()


def alone(optimizer=None, **settings):
    return PowerGossip(optimizer or sgd(network()), comm=LocalWorld(4).transports[0], **settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"graph": [(0, 1), (2, 3)]}, "graph: rank 2 of 4 cannot be reached"),
        ({"graph": [(0, 4)]}, "graph: there are ranks 0 to 3"),
        ({"graph": [(0, 0)]}, "graph: an edge joins two ranks"),
        ({"rank": 0}, "PowerGossip: rank must be an integer of at least 1, got 0"),
        ({"iterations": 1.5}, "PowerGossip: iterations must be an integer of at least 1, got 1.5"),
        ({"rate": 0}, "PowerGossip: rate must be above 0 and at most 1, got 0"),
        ({"rate": 1.1}, "PowerGossip: rate must be above 0 and at most 1"),
    ],
)
def test_settings_that_cannot_be(settings, text):
    with pytest.raises(ConfigurationError, match=text):
        alone(**settings)


def test_what_cannot_be_served():
    with pytest.raises(UnknownNameError, match="did you mean 'torus'"):
        alone(graph="torsu")
    with pytest.raises(ConfigurationError, match="a torch optimizer is needed, got Sequential"):
        alone(network())
    optimizer = alone()
    with pytest.raises(ConfigurationError, match="GossipingSGD exchanges already"):
        alone(optimizer)
    model, (end,) = network(), LocalWorld(1).transports
    distributed = mpicomp.torch.DistributedOptimizer(sgd(model), model.named_parameters(), "topk", comm=end)
    with pytest.raises(ConfigurationError, match="DistributedSGD exchanges already"):
        alone(distributed)
    with pytest.raises(ConfigurationError, match="OneBitAdam exchanges already"):
        alone(mpicomp.torch.OneBitAdam(model.parameters(), comm=end))
    odd = torch.nn.Parameter(torch.zeros(3).to(torch.float8_e5m2))
    with pytest.raises(ConfigurationError, match=r"parameter .* is of float8_e5m2"):
        PowerGossip(torch.optim.SGD([odd], lr=0.1), comm=end)
    scaler = torch.amp.GradScaler("cpu")
    scaled = PowerGossip(sgd(model), comm=end)
    scaler.scale(model(torch.ones(1, 9).double()).sum()).backward()
    with pytest.raises(ConfigurationError, match=r"use torch\.autocast with bfloat16"):
        scaler.step(scaled)


@pytest.mark.mpi
@pytest.mark.parametrize("graph", ["ring", "torus", "star"])
def test_over_mpi_it_is_what_it_is_in_one_process(comm, graph):
    edges = [(0, other) for other in range(1, comm.size)] if graph == "star" else graph
    ranks = Ranks(comm.size, edges, rank=2, iterations=2)
    model = network(comm.rank)
    optimizer = PowerGossip(sgd(model), edges, rank=2, iterations=2, comm=comm)
    for number in range(5):
        ranks.step(number)
        optimizer.zero_grad()
        loss_of(model, comm.rank, number).backward()
        optimizer.step()
        np.testing.assert_allclose(values(model), ranks.values()[comm.rank], rtol=1e-9, atol=1e-11)
    assert len(optimizer.transport.log) == (10 + 1 if comm.size > 1 else 1)
    optimizer.close()


@pytest.mark.mpi(min_size=2)
def test_over_mpi_a_bad_graph_is_refused_on_all_ranks(comm):
    with pytest.raises(ConfigurationError, match="cannot be reached"):
        PowerGossip(sgd(network()), [], comm=comm)
