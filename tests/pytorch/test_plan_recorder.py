"""What ``MPICOMP_PLAN=FILE`` records of a script on one rank."""

import json
import time
from types import SimpleNamespace

import pytest
import torch

import mpicomp.torch
from mpicomp.cost import CostModel, Network
from mpicomp.forecast import Job
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.rounds import Group
from mpicomp.torch import plan_recorder

SLEEP_S = 0.01


class Slow(torch.autograd.Function):
    """Passes gradients on after a while."""

    @staticmethod
    def forward(context, value):
        return value

    @staticmethod
    def backward(context, gradient):
        time.sleep(SLEEP_S)
        return gradient


@pytest.mark.parametrize("compressor", ["dense", "topk"])
def test_record_has_sizes_order_seconds_and_the_ranks_own_gradients(compressor, tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    monkeypatch.setenv("MPICOMP_PLAN", str(path))
    monkeypatch.setattr(plan_recorder, "_kernels", lambda *_: {})
    torch.manual_seed(0)
    first, last = torch.nn.Linear(64, 32, bias=False), torch.nn.Linear(32, 8, bias=False)
    model = torch.nn.Sequential(first, last)
    optimizer = mpicomp.torch.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-4), model, compressor, warmup=0, comm=LocalWorld(1).transports[0]
    )
    signs = torch.randn(16, 64)
    for _ in range(plan_recorder.STEPS):
        optimizer.zero_grad()
        last(Slow.apply(first(signs))).square().mean().backward()
        optimizer.step()
    job = Job.from_json(json.loads(path.read_text()))
    assert job.sizes == [256, 2048]  # in the order of backward
    assert -10 * SLEEP_S < job.ready_s[0] <= -SLEEP_S
    assert job.ready_s[1] == 0
    assert SLEEP_S <= job.compute_s < 10 * SLEEP_S
    assert job.hidden == pytest.approx(2048 / 2304)  # the last layer is a head
    assert (
        min(statistics.signal for statistics in job.statistics) > 0.9
    )  # all batches are the same one, also where few elements were sent


@pytest.mark.parametrize("gbits", [0.001, 1000.0])
def test_advice_is_logged_once_where_links_are_slow(gbits, caplog, monkeypatch):
    monkeypatch.setattr(plan_recorder, "_ADVICE_STEPS", 5)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters())
    network = Network(4)
    network.set_link("world", 1e-6, 8e-9 / gbits, 0.1)
    optimizer.reducer = SimpleNamespace(
        transport=SimpleNamespace(group=Group(0, 4, hosts=4)),
        policy=SimpleNamespace(step_times=SimpleNamespace(compute_s=1e-3 if gbits < 1 else 1.0)),
        cost=CostModel(network),
    )
    plan_recorder.record_plan(optimizer, dict(model.named_parameters()), normalises=True)
    for _ in range(12):
        model(torch.ones(2, 64)).sum().backward()
        time.sleep(0.1 if gbits < 1 else 0.0)
        optimizer.step()
    assert ["LocalMuon" in record.getMessage() for record in caplog.records] == [True] * (gbits < 1)
