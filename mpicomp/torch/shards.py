"""Models cut by `fully_shard`: ranks with the same shard, the tensors they exchange, and decisions of all shards."""

import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not exported

from mpicomp import errors
from mpicomp.arrays import ArraySpec
from mpicomp.errors import ConfigurationError, DisagreementError, MpicompError, RankFailedError
from mpicomp.mpi import Transport
from mpicomp.mpi.connect import connected, run_over, split
from mpicomp.mpi.rounds import Group, Rounds, from_one, gather_rows
from mpicomp.reducer.agreement import Made, Signature, agree, error_of, run_collectively

_WHO = "replicas"
_ADVICE = "start the job with mpirun or srun, and torch's process group among its ranks, see docs/pytorch.md"
_FINITE, _NONFINITE, _FAILED = range(3)


class LocalShard:
    """A sharded parameter as this rank's tensor, looked up in each access since FSDP replaces it, and its gradient."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    @property
    def grad(self) -> torch.Tensor | None:
        return None if self.whole.grad is None else local_of(self.whole.grad)

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        self.whole.grad = None if gradient is None else shard_like(self.whole, gradient)

    @property
    def rows(self) -> tuple[int, int]:
        """The first row of the whole parameter that this rank holds, and the one after the last."""
        mesh, length = self.whole.device_mesh, self.whole.shape[0]
        first = min(length, mesh.get_local_rank() * -(-length // mesh.size()))
        return first, first + int(local_of(self.whole).shape[0])

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        kind = self.whole.device_mesh.device_type

        def call(_: Any) -> None:
            if self.device.type != kind:  # offloaded: the copy to the host may be under way
                torch.get_device_module(kind).current_stream().synchronize()
            hook(self)

        return self.whole.register_post_accumulate_grad_hook(call)

    def __len__(self) -> int:
        return len(local_of(self.whole))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole if name in ("requires_grad", "_version") else local_of(self.whole), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [local_of(value.whole) if isinstance(value, LocalShard) else value for value in args]
        return function(*plain, **(kwargs or {}))


class ShardGroup:
    """The ranks with the shards of one replica, if any, which decide together about the whole model."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        meshes = [parameter.whole.device_mesh for parameter in parameters if isinstance(parameter, LocalShard)]
        self._mesh = meshes[0] if meshes and meshes[0].size() > 1 else None
        self._is_open = False
        self.exists = self._mesh is not None
        self.arrived: dict[str, None] = {}  # names in the order of backward, until ranks have agreed

    def begin(self) -> None:
        """Begin a step, which ends in `agree_finite` or `fail`."""
        self._is_open = self.exists

    def agree_finite(self, finite: bool) -> bool:
        """Return whether all shards are finite; raise the error of another shard's exchange. Collective."""
        if not self._is_open:
            return finite
        self._is_open = False
        return self._worst(_FINITE if finite else _NONFINITE, None) == _FINITE

    def fail(self, error: BaseException) -> None:
        """Let the other shards raise an error that all replicas of this one have agreed on. Collective."""
        if self._is_open and isinstance(error, MpicompError) and not isinstance(error, RankFailedError):
            self._is_open = False
            self._worst(_FAILED, error)

    def all(self, flag: bool) -> bool:
        """Return whether a flag is set for all shards. Collective."""
        return flag if self._mesh is None else self._worst(_FINITE if flag else _NONFINITE, None) == _FINITE

    def gather(self, value: float) -> list[float]:
        """Return the values of all shards, in their order. Collective."""
        if self._mesh is None:
            return [value]
        send = torch.tensor([value], dtype=torch.float64, device=self._mesh.device_type)
        rows = [torch.empty_like(send) for _ in range(self._mesh.size())]
        torch.distributed.all_gather(rows, send, group=self._mesh.get_group())
        values: list[float] = torch.cat(rows).tolist()
        return values

    def _worst(self, found: int, error: BaseException | None) -> int:
        assert self._mesh is not None
        worst = int(max(self.gather(found)))
        if worst == _FAILED:
            reports: list[Any] = [None] * self._mesh.size()
            report = None if error is None else (type(error).__name__, str(error))
            torch.distributed.all_gather_object(reports, report, group=self._mesh.get_group())
            name, text = next(report for report in reports if report is not None)
            if error is None:
                raise error_of(getattr(errors, name), f"{text} (in the exchange of another shard)")
        return worst


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor."""
    return any(base.__name__ == "DTensor" for base in type(tensor).__mro__)


def local_of(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    return cast(torch.Tensor, tensor._local_tensor if is_sharded(tensor) else tensor)


def whole_of(parameter: Any) -> torch.Tensor:
    """Return the parameter that an optimizer has."""
    return cast(torch.Tensor, parameter.whole if isinstance(parameter, LocalShard) else parameter)


def exchanged(parameter: torch.Tensor) -> torch.Tensor:
    """Return the `LocalShard` of a sharded parameter, or the parameter itself."""
    return cast(torch.Tensor, LocalShard(parameter)) if is_sharded(parameter) else parameter


def refusal_of(parameter: Any) -> tuple[str, str] | None:
    """Return why a sharded parameter cannot be exchanged, and advice; None where it can."""
    placements, mesh = parameter.placements, parameter.device_mesh
    found = f"is a DTensor with placements {tuple(placements)} on a mesh of shape {tuple(mesh.shape)}"
    if any(placement.is_replicate() for placement in placements):
        return found, (
            "torch would average its replicas already; pass a mesh of shards alone to fully_shard(), such as "
            "mesh['shard']: replicas are mpicomp's, by comm=mpicomp.torch.replicas(model)"
        )
    if len(placements) != 1 or not placements[0].is_shard(0) or type(placements[0]).__name__ != "Shard":
        return found, (
            "only Shard(0) on a mesh of one dimension is supported, as fully_shard() makes it without "
            "shard_placement_fn; tensor parallelism is not"
        )
    return None


def check_shards(parameters: Mapping[str, torch.Tensor], settings: Mapping[str, Any], subsystem: str) -> None:
    """Refuse parameters of which some are sharded in another way than others, and settings that shards rule out."""
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    sharded: dict[str, Any] = {name: parameter for name, parameter in trained.items() if is_sharded(parameter)}
    if not sharded:
        return
    first, mesh = next((name, parameter.device_mesh) for name, parameter in sharded.items())
    for name in trained:
        if name not in sharded:
            raise ConfigurationError(
                f"{subsystem}: parameter '{name}' is whole, and '{first}' is sharded: torch does not average the "
                "gradients of whole ones over the shards' ranks; call fully_shard(model) on the model itself, too, "
                "without ignored_params"
            )
        if sharded[name].device_mesh != mesh:
            raise ConfigurationError(
                f"{subsystem}: parameters '{first}' and '{name}' are on different meshes; make an optimizer for each, "
                "with comm=mpicomp.torch.replicas(mesh)"
            )
    if settings.get("on_failure", "abort") != "abort":
        raise ConfigurationError(
            f"{subsystem}: on_failure={settings['on_failure']!r} needs ranks that hold the whole model, and "
            f"'{first}' is sharded: a lost rank takes its shard along; resume from a checkpoint"
        )


def make_for_replicas(
    make: Callable[[], Made], parameters: Callable[[Made], Mapping[str, Any]], transport: Transport, subsystem: str
) -> Made:
    """Call `run_collectively`, and refuse ranks with different shards of the ``parameters`` of its result."""

    def compared(made: Made) -> Signature:
        return Signature({}, [spec_of(name, p) for name, p in parameters(made).items() if is_sharded(p)])

    try:
        return run_collectively(make, transport, subsystem, compared)
    except DisagreementError as error:
        advice = "the ranks of comm must hold the same shard; pass comm=mpicomp.torch.replicas(model)"
        raise DisagreementError(f"{error}; {advice}") from None


def spec_of(name: str, tensor: Any) -> ArraySpec:
    """Return name, dtype and shape of this rank's part of a tensor; the dtype names the rows of a shard."""
    held = exchanged(tensor)
    dtype = str(held.dtype).removeprefix("torch.")
    if isinstance(held, LocalShard):
        first, end = held.rows
        dtype += f" (rows {first} to {end} of {held.whole.shape[0]})"
    return ArraySpec(name, dtype, tuple(held.shape))


def array_specs(tensors: Mapping[str, torch.Tensor]) -> list[ArraySpec]:
    """Return names, dtypes and shapes, for ranks to compare; of shards their rows, too."""
    return [spec_of(name, tensor) for name, tensor in tensors.items()]


def rows_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """Return first row, end and number of rows of sharded parameters, for a state."""
    held = {name: exchanged(parameter) for name, parameter in parameters.items()}
    return {name: [*p.rows, int(p.whole.shape[0])] for name, p in held.items() if isinstance(p, LocalShard)}


def check_rows(rows: Mapping[str, Any], parameters: Mapping[str, torch.Tensor], subsystem: str) -> None:
    """Refuse a state of other rows than those that this rank holds."""
    for name, held in rows_of(parameters).items():
        found = [int(number) for number in rows.get(name, ())]
        if found != held:
            saved = "the whole" if not found else f"rows {found[0]} to {found[1]} of {found[2]}"
            raise ConfigurationError(
                f"{subsystem}: the state holds {saved} of '{name}', and this rank rows {held[0]} to {held[1]} of "
                f"{held[2]}; read it by load_checkpoint(folder, replicas, "
                "rows=optimizer.state_dict()['mpicomp']['rows']), or delete state['mpicomp'] to start residuals at zero"
            )


def from_whole(like: Any, whole: torch.Tensor) -> Any:
    """Return this rank's rows of a whole tensor as a DTensor like another one."""
    first, end = LocalShard(like).rows
    return shard_like(like, whole[first:end].contiguous())


def shard_like(whole: Any, local: torch.Tensor) -> Any:
    """Return a DTensor like ``whole`` with other values, in the memory of ``local``."""
    from torch.distributed.tensor import DTensor  # long to import, and loaded where there is one

    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


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
    # MPI's rank of the mesh's first one is the second result.
    group = transport.group
    place = mesh.get_local_rank()
    token = transport.run(_agree_on_token(mesh, group))
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


def _agree_on_token(mesh: Any, group: Group) -> Rounds[int]:
    try:
        yield from agree(Signature({"the number of ranks in a mesh": mesh.size()}, []), None, group, _WHO)
    except DisagreementError as error:
        raise DisagreementError(f"{error}; pass the mesh of shards on all ranks") from None
    token = yield from from_one({"token": secrets.randbits(62)}, group, _WHO)  # ranks of a job know each other by it
    return int(token["token"])
