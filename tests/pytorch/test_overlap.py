"""Buckets are exchanged while backward goes on, and scripts that do not allow it are noticed."""

import warnings

import numpy as np
import pytest
import torch
from replicas import Branches, Pair, assert_equal, assert_replicas, batch, descent, distribute, network, square, train

import mpicomp
from mpicomp.errors import ConfigurationError, LaunchError
from mpicomp.mpi.thread import ProgressThread


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, False])
def test_training_equals_one_large_batch(comm, overlap):
    pair = Pair(comm, overlap=overlap)
    pair.run(range(8))
    assert len(pair.optimizer.reducer.last_step.buckets) > 2
    pair.check()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize(
    ("compressor", "collective"),
    [(mpicomp.TopK(ratio=0.1), "allgather"), ("sidco", "star-topk"), ("dense", "ring"), ("randomk", "allreduce"),
     (mpicomp.DGC(0.1, momentum=0.9), "oktopk")],
    ids=str,
)  # fmt: skip
def test_overlap_changes_no_bit(comm, compressor, collective):
    models, residuals = (network(), network()), []
    for model, overlap in zip(models, (False, True), strict=True):
        optimizer = distribute(model, comm, descent(model), compressor, collective, overlap=overlap)
        train(model, optimizer, range(6), comm.rank)
        residuals.append(optimizer.state_dict()["mpicomp"]["residuals"])
    assert_equal(*models)
    assert residuals[0].keys() == residuals[1].keys()
    assert all(np.array_equal(residuals[0][name], residuals[1][name]) for name in residuals[0])


@pytest.mark.mpi(min_size=2, max_size=3)
def test_buckets_are_exchanged_before_backward_ends(comm, monkeypatch):
    jobs, submitted, submit = [], [], ProgressThread.submit
    monkeypatch.setattr(ProgressThread, "submit", lambda thread, *job: jobs.append(job) or submit(thread, *job))
    model = network()
    optimizer = distribute(model, comm)
    train(model, optimizer, [0], comm.rank)
    optimizer.zero_grad()
    jobs.clear()
    # The first layer's gradient comes last.
    model[0].weight.register_post_accumulate_grad_hook(lambda _: submitted.append(len(jobs)))
    square(model, 1, comm.rank).backward()
    assert submitted[0] >= 2  # buckets: the plans of the last step, which repeat, are no job
    optimizer.step()


@pytest.mark.mpi(max_size=3)
def test_order_of_backward_may_differ_between_ranks(comm):
    def loss(model, step, rank):
        return model(batch(step, rank), np.random.default_rng((7, rank, step)).permutation(4)).square().mean()

    pair = Pair(comm, Branches(), loss=loss)
    pair.run(range(6))
    pair.check()


def on_hosts(comm, hosts):
    from mpicomp.mpi.comm import MPITransport  # starts MPI

    return MPITransport(comm, layout=hosts)


def clamp_data(model):
    """Write through ``.data``, of which torch counts no version."""
    for parameter in model.parameters():
        parameter.grad.data.clamp_(-1e-3, 1e-3)


TOO_LATE = {
    "clip": (lambda model, optimizer, rank: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3), 1, "changed"),
    "data": (lambda model, optimizer, rank: clamp_data(model), 0, "changed"),
    "one rank": (lambda model, optimizer, rank: rank == 1 and model[2].weight.grad.mul_(2), 2, "changed.*rank 1"),
    "clear": (lambda model, optimizer, rank: optimizer.zero_grad(), 0, "clear"),
    "backward": (lambda model, optimizer, rank: square(model, 1, rank).backward(), 0, "twice"),
}
ERRORS = {
    "changed": r"was changed between backward\(\) and step\(\), .*synchronize\(\) first",
    "changed.*rank 1": r"was changed between backward\(\) and step\(\), .*synchronize\(\) first.*\(on rank 1\)",
    "clear": r"zero_grad\(\) came between backward\(\) and step",
    "twice": r"backward has filled '4.\w+' twice .* `with optimizer.accumulate\(\)",
}


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(("change", "steps", "error"), TOO_LATE.values(), ids=TOO_LATE)
def test_gradients_changed_during_the_exchange_are_refused(comm, change, steps, error):
    model = network()
    optimizer = distribute(model, comm)
    train(model, optimizer, range(steps), comm.rank)
    optimizer.zero_grad()
    square(model, 9, comm.rank).backward()

    def end():
        change(model, optimizer, comm.rank)
        optimizer.step()

    with pytest.raises(ConfigurationError, match=ERRORS[error]):
        end()
    if steps == 2:
        train(model, optimizer, range(3), comm.rank)
        assert_replicas(model, comm)


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize(
    ("layout", "cores", "wanted", "expected"),
    [
        ("one host", 1.0, None, False),
        ("one host", 1.0, True, True),
        ("one host", 2.0, None, True),
        ("two hosts", 1.0, None, True),
    ],
)
def test_overlap_needs_a_network_or_a_free_core(comm, layout, cores, wanted, expected):
    """On one host rank 1 alone is short of cores: its threads are two more than the others'."""
    hosts = [0] * comm.size if layout == "one host" else [rank % 2 for rank in range(comm.size)]
    transport = on_hosts(comm, hosts)
    transport.cores = cores + 2
    torch.set_num_threads(3 if comm.rank == 1 else 1)
    try:
        model = network()
        optimizer = distribute(model, transport, overlap=wanted)
        assert optimizer.overlaps == (expected and wanted is not None)
        train(model, optimizer, range(3), comm.rank)  # with None the first two are watched
        assert optimizer.overlaps == expected
        assert_replicas(model, comm)
        optimizer.close()
    finally:
        torch.set_num_threads(1)
        transport.close()


@pytest.mark.mpi(min_size=2, max_size=3)
def test_too_low_thread_level_on_some_rank_is_warned_of(comm, monkeypatch):
    from mpicomp.mpi.comm import MPITransport

    def check(self, alone):
        if self.group.rank == 1:
            raise LaunchError("mpi: this MPI provides MPI_THREAD_FUNNELED")

    monkeypatch.setattr(MPITransport, "check_threads", check)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair = Pair(comm)
    assert len(caught) == (comm.rank == 0)
    assert not pair.optimizer.overlaps
    pair.run(range(3))
    pair.check()


def clip(model, optimizer, rank):
    square(model, rank, rank).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def run_backward_twice(model, optimizer, rank):
    square(model, rank, rank).backward()
    square(model, rank + 10, rank).backward()


def skip_a_batch(model, optimizer, rank):
    square(model, rank + 20, rank).backward()
    optimizer.zero_grad()
    square(model, rank, rank).backward()


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize(
    ("script", "seen", "first"),
    [
        (clip, "was changed between", 4),
        (run_backward_twice, "filled a gradient twice", 1),
        (skip_a_batch, "zero_grad() came", 0),
    ],
)
def test_script_that_does_not_allow_overlap_is_served(comm, script, seen, first):
    """On rank 1 alone, and at first in a step that is watched or in one whose exchange has begun."""
    ends = []
    for overlap in (False, None):
        transport = on_hosts(comm, list(range(comm.size)))
        model = network()
        optimizer = distribute(model, transport, compressor=mpicomp.TopK(0.2), collective="allgather", overlap=overlap)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(7):
                optimizer.zero_grad()
                if step >= first and comm.rank == 1:
                    script(model, optimizer, comm.rank + 2 * step)
                else:
                    square(model, comm.rank + 2 * step, comm.rank + 2 * step).backward()
                optimizer.step()
                assert optimizer.overlaps == (overlap is None and 1 <= step < first)
        texts = [str(warning.message) for warning in caught if "from now on" in str(warning.message)]
        assert len(texts) == (overlap is None and comm.rank == 0)
        assert all(seen in text and "seen on rank 1" in text and "To allow it, " in text for text in texts)
        assert_replicas(model, comm)
        ends.append([p.detach().clone() for p in model.parameters()] + [optimizer.reducer.residual("0.weight")])
        optimizer.close()
        transport.close()
    assert all(np.array_equal(a, b) for a, b in zip(*ends, strict=True))
