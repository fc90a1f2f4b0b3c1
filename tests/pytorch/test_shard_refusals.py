"""Models that are sharded in a way that cannot be exchanged are refused when the optimizer is made, on all ranks."""

import pytest
import torch
from replicas import network, sgd
from sharded_models import HOSTS, end_groups, mesh_of, shard, shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mpicomp
from mpicomp.errors import ConfigurationError, DisagreementError
from mpicomp.torch import DistributedOptimizer, UpdateOptimizer

pytestmark = pytest.mark.mpi(min_size=4, max_size=4)


def native(model):
    return fully_shard(model, mesh=mesh_of())


def by_columns(model):
    return fully_shard(model, mesh=mesh_of()["shard"], shard_placement_fn=lambda p: Shard(p.ndim - 1))


def in_parallel(model):
    mesh = DeviceMesh("cpu", HOSTS, mesh_dim_names=("shard", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["shard"])


def in_fsdp1(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def in_fsdp1_by_names(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def in_part(model):
    fully_shard(model[0], mesh=mesh_of()["shard"])
    return model


def on_two_meshes(model):
    fully_shard(model[0], mesh=mesh_of()["shard"])
    return fully_shard(model, mesh=init_device_mesh("cpu", (4,)))


KINDS = {
    native: r"Replicate\(\).*mesh\['shard'\]: replicas are mpicomp's",
    by_columns: r"Shard\(dim=1\).*only Shard\(0\)",
    in_parallel: r"on a mesh of shape \(2, 2\).*tensor parallelism is not",
    in_fsdp1: r"fully_shard\(\), whose shards are exchanged",
    in_fsdp1_by_names: r"the model is in FullyShardedDataParallel; shard the model by torch.*fully_shard\(\)",
    in_part: r"'2.weight' is whole, and '0.weight' is sharded.*fully_shard\(model\) on the model itself",
    on_two_meshes: r"'0.weight' and '2.weight' are on different meshes",
}


@pytest.mark.parametrize(
    ("make", "wrap"),
    [*((make, DistributedOptimizer) for make in KINDS), (native, UpdateOptimizer)],
)
def test_model_that_is_sharded_otherwise_is_refused(comm, make, wrap):
    with shards(comm):
        same = comm.Split(comm.rank % 2, comm.rank)
        model = make(network())
        with pytest.raises(ConfigurationError, match=KINDS[make]):
            wrap(sgd(model), model.named_parameters(), comm=same)


@pytest.mark.parametrize(("wrap", "columns"), [(DistributedOptimizer, 8), (UpdateOptimizer, 5)])
def test_communicator_that_mixes_shards_is_refused(comm, wrap, columns):
    with shards(comm) as mesh:
        model = shard(torch.nn.Sequential(torch.nn.Linear(6, columns), torch.nn.Linear(columns, 2)), mesh)
        with pytest.raises(DisagreementError, match=r"'0.weight'.*\(rows 0 to .*comm=mpicomp.torch.replicas\(model\)"):
            wrap(sgd(model), model.named_parameters(), comm=comm)


def test_settings_that_shards_rule_out_are_refused(comm):
    with shards(comm) as mesh:
        model = shard(network(), mesh)
        same = mpicomp.torch.replicas(model)
        named = list(model.named_parameters())
        with pytest.raises(ConfigurationError, match="on_failure='shrink' needs ranks that hold the whole model"):
            DistributedOptimizer(sgd(model), named, comm=same, on_failure="shrink")
        with pytest.raises(ConfigurationError, match=r"sync_every='auto' would choose for each shard alone.*a number"):
            UpdateOptimizer(sgd(model), named, sync_every="auto", comm=same)
        optimizer = DistributedOptimizer(sgd(model), named, comm=same, on_failure="abort")
        with pytest.raises(ConfigurationError, match=r"join: the model is sharded.*equally many"), optimizer.join():
            pass
        optimizer.close()
        with pytest.raises(ConfigurationError, match=r"gradient_as_bucket_view: '\d.\w+' is sharded"):
            DistributedOptimizer(sgd(model), named, comm=same, gradient_as_bucket_view=True)
        with pytest.raises(ConfigurationError, match="a model in DistributedDataParallel is needed, got FSDP"):
            mpicomp.torch.DDPState(model, "topk", comm=same)


def test_meshes_and_models_of_no_shards_are_refused_by_replicas(comm):
    end_groups()
    with pytest.raises(ConfigurationError, match=r"no process group; call torch.distributed.init_process_group\(\)"):
        mpicomp.torch.replicas(network())
    with shards(comm) as mesh:
        for wrong, message in (
            (network(), "not sharded"),
            (DeviceMesh("cpu", HOSTS), r"a mesh of one dimension.*mesh\['shard'\]"),
            (native(network()), "replicas are mpicomp's"),
            (on_two_meshes(network()), "on several meshes"),
        ):
            with pytest.raises(ConfigurationError, match=message):
                mpicomp.torch.replicas(wrong)
        with pytest.raises(ConfigurationError, match=r"MPI and torch have been started with other ranks.*mpirun"):
            mpicomp.torch.replicas(mesh, comm.Split(comm.rank, 0))  # as in a job of torchrun
        with pytest.raises(DisagreementError, match=r"the number of ranks in a mesh"):
            mpicomp.torch.replicas(mesh if comm.rank < 2 else DeviceMesh("cpu", [comm.rank], _rank=comm.rank))


def test_models_that_differ_between_replicas_are_refused_by_replicas(comm):
    with shards(comm) as mesh:
        width = 8 if comm.rank < 2 else 6
        model = shard(torch.nn.Sequential(torch.nn.Linear(6, width)), mesh)
        with pytest.raises(DisagreementError, match=r"'0.weight'.*rows 0 to 4 of 8.*rows 0 to 3 of 6|rows 4 to 8 of 8"):
            mpicomp.torch.replicas(model)


def test_state_of_another_shard_is_refused(comm):
    with shards(comm) as mesh:
        model = shard(network(), mesh)
        for wrap in (DistributedOptimizer, UpdateOptimizer):
            optimizer = wrap(
                sgd(model), model.named_parameters(), compressor="topk", comm=mpicomp.torch.replicas(model)
            )
            other = comm.sendrecv(optimizer.state_dict()["mpicomp"], comm.rank ^ 1, source=comm.rank ^ 1)
            with pytest.raises(ConfigurationError, match=r"the state holds rows .* of '\d.\w+', and this rank rows"):
                optimizer.load_state_dict(optimizer.state_dict() | {"mpicomp": other})
            optimizer.close()
