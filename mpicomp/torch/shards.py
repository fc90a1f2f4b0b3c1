"""Parameters that `fully_shard` has cut: the tensors that replicas exchange, and decisions of all shards of a model."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch

from mpicomp import errors
from mpicomp.arrays import ArraySpec
from mpicomp.errors import ConfigurationError, DisagreementError, MpicompError, RankFailedError
from mpicomp.reducer.agreement import Made, Signature, error_of, run_collectively
from mpicomp.transport import Transport

REPLICAS_ADVICE = "the ranks of comm must hold the same shard; pass comm=mpicomp.torch.replicas(model)"
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
    def requires_grad(self) -> bool:
        return bool(self.whole.requires_grad)

    @property
    def _version(self) -> int:
        return int(self.whole._version)

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
        return getattr(local_of(self.whole), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [local_of(value.whole) if isinstance(value, LocalShard) else value for value in args]
        return function(*plain, **(kwargs or {}))


class ShardGroup:
    """The ranks with the shards of one replica, if any, which decide together what concerns the whole model."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        meshes = [parameter.whole.device_mesh for parameter in parameters if isinstance(parameter, LocalShard)]
        self._mesh = meshes[0] if meshes and meshes[0].size() > 1 else None
        self._is_open = False

    @property
    def exists(self) -> bool:
        """Whether the model is sharded."""
        return self._mesh is not None

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
    """Return whether a tensor is a DTensor, without an import of its module."""
    return any(base.__name__ == "DTensor" for base in type(tensor).__mro__)


def local_of(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a tensor, in the same memory."""
    return cast(torch.Tensor, tensor._local_tensor if is_sharded(tensor) else tensor)


def whole_of(parameter: Any) -> torch.Tensor:
    """Return the parameter that an optimizer has."""
    return cast(torch.Tensor, parameter.whole if isinstance(parameter, LocalShard) else parameter)


def exchanged(parameter: torch.Tensor) -> torch.Tensor:
    """Return what is exchanged of a parameter: its `LocalShard`, or the parameter itself."""
    return cast(torch.Tensor, LocalShard(parameter)) if is_sharded(parameter) else parameter


def refusal_of(parameter: Any) -> tuple[str, str] | None:
    """Return what keeps a sharded parameter from being exchanged, and advice; None where nothing does."""
    placements, mesh = parameter.placements, parameter.device_mesh
    found = f"is a DTensor with placements {tuple(placements)} on a mesh of shape {tuple(mesh.shape)}"
    if any(placement.is_replicate() for placement in placements):
        return found, (
            "torch would average its replicas already; pass a mesh of shards alone to fully_shard(), such as "
            "mesh['shard']: replicas are mpicomp's, by comm=mpicomp.torch.replicas(model)"
        )
    if len(placements) != 1 or not placements[0].is_shard(0) or type(placements[0]).__name__ != "Shard":
        return found, (
            "what is served is Shard(0) on a mesh of one dimension, as fully_shard() makes it without "
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
    """Call `run_collectively`, and refuse ranks with different shards of what ``parameters`` finds in its result."""

    def compared(made: Made) -> Signature:
        return Signature({}, [spec_of(name, p) for name, p in parameters(made).items() if is_sharded(p)])

    try:
        return run_collectively(make, transport, subsystem, compared)
    except DisagreementError as error:
        raise DisagreementError(f"{error}; {REPLICAS_ADVICE}") from None


def spec_of(name: str, tensor: Any) -> ArraySpec:
    """Return name, dtype and shape of what this rank exchanges of a tensor; with a dtype come rows of a shard."""
    held = exchanged(tensor)
    dtype = str(held.dtype).removeprefix("torch.")
    if isinstance(held, LocalShard):
        first, end = held.rows
        dtype += f" (rows {first} to {end} of {held.whole.shape[0]})"
    return ArraySpec(name, dtype, tuple(held.shape))


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
