"""The advice that names LocalMuon in a user's script, on simulated links."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from networks import Link

import mpicomp
from mpicomp.torch import muon_advice
from mpicomp.transport import LocalWorld

RANKS, STEPS, SIDE = 4, 104, 128
COMPUTE_S = 0.01


def matrices():
    return torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE, bias=False), torch.nn.Linear(SIDE, SIDE, bias=False))


def embedding():
    return torch.nn.ModuleDict({"emb": torch.nn.Linear(SIDE, 3 * SIDE), "hidden": torch.nn.Linear(SIDE, SIDE)})


@pytest.fixture
def advice(caplog, monkeypatch):
    """Return what is logged in steps with dense gradients, on links of so many bits a second."""

    def logged(rate, make=matrices, products_s=0.0, hosts=RANKS, times=None):
        monkeypatch.setattr(muon_advice, "_products_s", lambda _: products_s)
        world = LocalWorld(RANKS, True, hosts, Link(50e-6, rate))
        parameters = dict(make().named_parameters())
        gradients = {name: np.ones(parameter.shape, np.float32) for name, parameter in parameters.items()}
        reducers = [mpicomp.Reducer("dense", comm=end) for end in world.transports]
        advices = [muon_advice.MuonAdvice(reducer, parameters) for reducer in reducers]
        for _ in range(STEPS):
            for end in world.transports:
                end.seconds += COMPUTE_S
            world.run([reducer.rounds(gradients) for reducer in reducers])
            for reducer, each in zip(reducers, advices, strict=True):
                reducer.policy.step_times = times or reducer.policy.step_times  # of telemetry
                each.consider()
        return [record.getMessage() for record in caplog.records if "LocalMuon" in record.getMessage()]

    return logged


def test_slow_links_are_named_once_with_seconds(advice):
    """A ring sends 1.5 times 131 kB, 0.157 s at 10 Mbit/s; a tenth of one bit's 1.5 times 4.2 kB takes 0.5 ms."""
    [message] = advice(1e7)
    assert "a step takes 0.16" in message
    assert "the exchange adds 0.15" in message
    assert "predicted to take 0.010" in message


def test_kernels_and_waits_of_exchanges_come_less_often(advice):
    """0.457 s of an exchange are 0.157 s of links, and 0.3 s of which a tenth remains."""
    times = SimpleNamespace(are_many=True, compute_s=0.02, exchange_s=0.457, observe=lambda _: None)
    [message] = advice(1e7, times=times)
    assert "a step takes 0.477 s, to which the exchange adds 0.457 s" in message
    assert "predicted to take 0.05" in message


@pytest.mark.parametrize(
    "settings",
    [{"rate": 1e10}, {"rate": 1e7, "products_s": 0.13}, {"rate": 1e7, "make": embedding}, {"rate": 1e7, "hosts": 1}],
    ids=["fast links", "slow products", "mostly an embedding", "one host"],
)
def test_nothing_is_named_where_it_would_not_pay(advice, settings):
    assert advice(**settings) == []


def test_products_of_all_matrices_follow_from_one(monkeypatch):
    """Those of a quarter of the sides take a 64th; columns beyond a square add less. Turns of other ranks count."""
    shapes, clock_s = [], [0.0]

    def orthogonalize(update):
        shapes.append(tuple(update.shape))
        clock_s[0] += 9 if len(shapes) == 1 else 0.01 if len(shapes) < 6 else 0.11  # allocates; runs; waits for a core
        return update

    monkeypatch.setattr(muon_advice, "orthogonalize", orthogonalize)
    monkeypatch.setattr(muon_advice.time, "perf_counter", lambda: clock_s[0])
    seconds = muon_advice._products_s([torch.ones(8, 8), torch.ones(32, 32), torch.ones(16, 2, 4)])
    work = [8 * 8 * 12, 32 * 32 * 48, 8 * 8 * 20]
    assert shapes == [(8, 8)] * 6
    assert seconds == pytest.approx((4 * 0.01 + 0.11) / 5 * sum(work) / work[0])


def test_timing_products_draws_no_random_numbers():
    """What a script draws must not depend on how slow its links are."""
    before = torch.get_rng_state()
    assert muon_advice._products_s([torch.ones(8, 8)]) > 0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.mpi
def test_optimizer_considers_advice_after_each_step(comm, monkeypatch):
    counts = []
    monkeypatch.setattr(muon_advice.MuonAdvice, "consider", lambda self: counts.append(self._reducer.count))
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpicomp.torch.DistributedOptimizer(plain, model, comm=comm, same_batches=True) as optimizer:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    assert counts == [1, 2, 3]
