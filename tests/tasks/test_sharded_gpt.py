"""A task whose model is sharded over two of four ranks trains as it does whole."""

import pytest
import torch
from mpicomp.bench.measure.metrics import MetricsWriter
from mpicomp.bench.measure.progress import Progress
from mpicomp.bench.train import Settings, train_measured
from mpicomp.bench.trainer import CPU, Replica
from sharded_models import end_groups, shards
from tiny_gpt import Tiny

import mpicomp
from mpicomp.mpi.connect import connect
from mpicomp.policies import get_policy
from mpicomp.torch.shards import local_of

pytestmark = pytest.mark.mpi(min_size=4, max_size=4)
MUON = {"sync_every": 2, "inner": "muon"}


@pytest.fixture(autouse=True, scope="module")
def _end_groups():
    yield
    end_groups()


@pytest.fixture
def task(comm, numbers):
    yield Tiny(seed=1, data=comm.bcast(str(numbers)))
    comm.Barrier()  # before the file goes


def train(task, comm, shard, compressor=None, collective="auto", **more):
    compressor = compressor or mpicomp.Dense()
    settings = Settings(compressor, collective, get_policy("static"), 8, 0, probes=False, shard=shard, **more)
    transport = connect(comm)
    threads = torch.get_num_threads()
    with MetricsWriter(None) as metrics:
        trained = train_measured(task, settings, transport, Progress(False), metrics)
    torch.set_num_threads(threads)
    transport.close()
    return trained.run


def test_sharded_training_ends_at_the_loss_of_the_whole_model(comm, task):
    """Within 1e-5; a training whose replicas differ at the end raises."""
    with shards(comm):
        whole, sharded = (train(task, comm, shard, evaluate_every=4) for shard in (1, 2))
        if comm.rank == 0:
            assert sharded.quality["value"] == pytest.approx(whole.quality["value"], rel=1e-5)
            assert sharded.quality["value"] < 0.99 * task.evaluate(task.model())
        assert sharded.parameters == whole.parameters
        # A ring of two with half of the elements, and one of four with all.
        assert sharded.dense_wire_bytes == pytest.approx(whole.dense_wire_bytes / 3, rel=0.02)


@pytest.mark.parametrize("updates", [None, MUON], ids=["gradients", "muon"])
def test_compressed_training_of_shards_keeps_replicas_alike(comm, task, updates):
    with shards(comm):
        trained = train(task, comm, 2, mpicomp.get_compressor("onebit"), "two-phase", updates=updates)
        bits = 8 * trained.sent_bytes / (8 * trained.parameters / 2)
        assert 0.5 < bits < 2.5 if updates is None else 0.2 < bits < 1.3


def test_ranks_with_other_shards_than_their_replicas_are_found(comm, task):
    transport = connect(comm)
    with shards(comm) as mesh:
        replica = Replica(task, transport.group, 1, CPU, mesh=mesh)
        assert replica.differing_ranks(transport) == []
        if comm.rank == 3:
            local_of(replica.parameters[2]).view(-1)[0] += 1
        assert replica.differing_ranks(transport) == [3]
    transport.close()
