"""The mesh of the ranks that hold the shards of a replica, and the communicator of those that hold the same shard."""

import secrets
import socket
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not said to be exported

from mpicomp.errors import ConfigurationError, DisagreementError
from mpicomp.reducer.agreement import Signature, agree, run_collectively
from mpicomp.rounds import Group, Rounds, gather_rows
from mpicomp.rounds.reports import from_one
from mpicomp.torch.arguments import array_specs
from mpicomp.torch.shards import is_sharded, refusal_of
from mpicomp.transport import Transport
from mpicomp.transport.connect import connected, run_over, split

_WHO = "replicas"
_ADVICE = "start the job with mpirun or srun, and torch's process group among its ranks, see docs/pytorch.md"


def replicas(model_or_mesh: Any, comm: Any = None) -> Any:
    """Return the communicator of the ranks that hold the same shard of a model, for ``comm=``.

    A process has a rank of MPI and one of torch. Both are sent to the ranks of its mesh by torch and to all by MPI, and
    compared, so that any order of ranks will do. Collective over ``comm``, and over the mesh.

    Parameters
    ----------
    model_or_mesh : torch.nn.Module or torch.distributed.device_mesh.DeviceMesh
        A model after ``fully_shard(..., mesh=mesh["shard"])``, whose shards are compared, or the mesh that it is
        sharded on, of one dimension.
    comm : mpi4py.MPI.Comm, optional
        The ranks of all shards and replicas; None stands for MPI.COMM_WORLD.

    Returns
    -------
    mpi4py.MPI.Comm
        The ranks with this rank's shard. The same rank of it is on each replica's ranks, in the order of the replicas'
        first ranks.

    Raises
    ------
    ConfigurationError
        Where a process group is missing, the mesh has several dimensions, or MPI and torch were started with other
        ranks.
    DisagreementError
        Where names, shapes or rows of shards differ between ranks of the same place in their mesh.

    Examples
    --------
    >>> mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))  # doctest: +SKIP
    >>> fully_shard(model, mesh=mesh["shard"])  # doctest: +SKIP
    >>> replicas = mpicomp.torch.replicas(model)  # doctest: +SKIP
    >>> optimizer = mpicomp.torch.DistributedOptimizer(optimizer, model, comm=replicas)  # doctest: +SKIP
    """
    with connected(comm) as transport:
        if transport is comm:
            raise ConfigurationError(f"{_WHO}: comm must be an intracommunicator of mpi4py, got a transport")
        mesh = run_collectively(lambda: _mesh_of(model_or_mesh), transport, _WHO)
        place, first = _place_of(mesh, transport)
    transport.close()
    same = split(comm, place, first)
    if isinstance(model_or_mesh, torch.nn.Module):
        specs = array_specs(dict(model_or_mesh.named_parameters()))
        run_over(same, lambda group: agree(Signature({}, specs), None, group, _WHO))
    return same


def shard_mesh(shards: int | None = None, device_type: str = "cpu", comm: Any = None) -> Any:
    """Return the mesh of the ranks that this rank shares a replica with, for ``fully_shard(layer, mesh=mesh)``.

    Ranks of a host follow each other in it, so that shards cross no network. Where torch has no process group yet, one
    is made of the ranks of MPI, with the backends that torch has for each device. Collective.

    Parameters
    ----------
    shards : int, optional
        Ranks to a replica; None takes all ranks of a host.
    device_type : str
        ``"cuda"``, with a device of its own for each rank, or ``"cpu"``.
    comm : mpi4py.MPI.Comm, optional
        None stands for MPI.COMM_WORLD.

    Returns
    -------
    torch.distributed.device_mesh.DeviceMesh
        Of one dimension, called ``"shard"``.

    Raises
    ------
    ConfigurationError
        Where the number of ranks is no multiple of ``shards``.
    """
    from torch.distributed.device_mesh import DeviceMesh

    with connected(comm) as transport:
        group = transport.group
        count = shards or group.size // group.hosts
        if count < 1 or group.size % count:
            raise ConfigurationError(
                f"shard_mesh: {group.size} ranks on {group.hosts} hosts cannot be divided into replicas of {count}; "
                "name a number of shards that divides them, or start as many ranks on each host"
            )
        if not torch.distributed.is_initialized():
            _start_process_group(transport)
        numbers = transport.run(gather_rows(np.int64(torch.distributed.get_rank()), group))
        by_host = sorted(range(group.size), key=lambda rank: (group.layout[rank] if group.layout else 0, rank))
    if transport is not comm:
        transport.close()
    hosts = numbers[by_host].reshape(-1, count).tolist()
    return DeviceMesh(device_type, hosts, mesh_dim_names=("replicate", "shard"))["shard"]


def _start_process_group(transport: Transport) -> None:
    """Make the ranks of MPI torch's default process group."""
    group = transport.group
    host = "127.0.0.1" if group.hosts == 1 else socket.gethostname()
    store = None
    if group.rank == 0:  # a port that is found first and bound later may be taken by then
        store = TCPStore(host, 0, group.size, True, wait_for_workers=False)
    address = {"host": host, "port": 0 if store is None else store.port}
    server: dict[str, Any] = transport.run(from_one(address, group, "shard_mesh"))
    if store is None:
        store = TCPStore(server["host"], server["port"], group.size, False)
    torch.distributed.init_process_group(store=store, rank=group.rank, world_size=group.size)


def _mesh_of(model_or_mesh: Any) -> Any:
    """Return the mesh of one dimension that a model is sharded on."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise ConfigurationError(
            f"{_WHO}: torch has no process group; call torch.distributed.init_process_group(), init_device_mesh() and "
            "fully_shard() first"
        )
    if not isinstance(model_or_mesh, torch.nn.Module):
        if getattr(model_or_mesh, "ndim", None) != 1 or not hasattr(model_or_mesh, "get_local_rank"):
            raise ConfigurationError(
                f"{_WHO}: a model or a mesh of one dimension is needed, got {model_or_mesh!r:.100}; pass the part of "
                "shards, such as mesh['shard']"
            )
        return model_or_mesh
    meshes: list[Any] = []
    for name, parameter in model_or_mesh.named_parameters():
        if is_sharded(parameter):
            refused = refusal_of(parameter)
            if refused is not None:
                raise ConfigurationError(f"{_WHO}: parameter '{name}' {refused[0]}; {refused[1]}")
            meshes.append(parameter.device_mesh)  # type: ignore[attr-defined]
    if not meshes or any(mesh != meshes[0] for mesh in meshes):
        found = "on several meshes; pass one of them" if meshes else "not sharded; call fully_shard(model, mesh=...)"
        raise ConfigurationError(f"{_WHO}: the model's parameters are {found}")
    return meshes[0]


def _place_of(mesh: Any, transport: Transport) -> tuple[int, int]:
    """Return this rank's place in its mesh, and MPI's rank of the mesh's first one, checked on all ranks."""
    group = transport.group
    place = mesh.get_local_rank()
    token = transport.run(_begin(mesh, group))
    reports: list[Any] = [None] * mesh.size()
    torch.distributed.all_gather_object(reports, (token, group.rank, place), group=mesh.get_group())
    members = [rank for _, rank, _ in reports]
    same_job = all(report == (token, report[1], where) for where, report in enumerate(reports))
    rows = transport.run(gather_rows(np.array([same_job, *members], np.int64), group))
    for rank, row in enumerate(rows):
        if not row[0] or list(row[1:]).count(rank) != 1 or any((rows[member] != row).any() for member in row[1:]):
            raise ConfigurationError(
                f"{_WHO}: MPI and torch have been started with other ranks: comm has {group.size}, torch's process "
                f"group {torch.distributed.get_world_size()}, and the mesh of rank {rank} in comm is not among the "
                f"ranks of comm; {_ADVICE}"
            )
    return place, members[0]


def _begin(mesh: Any, group: Group) -> Rounds[int]:
    """Compare sizes of meshes; return a number of rank 0 by which ranks of the same job know each other."""
    try:
        yield from agree(Signature({"the number of ranks in a mesh": mesh.size()}, []), None, group, _WHO)
    except DisagreementError as error:
        raise DisagreementError(f"{error}; pass the mesh of shards on all ranks") from None
    token = yield from from_one({"token": secrets.randbits(62)}, group, _WHO)
    return int(token["token"])
