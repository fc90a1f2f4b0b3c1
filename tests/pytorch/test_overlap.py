"""Buckets are exchanged while backward goes on, and what must not happen meanwhile is refused."""

import warnings

import numpy as np
import pytest

import mpicomp
from mpicomp.errors import ClosedError, ConfigurationError, DisagreementError, LaunchError

torch = pytest.importorskip("torch")

from replicas import Branches, Reference, assert_replicas, assert_same, batch, distribute, network, sgd, square, train  # noqa: E402

torch.set_num_threads(1)


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, False])
def test_it_is_training_on_one_large_batch(comm, overlap):
    model = network()
    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm, overlap=overlap)
    train(model, optimizer, reference, comm, 8)
    assert len(optimizer.reducer.last_step.buckets) > 2
    assert_same(model, reference)
    assert_replicas(model, comm)
    optimizer.close()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize(
    ("compressor", "collective"),
    [(mpicomp.TopK(ratio=0.1), "allgather"), (mpicomp.TopK(ratio=0.1), "oktopk"), ("sidco", "star-topk"),
     ("dense", "ring"), ("randomk", "allreduce"), (mpicomp.DGC(0.1, momentum=0.9), "gtopk")],
    ids=str,
)  # fmt: skip
def test_overlap_changes_no_bit(comm, compressor, collective):
    runs = []
    for overlap in (False, True):
        model = network()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = distribute(model, comm, plain, compressor, collective, overlap=overlap)
        for step in range(6):
            optimizer.zero_grad()
            square(model, step, comm.rank).backward()
            optimizer.step()
        runs.append((model, optimizer.state_dict()["mpicomp"]["residuals"]))
        optimizer.close()
    (one, kept), (two, also) = runs
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert kept.keys() == also.keys()
    assert all(np.array_equal(kept[name], also[name]) for name in kept)


@pytest.mark.mpi(min_size=2, max_size=3)
def test_buckets_are_under_way_before_backward_ends(comm):
    model = network()
    optimizer = distribute(model, comm)
    overlap = optimizer._mpicomp_gradients._overlap
    square(model, 0, comm.rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    seen = []
    # The first layer's gradient comes last.
    model[0].weight.register_post_accumulate_grad_hook(lambda _: seen.append(len(overlap._stream._jobs)))
    square(model, 1, comm.rank).backward()
    assert seen[0] > 2
    optimizer.step()
    optimizer.close()


@pytest.mark.mpi(max_size=3)
def test_whatever_order_backward_takes_on_each_rank(comm):
    def loss(model, rank, step):
        return model(batch(step, rank), np.random.default_rng((7, rank, step)).permutation(4)).square().mean()

    model = Branches()
    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm)
    for step in range(6):
        optimizer.zero_grad()
        loss(model, comm.rank, step).backward()
        optimizer.step()
        reference.step(lambda m, r, s=step: loss(m, r, s))
    assert_same(model, reference)
    optimizer.close()


@pytest.mark.mpi(min_size=2, max_size=3)
def test_parameters_that_differ_at_the_start(comm):
    model = network()
    if comm.rank == comm.size - 1:
        with torch.no_grad():
            model[2].bias[3] += 1
    optimizer = distribute(model, comm)
    square(model, 0, comm.rank).backward()
    with pytest.raises(DisagreementError, match=rf"'2.bias' has other values on rank {comm.size - 1} than on rank 0"):
        optimizer.step()
    optimizer.close()


@pytest.mark.mpi(min_size=2, max_size=3)
def test_a_second_backward_before_the_step(comm):
    model = network()
    optimizer = distribute(model, comm)
    square(model, 0, comm.rank).backward()
    with pytest.raises(
        ConfigurationError, match=r"backward has come to '4.\w+' twice .* `with optimizer.accumulate\(\)"
    ):
        square(model, 1, comm.rank).backward()
    optimizer.close()


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize("steps", [0, 1])
def test_gradients_that_are_changed_while_they_are_exchanged(comm, steps):
    model = network()
    optimizer = distribute(model, comm)
    for step in range(steps):
        square(model, step, comm.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    square(model, 9, comm.rank).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(
        ConfigurationError, match=r"was changed between backward\(\) and step\(\), .*synchronize\(\) first"
    ):
        optimizer.step()
    optimizer.close()


@pytest.mark.mpi(min_size=2, max_size=3)
def test_zero_grad_while_gradients_are_exchanged(comm):
    model = network()
    optimizer = distribute(model, comm)
    square(model, 0, comm.rank).backward()
    with pytest.raises(ConfigurationError, match=r"zero_grad\(\) came between backward\(\) and step"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.close()


@pytest.mark.mpi(max_size=3)
def test_after_close(comm):
    model = network()
    optimizer = distribute(model, comm)
    square(model, 0, comm.rank).backward()
    optimizer.step()
    optimizer.close()
    optimizer.close()
    square(model, 0, comm.rank).backward()
    with pytest.raises(ClosedError, match="it was closed"):
        optimizer.step()


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize(
    ("layout", "cores", "wanted", "expected"),
    [
        ("one host", 1.0, None, False),
        ("one host", 1.0, True, True),
        ("one host", 2.0, None, True),
        ("one host", 2.0, False, False),
        ("two hosts", 1.0, None, True),
    ],
)
def test_a_thread_is_worth_it_where_something_is_waited_for_or_a_core_is_free(comm, layout, cores, wanted, expected):
    """On one host rank 1 alone is short of cores: its threads are two more than the others'."""
    from mpicomp.transport.mpi import MPITransport

    hosts = [0] * comm.size if layout == "one host" else [rank % 2 for rank in range(comm.size)]
    transport = MPITransport(comm, layout=hosts)
    threads = torch.get_num_threads()
    transport.cores = cores + 2
    torch.set_num_threads(3 if comm.rank == 1 else 1)
    try:
        model = network()
        optimizer = distribute(model, transport, overlap=wanted)
        assert optimizer.overlaps == (expected and wanted is not None)
        for step in range(3):  # where nothing was said the first two are watched
            optimizer.zero_grad()
            square(model, step, comm.rank).backward()
            optimizer.step()
        assert optimizer.overlaps == expected
        assert_replicas(model, comm)
        optimizer.close()
    finally:
        torch.set_num_threads(threads)
        transport.close()


@pytest.mark.mpi(min_size=2, max_size=3)
def test_one_rank_that_asks_for_no_thread_is_enough(comm):
    model = network()
    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm, overlap=comm.rank != 1)
    assert not optimizer.overlaps
    train(model, optimizer, reference, comm, 2)
    assert_same(model, reference)
    optimizer.close()


@pytest.mark.mpi(min_size=2, max_size=3)
def test_a_thread_level_that_is_too_low_on_some_rank(comm, monkeypatch):
    from mpicomp.transport.mpi import MPITransport

    def check(self, alone):
        if self.group.rank == 1:
            raise LaunchError("mpi: this MPI provides MPI_THREAD_FUNNELED")

    monkeypatch.setattr(MPITransport, "check_threads", check)
    model = network()
    reference = Reference(model, sgd, comm.size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = distribute(model, comm)
    assert len(caught) == (comm.rank == 0)
    assert not optimizer.overlaps
    train(model, optimizer, reference, comm, 3)
    assert_same(model, reference)
    optimizer.close()


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


def backward(model, optimizer, rank):
    square(model, rank, rank).backward()


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize(
    ("script", "seen"),
    [(clip, "was changed between"), (run_backward_twice, "to a gradient twice"), (skip_a_batch, "zero_grad() came")],
)
@pytest.mark.parametrize("first", [0, 1, 4])
def test_a_script_that_does_not_allow_overlap_is_exchanged_in_the_step(comm, script, seen, first):
    """On rank 1 alone, and at first in a step that is watched or in one whose exchange has begun."""
    from mpicomp.transport.mpi import MPITransport

    ends = []
    for overlap in (False, None):
        transport = MPITransport(comm, layout=list(range(comm.size)))
        model = network()
        optimizer = distribute(model, transport, compressor=mpicomp.TopK(0.2), collective="allgather", overlap=overlap)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(7):
                optimizer.zero_grad()
                (script if step >= first and comm.rank == 1 else backward)(model, optimizer, comm.rank + 2 * step)
                optimizer.step()
                assert optimizer.overlaps == (overlap is None and 1 <= step < first)
        texts = [str(warning.message) for warning in caught if "from now on" in str(warning.message)]
        assert len(texts) == (overlap is None and comm.rank == 0)
        assert all(seen in text and "seen on rank 1" in text and "would allow it" in text for text in texts)
        assert_replicas(model, comm)
        ends.append([p.detach().clone() for p in model.parameters()] + [optimizer.reducer.residual("0.weight")])
        optimizer.close()
        transport.close()
    assert all(np.array_equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.mpi(min_size=2, max_size=3)
def test_one_rank_that_leaves_overlap_open_has_all_of_them_watched(comm):
    from mpicomp.transport.mpi import MPITransport

    transport = MPITransport(comm, layout=list(range(comm.size)))
    model = network()
    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, transport, overlap=None if comm.rank == 0 else True)
    assert not optimizer.overlaps
    train(model, optimizer, reference, comm, 3)
    assert optimizer.overlaps
    assert_same(model, reference)
    optimizer.close()
    transport.close()
