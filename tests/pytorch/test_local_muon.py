"""LocalMuon: which parameters Muon steps, and its steps and exchanges against the same written in NumPy."""

import copy
import ctypes
import math
import sys
from functools import partial

import numpy as np
import pytest
import torch
from local_replicas import Replicas, bits, exchanges_of, loss_of
from marks import slow
from networks import Link
from torch import nn

from mpicomp.errors import ConfigurationError, DisagreementError
from mpicomp.mpi import LocalWorld
from mpicomp.torch import LocalMuon, Muon
from mpicomp.torch.muon import orthogonalize


@pytest.fixture
def exact_products(monkeypatch):
    """Products in float32, as on processors without those of bfloat16."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)


def hidden(dtype=torch.float64):
    """Two hidden matrices, (10, 9) and (12, 10), and a head."""
    torch.manual_seed(3)
    layers = nn.Linear(9, 10), nn.Tanh(), nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 7)
    return nn.Sequential(*layers).to(dtype)


def images(dtype=torch.float32):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    return model.to(dtype)


def loss_of_images(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(5, 1, 6, 6, generator=generator).to(next(model.parameters()).dtype)
    return nn.functional.cross_entropy(model(inputs).float(), torch.randint(3, (5,), generator=generator))


def ranks_of(size, make=hidden, loss=loss_of, **settings):
    return Replicas(lambda model, end: LocalMuon(model, comm=end, **settings), make, size, loss)


class ByHand:
    """A rank's Muon and AdamW, from their definitions."""

    def __init__(self, model, matrices, lr=0.02, adamw_lr=3e-3, decay=0.1):
        self.values = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
        self.matrices, self.lr, self.adamw_lr, self.decay, self.steps = matrices, lr, adamw_lr, decay, 0
        self.momenta = {name: np.zeros_like(value) for name, value in self.values.items()}
        self.squares = copy.deepcopy(self.momenta)

    def step(self, gradients, scale=1.0):
        self.steps += 1
        for name, gradient in gradients.items():
            value, momentum = self.values[name], self.momenta[name]
            if name in self.matrices:
                momentum += 0.1 * (gradient - momentum)
                update = self.equal_rows(self.orthogonal(0.1 * gradient + 0.9 * momentum))
                rows, columns = update.shape
                value *= 1 - scale * self.lr * self.decay
                value -= scale * self.lr * max(1, rows / columns) ** 0.5 * update
                continue
            momentum += 0.1 * (gradient - momentum)
            self.squares[name] = square = 0.95 * self.squares[name] + 0.05 * gradient**2
            value *= 1 - scale * self.adamw_lr * (self.decay if value.ndim > 1 else 0)
            root = np.sqrt(square / (1 - 0.95**self.steps)) + 1e-8
            value -= scale * self.adamw_lr * momentum / (1 - 0.9**self.steps) / root

    @staticmethod
    def orthogonal(matrix):
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        values = values / (values**4).sum() ** 0.25
        for a, b, c in ((6.9689, -18.2638, 12.1666), (3.0804, -2.6739, 0.6168), (3.0007, -3.3543, 1.184)):
            values = a * values + b * values**3 + c * values**5
        return left * values @ right

    @staticmethod
    def equal_rows(matrix):
        norms = np.array([math.hypot(*row) for row in matrix])
        mean = math.sqrt((norms**2).mean())
        return np.array([row * min(mean / norm, 2) for row, norm in zip(matrix, norms, strict=True)])

    @property
    def flat(self):
        return np.concatenate([value.reshape(-1) for value in self.values.values()])

    @flat.setter
    def flat(self, values):
        place = 0
        for value in self.values.values():
            value.reshape(-1)[:] = values[place : place + value.size]
            place += value.size


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("every", [1, 3])
def test_local_muon_by_hand(size, every):
    """Steps of each rank; one bit and a mean magnitude of change and residual; nothing is lost but a decay.

    The shared parameters move along the mean of what is sent, by the root of the ranks times its length.
    """
    ranks = ranks_of(size, sync_every=every, collective="packed-allgather")
    plain = [ByHand(model, {"0.weight", "2.weight"}) for model in ranks.models]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in ranks.optimizers]
    shared, residuals = plain[0].flat, np.zeros((size, plain[0].flat.size))
    for step in range(3 * every):
        for optimizer in ranks.optimizers:
            optimizer.zero_grad()
        for part in range(2):  # accumulates, and clips
            for rank, model in enumerate(ranks.models):
                loss_of(model, rank, 2 * step + part).backward()
        for model, of_rank in zip(ranks.models, plain, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            of_rank.step({name: p.grad.numpy() for name, p in model.named_parameters()}, 0.9**step)
        ranks.exchange()
        for optimizer, scheduler in zip(ranks.optimizers, schedulers, strict=True):
            if every == 1:
                scheduler.step()
            else:  # as nanoGPT sets its rate
                for group in optimizer.param_groups:
                    group["lr"] = 3e-3 * 0.9 ** (step + 1)
        if (step + 1) % every == 0:
            changes = np.array([of_rank.flat - shared for of_rank in plain])
            accumulated = changes + residuals
            sent = np.abs(accumulated).mean(axis=1, keepdims=True) * np.sign(accumulated)
            moved = (ranks.values()[0] - shared) / np.sqrt(size)
            np.testing.assert_allclose(
                np.sum(ranks.residuals(), axis=0), 0.9 * (accumulated.sum(axis=0) - size * moved), atol=1e-6
            )
            residuals = 0.9 * (accumulated - sent)
            np.testing.assert_allclose(ranks.residuals(), residuals, rtol=1e-4, atol=1e-6)
            shared = shared + np.sqrt(size) * sent.mean(axis=0)
            for of_rank in plain:
                of_rank.flat = shared
            assert ranks.same()
        np.testing.assert_allclose(ranks.values(), [of_rank.flat for of_rank in plain], rtol=1e-4, atol=1e-6)


def conditioned(shape, least):
    """A matrix whose singular values are spread evenly, by magnitude, from ``least`` to 1."""
    generator, short = torch.Generator().manual_seed(0), min(shape)
    left, right = (
        torch.linalg.qr(torch.randn(size, short, generator=generator, dtype=torch.float64))[0] for size in shape
    )
    return left * torch.logspace(math.log10(least), 0, short, dtype=torch.float64) @ right.T


@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (16, 16), (12, 40), (100, 30), (96, 96)], ids=str)
@pytest.mark.parametrize("least", [0.05, 1e-4])
@pytest.mark.parametrize(("products", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.04)])
def test_orthogonal_matrix_has_the_same_singular_vectors(shape, least, products, tolerance, monkeypatch):
    """Two equal matrices and one of a hundred thousandth; singular values of at least 0.05 end at 0.7 to 1.2."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: products == "bfloat16", raising=False)
    matrix = conditioned(shape, least)
    expected = torch.from_numpy(ByHand.orthogonal(matrix.numpy()))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    large = values >= 0.05
    for made in orthogonalize(torch.stack([scale * matrix for scale in (1.0, 1.0, 1e-5)]).float()).double():
        error = left.T[large] @ (made - expected) @ right.T[:, large]
        assert error.norm() < tolerance * expected.norm()
        of_vectors = (left.T @ made @ right.T).diagonal()
        assert of_vectors[large].min() > 0.7 - tolerance
        assert of_vectors.max() < 1.2 + tolerance


def test_rows_have_one_norm_and_fade_without_gradients():
    """Row 0 has no more gradients after the first step: its updates shrink with its momentum, others do not."""
    parameter = nn.Parameter(torch.zeros(60, 30, dtype=torch.float64))
    optimizer = Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.5)
    norms = []
    for step in range(12):
        parameter.grad = torch.randn(60, 30, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        parameter.grad[0] *= step == 0
        before = parameter.detach().clone()
        optimizer.step()
        norms.append((parameter.detach() - before).norm(dim=1))
    others = torch.stack(norms)[:, 1:]
    assert (others.std(dim=1) < 0.02 * others.mean(dim=1)).all()
    assert norms[-1][0] < 0.02 * norms[0][0]


class Tied(nn.Module):
    """A language model whose output is the embedding, and what else has no gradient."""

    def __init__(self, is_tied=True):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(30, 8)
        self.pos_embed = nn.Parameter(torch.zeros(5, 8))
        self.expand, self.norm, self.contract = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.output = nn.Linear(8, 30, bias=False)
        self.counts = nn.Parameter(torch.ones(3, 4, dtype=torch.int64), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(1, 8))
        if is_tied:
            self.output.weight = self.table.weight


def mlp(**layers):
    return nn.ModuleDict(layers)


MUON = {
    "tied": (Tied, ["expand.weight", "contract.weight"]),
    "head by shape": (lambda: Tied(is_tied=False), ["expand.weight", "contract.weight"]),
    "convolutions": (images, ["0.weight", "2.weight"]),
    "head by name": (
        lambda: mlp(a=nn.Linear(4, 6), lm_head=nn.Linear(6, 4), b=nn.Linear(6, 6)),
        ["a.weight", "b.weight"],
    ),
    "recurrent": (lambda: mlp(lstm=nn.LSTM(4, 6), out=nn.Linear(6, 5)), ["lstm.weight_ih_l0", "lstm.weight_hh_l0"]),
    "complex": (lambda: mlp(a=nn.Bilinear(4, 6, 3, dtype=torch.cfloat), b=nn.Linear(4, 4)), ["b.weight"]),
}


@pytest.mark.parametrize("case", MUON)
@pytest.mark.parametrize("by", ["model", "names"])
def test_rule_leaves_embeddings_and_heads_to_adamw(case, by):
    make, expected = MUON[case]
    model = make()
    named = dict(model.named_parameters())
    if by == "names" and "table.weight" in named:
        named["token_embedding.weight"] = named.pop("table.weight")
    argument = (
        model if by == "model" else iter([*named.items(), *([("again", model.table.weight)] if case == "tied" else [])])
    )
    optimizer = LocalMuon(argument, comm=LocalWorld(1).transports[0])
    muon, adamw = optimizer.optimizers
    chosen = {id(parameter) for group in muon.param_groups for parameter in group["params"]}
    assert [name for name, parameter in model.named_parameters() if id(parameter) in chosen] == expected
    decays = {p.ndim > 1: group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    assert decays in ({True: 0.1, False: 0.0}, {False: 0.0})


def test_named_matrices_are_those_of_muon():
    model = hidden()
    names = {"4.weight"}
    optimizer = LocalMuon(model, 0.1, adamw_lr=0.2, weight_decay=0.3, matrices=names, comm=LocalWorld(1).transports[0])
    of_muon, matrices, vectors = optimizer.param_groups
    assert of_muon["params"] == [model[4].weight]
    assert (of_muon["lr"] * of_muon["lr_ratio"], of_muon["lr"], matrices["lr"], vectors["lr"]) == (0.1, 0.2, 0.2, 0.2)
    assert (of_muon["weight_decay"], matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.3, 0.0)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("make", "loss"),
    [(lambda: images(torch.bfloat16), loss_of_images), (lambda: hidden(torch.float32), loss_of)],
    ids=["bfloat16 convolutions", "float32"],
)
def test_ranks_have_the_same_bits_and_learn(make, loss, size):
    ranks = ranks_of(size, make, loss, sync_every=2, lr=0.1, adamw_lr=0.03)
    losses = ranks.run([0, 1] * 8)
    assert ranks.same()
    assert np.mean(losses[-2:]) < 0.9 * np.mean(losses[:2])


PASSED_ON = [
    {"sync_every": 4, "compare_every": 1},
    {"sync_every": 2, "outer": {"lr": 0.7, "momentum": 0.6}, "feedback_decay": 0.95},
    {"sync_every": 3, "compressor": {"id": "topk", "ratio": 0.1}, "nonfinite": "skip"},
]


@pytest.mark.parametrize("settings", PASSED_ON, ids=str)
def test_resumed_run_has_the_same_bits(settings):
    """In the middle of an interval, with every setting of UpdateOptimizer."""
    ranks, others = ranks_of(2, **settings), ranks_of(2, **settings)
    ranks.run(range(7))
    states = ranks.states()
    ranks.run(range(7, 13))
    others.load(states)
    others.run(range(7, 13))
    assert others.bits() == ranks.bits()
    ranks.world.run([optimizer.synchronizing() for optimizer in ranks.optimizers])
    assert ranks.same()


def chosen(rate, compute_s, size=4, **settings):
    """Return the steps before each exchange of LocalMuon, and its bits, on links of so many bits a second."""
    make = partial(LocalMuon, sync_every="auto", **settings)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    exchanges = exchanges_of(lambda model, end: make(model, comm=end), model, Link(50e-6, rate), compute_s, 100, size)
    return [(steps, record.compressor.get("bits", 32)) for steps, record in exchanges], exchanges[-1][1].reason


@pytest.mark.parametrize("size", [2, slow(3), slow(4)])
def test_slow_links_have_more_steps_and_fewer_bits(size):
    """An exchange of 8,385 parameters in one bit takes about 1.1 kB, in dense 34 kB."""
    by_rate = {rate: chosen(rate, 0.01, size)[0] for rate in (2e5, 2e6, 1e9, 1e11)}
    assert {choices[0] for choices in by_rate.values()} == {(1, 1)}  # until a step was timed
    steps, bits = zip(*(choices[-1] for choices in by_rate.values()), strict=True)
    assert list(steps) == sorted(steps, reverse=True)
    assert steps[0] >= 20 > steps[1] > 1 == steps[2]
    assert list(bits) == sorted(bits)
    assert bits[0] == 1 < bits[2]
    assert bits[3] >= 4  # dense, but where its messages one after the other take longer


@pytest.mark.parametrize("penalty", [0.0, 0.05, 0.2, 0.5])
def test_steps_apart_take_the_least_seconds_to_a_loss(penalty):
    """Of one bit: on links as slow as these more bits take longer than they save."""
    choices, reason = chosen(2e6, 0.01, policy={"id": "interval", "penalty": penalty})
    exchange_s = 2 * 2 * 3 * (50e-6 + 275 * 8 / 2e6) / 2  # three messages of a quarter to owners, as many from them
    seconds, factor = {1: 0.01 + exchange_s}, 1.0
    for doublings in (1, 2, 3, 4, 5):
        factor *= 1 + penalty
        seconds[2**doublings] = (0.01 + exchange_s / 2**doublings) * factor
    nearest = min(seconds, key=lambda steps: abs(steps - choices[-1][0]))
    assert choices[-1][1] == 1
    assert seconds[nearest] <= 1.08 * min(seconds.values())
    assert (choices[-1][0] == 1) == (penalty == 0.5)
    assert "more steps to a loss are assumed" in reason


BAD = [
    (lambda: nn.Linear(9, 7), {}, "no parameter of 2 is a hidden matrix, which Muon is for"),
    (lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), {}, "no parameter of 3 is a hidden matrix"),
    (lambda: mlp(a=nn.Embedding(9, 4, sparse=True)), {}, "'a' has sparse=True, and AdamW takes dense gradients"),
    (nn.LazyLinear, {}, "parameter 'weight' has no shape yet"),
    (hidden, {"matrices": ["0.weight", "1.weight"]}, "matrices has '1.weight', which is not among the 6"),
    (hidden, {"matrices": ["0.bias"]}, r"Muon: parameters must be real .* got one that is of shape \(10,\)"),
    (lambda: mlp(a=nn.Bilinear(4, 6, 3, dtype=torch.cfloat)), {"matrices": ["a.weight"]}, "got one that is complex"),
    (hidden, {"lr": -1.0}, "LocalMuon: lr must be at least 0, got -1.0"),
    (hidden, {"adamw_lr": 0}, "adamw_lr must be above 0, since that of Muon is kept as a ratio"),
    (hidden, {"adamw_lr": float("nan")}, "LocalMuon: adamw_lr must be at least 0, got nan"),
    (lambda: [nn.Parameter(torch.ones(3, 3))], {}, "got a parameter without a name"),
]


@pytest.mark.parametrize(("make", "settings", "match"), BAD, ids=[match for _, _, match in BAD])
def test_bad_input_is_refused(make, settings, match):
    with pytest.raises(ConfigurationError, match=match):
        LocalMuon(make(8) if make is nn.LazyLinear else make(), comm=LocalWorld(1).transports[0], **settings)


def test_rank_with_other_matrices_is_refused():
    world, models = LocalWorld(2), [hidden(), hidden()]
    optimizers = [
        LocalMuon(model, comm=end, sync_every=1, matrices=["2.weight"] if rank else None)
        for rank, (model, end) in enumerate(zip(models, world.transports, strict=True))
    ]
    for rank, model in enumerate(models):
        loss_of(model, rank, 0).backward()
    with pytest.raises(DisagreementError, match="the number of elements in group 0 must be the same on all ranks"):
        world.run([optimizer.rounds() for optimizer in optimizers])


def held_bytes():
    """Memory of this process that is no file's, once what was freed was returned."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and returns memory as glibc does")
def test_shared_values_and_residual_are_the_only_copies():
    """Beyond parameters, gradients and momentum, and the scratch and messages of a bucket of 32 MiB."""
    size, numel = 4, 30 * 2048 * 256
    torch.manual_seed(0)
    layers = [nn.Linear(*shape, bias=False) for shape in [(2048, 256), (256, 2048)] * 15]
    ranks = Replicas(
        lambda model, end: LocalMuon(
            model, matrices=[name for name, _ in model.named_parameters()], sync_every=1, comm=end,
            collective="two-phase",
        ),
        lambda: copy.deepcopy(nn.Sequential(*layers)),
        size,
    )  # fmt: skip
    before = held_bytes() - 4 * numel * size  # the shared values are there
    for _ in range(2):
        for model in ranks.models:
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
        ranks.exchange()
    copies = (held_bytes() - before) / (4 * numel * size)
    assert 2 < copies - 2 < 2.2  # but for gradients and momentum


@pytest.mark.mpi
def test_ranks_choose_the_same_steps_and_bits(comm):
    model = hidden(torch.float32)
    with LocalMuon(model, comm=comm, sync_every="auto") as optimizer:
        for step in range(30):
            optimizer.zero_grad()
            loss_of(model, comm.rank, step).backward()
            optimizer.step()
        optimizer.synchronize()
        record = optimizer.reducer.last_step.buckets[0]
        assert len(set(comm.allgather((optimizer.sync_every, str(record.compressor), record.reason)))) == 1
        assert len(set(comm.allgather(bits(model)))) == 1
        assert (" local steps of " in record.reason) == (comm.size > 1)
