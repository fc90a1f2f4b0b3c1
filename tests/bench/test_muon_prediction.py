"""Predicted seconds of a step of LocalMuon: the cost model's exchange, and steps that are timed without one."""

import time

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

import torch
from mpicomp.bench.measure.probe import predict_exchange
from mpicomp.bench.replica import Replica
from mpicomp.bench.tasks import get_task
from mpicomp.bench.training_run import predict_muon

from mpicomp.compressors import get_compressor
from mpicomp.cost import CostModel, Network
from mpicomp.transport import LocalWorld

HOSTS, LATENCY_S, BYTES_PER_S = 4, 2e-3, 50e6 / 8
ALONE_S = 0.25


@pytest.fixture
def links():
    """Return a rank of four hosts with links of 50 Mbit/s, and the cost model of these."""
    model = CostModel(Network(HOSTS))
    model.network.set_link("world", LATENCY_S, 1 / BYTES_PER_S, 0.1)
    return LocalWorld(HOSTS, hosts=HOSTS, network=lambda task, group: 0.0).transports[0], model


def two_phase_by_hand(numel):
    """Return the seconds of signs and a magnitude of 1024 each, to the owners of a quarter and from them."""
    quarter_bytes = numel / 4 * (1 / 8 + 4 / 1024)
    to_owners = 3 * LATENCY_S + 3 * quarter_bytes / BYTES_PER_S
    from_owners = 2 * LATENCY_S + 3 * quarter_bytes / BYTES_PER_S  # by recursive doubling
    return to_owners + from_owners


@pytest.mark.parametrize("numel", [38_282, 3_062_208])
def test_one_bit_takes_what_its_bytes_take(links, numel):
    predicted_s = predict_exchange(get_compressor("onebit"), "two-phase", numel, *links)
    assert predicted_s == pytest.approx(two_phase_by_hand(numel), abs=6 * 64 / BYTES_PER_S)  # with headers


def test_prediction_leaves_the_cost_model_as_it_was(links):
    before = links[1].to_json()
    predict_exchange(get_compressor("onebit"), "two-phase", 1000, *links)
    assert links[1].to_json() == before


def test_muon_step_has_a_tenth_of_an_exchange(links, monkeypatch):
    monkeypatch.setattr(Replica, "time_without_exchange", lambda *_: ALONE_S)
    transport, model = links
    replica = Replica(get_task("digits", 0), transport.group, 1)
    expected_s = ALONE_S + two_phase_by_hand(replica.numel) / 10
    assert predict_muon(replica, transport, model) == pytest.approx(expected_s, rel=1e-4)


def test_muon_is_not_timed_where_its_exchange_cannot_pay(links, monkeypatch):
    monkeypatch.setattr(Replica, "time_without_exchange", lambda *_: pytest.fail("it was timed"))
    transport, model = links
    replica = Replica(get_task("digits", 0), transport.group, 1)
    assert predict_muon(replica, transport, model, two_phase_by_hand(replica.numel) / 11) is None


@pytest.mark.parametrize(
    "layers",
    [[torch.nn.Linear(3, 2)], [torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)]],
    ids=["no matrix", "an embedding"],
)
def test_model_that_muon_hardly_steps_has_no_prediction(links, monkeypatch, layers):
    monkeypatch.setattr(Replica, "time_without_exchange", lambda *_: pytest.fail("it was timed"))
    transport, model = links
    task = get_task("digits", 0)
    monkeypatch.setattr(type(task), "model", lambda _: torch.nn.Sequential(*layers))
    assert predict_muon(Replica(task, transport.group, 1), transport, model) is None


def test_timed_steps_leave_the_first_one_out(monkeypatch):
    transport = LocalWorld(1).transports[0]
    replica, seconds = Replica(get_task("digits", 0), transport.group, 1), iter([0.3] + [0.02] * 5)
    monkeypatch.setattr(replica, "step", lambda *_: time.sleep(next(seconds)))
    assert 0.02 <= replica.time_without_exchange(transport) < 0.1
    assert not list(seconds)
