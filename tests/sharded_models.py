"""Models in 2 x 2 ranks: sharded over two by `fully_shard`, and replicated over two by mpicomp."""

import contextlib
import copy

import torch
from replicas import Reference, close_at_end, gloo, network, sgd, square
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import mpicomp
from mpicomp.mpi import LocalWorld

HOSTS = [[0, 1], [2, 3]]  # ranks of torch, a row for each replica
DENSE = {"compressor": "dense", "collective": "allreduce"}


_groups, _meshes = contextlib.ExitStack(), {}


@contextlib.contextmanager
def shards(comm, hosts=HOSTS):
    """Yield the mesh of this rank's shards; its replicas are in the other rows.

    Tests share process groups, which take longer to make than most steps: `end_groups` is for the end of a file.
    """
    if not _meshes:
        _groups.enter_context(gloo(comm))
    yield mesh_of(hosts)["shard"]


def mesh_of(hosts=HOSTS):
    """Return the mesh of all ranks that has these rows; tests share it, too."""
    if str(hosts) not in _meshes:
        _meshes[str(hosts)] = DeviceMesh("cpu", hosts, mesh_dim_names=("replicate", "shard"))
    return _meshes[str(hosts)]


def end_groups():
    _meshes.clear()
    _groups.close()


def shard(model, mesh, whole=False, inside="", **settings):
    """Shard each layer ``inside`` with parameters as a group of its own, then the model; or the ``whole`` as one."""
    for layer in () if whole else model.get_submodule(inside).children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


class Hybrid:
    """A model in 2 x 2 ranks, and the same in one process, by the mean of all four ranks' gradients."""

    def __init__(
        self, comm, mesh, model=None, make=sgd, loss=square, wrap=None, sharding=None, reference=Reference, **settings
    ):
        self.comm, self.loss = comm, loss
        model = network() if model is None else model
        self.reference = reference(model, make, comm.size)
        self.model = shard(model, mesh, **(sharding or {}))
        self.replicas = mpicomp.torch.replicas(self.model)
        wrap = wrap or mpicomp.torch.DistributedOptimizer
        self.optimizer = close_at_end(
            wrap(make(self.model), self.model.named_parameters(), comm=self.replicas, **DENSE | settings)
        )

    def backward(self, step):
        self.optimizer.zero_grad()
        self.loss(self.model, step, self.comm.rank).backward()

    def run(self, steps):
        for step in steps:
            self.backward(step)
            self.optimizer.step()
            self.reference.step(self.loss, step)

    def check(self, most=1e-6):
        """Parameters are those of one process, and the same bits on all replicas."""
        for (name, parameter), expected in zip(
            self.model.named_parameters(), self.reference.model.parameters(), strict=True
        ):
            whole = parameter.full_tensor()
            assert (whole - expected).norm() <= most * expected.norm(), name
        assert_alike(self.model, self.replicas)


class TwoReplicas:
    """Two whole models in one process, each with the gradients of two ranks, that exchange changes of parameters."""

    def __init__(self, model, make, ranks, wrap=mpicomp.torch.UpdateOptimizer, **settings):
        self.world = LocalWorld(ranks // 2)
        self.models = [copy.deepcopy(model) for _ in range(ranks // 2)]
        self.optimizers = [
            wrap(make(model), model.named_parameters(), comm=end, **DENSE | settings)
            for model, end in zip(self.models, self.world.transports, strict=True)
        ]
        self.model = self.models[0]

    def step(self, loss, step, spoilt=None):
        """Step on both; the gradients of the ``spoilt`` one are not finite."""
        for replica, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            for rank in (2 * replica, 2 * replica + 1):
                (loss(model, step, rank) / 2).backward()
            if replica == spoilt:
                model[0].weight.grad[0, 0] = torch.nan
        self.world.run([optimizer.rounds() for optimizer in self.optimizers])


def assert_alike(model, replicas):
    """Local shards hold the same bits on all replicas."""
    held = {name: parameter.to_local().tolist() for name, parameter in model.named_parameters()}
    assert all(other == held for other in replicas.allgather(held))


def residuals(optimizer):
    return {
        name: torch.as_tensor(optimizer.reducer.residual(name), dtype=torch.float64)
        for name in optimizer.state_dict()["mpicomp"]["residuals"]
    }
