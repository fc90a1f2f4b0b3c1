"""Steps for a trial under the optimizer: parameters, Adam's state and residuals come back, the schedule goes on."""

import copy
import json

import numpy as np
import pytest
from marks import slow
from mpicomp.bench.measure.metrics import MetricsWriter
from mpicomp.bench.measure.progress import Progress
from mpicomp.bench.tasks import get_task

import mpicomp
from mpicomp.errors import ConfigurationError
from mpicomp.policies import get_policy
from mpicomp.transport import LocalWorld

torch = pytest.importorskip("torch")

from mpicomp.bench.training_run import Settings  # noqa: E402
from mpicomp.bench.training_run import train as train_task  # noqa: E402
from replicas import assert_replicas, distribute, network, square  # noqa: E402

from mpicomp.systems.flexible import drive_trials  # noqa: E402

torch.set_num_threads(1)

SEARCH = {"id": "flexible", "as_published": True, "solver": "exact"}


def state_of(model, optimizer):
    """Copies of all that a trial changes, flat."""
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    moments = [copy.deepcopy(optimizer.state[parameter]) for parameter in model.parameters()]
    residuals = [optimizer.reducer.residual(name) for name, _ in model.named_parameters()]
    return parameters, moments, residuals


def same(first, second):
    (parameters, moments, residuals), (others, other_moments, other_residuals) = first, second
    pairs = [*zip(parameters, others, strict=True)]
    for moment, other in zip(moments, other_moments, strict=True):
        assert moment.keys() == other.keys()
        pairs += [(moment[key], other[key]) for key in moment]
    assert len(pairs) > len(parameters) > 0
    return all(torch.equal(*pair) for pair in pairs) and all(
        np.array_equal(*pair) for pair in zip(residuals, other_residuals, strict=True)
    )


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, slow(False)])
def test_what_a_trial_changes_comes_back(comm, overlap):
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = mpicomp.torch.DistributedOptimizer(
        optimizer, model.named_parameters(), policy=SEARCH, comm=comm, overlap=overlap
    )
    driver = drive_trials(optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    kept = None
    for step in range(55):
        optimizer.zero_grad()
        square(model, step, comm.rank).backward()
        optimizer.step()
        driver.after_step()
        schedule.step()
        assert_replicas(model, comm)
        now = state_of(model, optimizer)
        if step == 0:
            kept = now
        elif step in (10, 20, 30, 40, 50):
            assert same(now, kept)
        else:
            assert not same(now, kept)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.99 ** (step + 1))
    assert "of a front of " in optimizer.reducer.last_step.buckets[0].reason
    optimizer.close()


@pytest.mark.mpi(max_size=2)
def test_buffers_of_a_model_that_is_given_come_back(comm):
    model = torch.nn.Sequential(network(), torch.nn.BatchNorm1d(2))
    norm = model[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = mpicomp.torch.DistributedOptimizer(optimizer, model.named_parameters(), policy=SEARCH, comm=comm)
    driver = drive_trials(optimizer, model)
    kept = None
    for step in range(22):
        optimizer.zero_grad()
        square(model, step, comm.rank).backward()
        optimizer.step()
        driver.after_step()
        now = [buffer.clone() for buffer in norm.buffers()]
        if step == 0:
            kept = now
        same = [torch.equal(*pair) for pair in zip(now, kept, strict=True)]
        assert all(same) if step in (0, 10, 20) else not any(same)
    optimizer.close()


@pytest.mark.mpi(max_size=2)
def test_join_with_trials_is_refused(comm):
    optimizer = distribute(network(), comm, policy=SEARCH, compressor=None, collective="auto")
    drive_trials(optimizer)
    with pytest.raises(ConfigurationError, match=r"join: trials of policy 'flexible' would undo"), optimizer.join():
        pass
    optimizer.close()


def train_digits(path, **settings):
    """Train as ``mpicomp train`` does with the published search, on one rank, and return the reasons of its steps."""
    pytest.importorskip("sklearn")
    settings = Settings(None, "auto", get_policy(SEARCH | {"least": 0.05}), 24, 0, probes=False, **settings)
    with MetricsWriter(str(path)) as metrics:
        train_task(get_task("digits", 0), settings, LocalWorld(1).transports[0], Progress(False), metrics)
    return [json.loads(line)["buckets"][0]["reason"] for line in path.read_text().splitlines()]


def test_train_with_the_published_search_makes_its_trials(one_thread, tmp_path):
    reasons = train_digits(tmp_path / "metrics.jsonl")
    assert ["trial" in reason for reason in reasons] == [False] + [True] * 20 + [False] * 3


def test_train_with_the_published_search_and_updates_is_refused(one_thread, tmp_path):
    with pytest.raises(ConfigurationError, match="train: trials of policy 'flexible' undo steps"):
        train_digits(tmp_path / "metrics.jsonl", updates={"sync_every": 1})
