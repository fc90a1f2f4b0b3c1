"""Broadcast of the root's parameters, buffers and optimizer state to every rank."""

import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.serialization import default_restore_location

from mpicomp.arrays import ArraySpec
from mpicomp.errors import ArrayTypeError, ConfigurationError, MpicompError, warn_user
from mpicomp.mpi.connect import run_over
from mpicomp.mpi.rounds import Group, Round, Rounds, gather_rows
from mpicomp.reducer.agreement import Signature, agree
from mpicomp.reducer.settings import check_arguments
from mpicomp.torch.parameters import to_pairs
from mpicomp.torch.proxy import OptimizerProxy
from mpicomp.torch.shards import array_specs, exchanged, is_sharded, local_of, refusal_of, shard_like, spec_of

_BYTE, _SIZE = np.dtype(np.uint8), np.dtype(np.int64)
_PARAMETERS, _STATE = "broadcast_parameters", "broadcast_optimizer_state"
_SHARD = "this rank's rows of a DTensor"


@check_arguments(_PARAMETERS)
def broadcast_parameters(
    model: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    root: int = 0,
    comm: Any = None,
) -> None:
    """Overwrite every rank's parameters and buffers with the root's, in place.

    Collective over ``comm``. Strided tensors of every dtype are sent, bit for bit.

    Parameters
    ----------
    model : torch.nn.Module, mapping or iterable of (name, tensor)
        A module stands for its parameters and persistent buffers (``model.state_dict()``). Other entries of a
        ``state_dict()``, such as the extra state of modules, are passed over, with a warning.
    root : int
        The rank whose values are sent.
    comm : mpi4py.MPI.Comm, Transport or None
        None stands for MPI.COMM_WORLD.

    Raises
    ------
    DisagreementError
        Where names, dtypes, layouts or shapes differ between ranks, before any data moves.
    ArrayTypeError, ConfigurationError
        On all ranks: for an object that is no strided tensor or has no values, such as parameters of lazy modules and
        on the device ``meta``; where there is nothing to send; for a root that is no rank.
    """
    run_over(comm, lambda group: _send_parameters(model, root, group))


@check_arguments(_STATE)
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root: int = 0, comm: Any = None) -> None:
    """Make every rank's optimizer state the root's, bit for bit.

    Collective over ``comm``. A script that resumes loads its checkpoint on one rank, then calls this and
    `broadcast_parameters` on all of them: moments, step counters and settings of groups become the root's, also on
    ranks without state. Tensors of the same shape and dtype are overwritten in place.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        A plain one, or one of mpicomp's, which also receives the number of steps. Residuals and the state of reducers
        are not sent; a state that only some ranks have loaded is left out, with a warning. Of a sharded model each root
        has its shard's state, with ``comm=mpicomp.torch.replicas(model)``.
    root : int
        The rank whose state is sent.
    comm : mpi4py.MPI.Comm, Transport or None
        None stands for MPI.COMM_WORLD.

    Raises
    ------
    DisagreementError
        Where the class of the optimizer, the number of groups, or parameters or their rows differ between ranks.
    ConfigurationError
        On all ranks: for an object that is no optimizer, or has a state that cannot be sent.
    """
    run_over(comm, lambda group: _send_state(optimizer, root, group))


def _send_parameters(model: Any, root: int, group: Group) -> Rounds[None]:
    problem: MpicompError | None = None
    specs: list[ArraySpec] | None = None
    try:
        _check_root(root, group, _PARAMETERS)
        entries = _entries_of(model, group)
        specs = [ArraySpec(name, _kind(name, entry), tuple(getattr(entry, "shape", ()))) for name, entry in entries]
    except MpicompError as error:
        problem = error
    yield from agree(None if specs is None else Signature({"root": root}, specs), problem, group, _PARAMETERS)
    for _, entry in entries:
        yield from from_root(exchanged(entry), root, group)


def _send_state(optimizer: Any, root: int, group: Group) -> Rounds[None]:
    problem: MpicompError | None = None
    signature: Signature | None = None
    try:
        _check_root(root, group, _STATE)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(f"{_STATE}: a torch optimizer is needed, got {type(optimizer).__name__}")
        members = [
            (f"param_groups[{index}]['params'][{place}]", parameter)
            for index, settings in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(settings["params"])
        ]
        plain = [
            {key: value for key, value in settings.items() if key not in ("params", "param_names")}
            for settings in optimizer.param_groups
        ]
        compared = {"root": root, "class of the optimizer": type(optimizer).__name__}
        signature = Signature(compared | {"len(param_groups)": len(optimizer.param_groups)}, array_specs(dict(members)))
        if group.rank == root:
            held: list[tuple[Any, Any]] = [(None, settings) for settings in plain]
            held += [(parameter, optimizer.state.get(parameter)) for _, parameter in members]
            empty = [_plain(value, parameter, lambda _: torch.empty(0)) for parameter, value in held]
            try:  # reading runs no code
                _loaded(_saved(empty))
            except Exception as error:
                text = str(error).partition("\n")[0]
                raise ConfigurationError(
                    f"{_STATE}: the state of {type(optimizer).__name__} must consist of tensors, numbers, strings, "
                    f"dicts and lists, and cannot be sent ({type(error).__name__}: {text:.80}); load the checkpoint on "
                    "every rank"
                ) from None
    except MpicompError as error:
        problem = error
    yield from agree(signature, problem, group, _STATE)
    if isinstance(optimizer, OptimizerProxy):
        yield from _drop_partial_load(optimizer, group)
    for present, settings in zip(optimizer.param_groups, plain, strict=True):
        sent = yield from _value_from_root(settings, torch.empty(0), root, group)
        if group.rank != root:
            present.update(_filled(sent, present, None))
    for _, parameter in members:  # one at a time, since all of them may be larger than the model
        sent = yield from _value_from_root(optimizer.state.get(parameter), parameter, root, group)
        if sent is None:
            optimizer.state.pop(parameter, None)
        elif group.rank != root:
            optimizer.state[parameter] = _filled(sent, optimizer.state.get(parameter, {}), parameter)
    if isinstance(optimizer, OptimizerProxy):
        progress = yield from _value_from_root(optimizer._mpicomp.progress(), torch.empty(0), root, group)
        if group.rank != root:
            optimizer._mpicomp.load_progress(progress)


def _drop_partial_load(optimizer: OptimizerProxy, group: Group) -> Rounds[None]:
    # Residuals of the root, for one, are its own.
    loaded = (yield from gather_rows(np.uint8(optimizer.reducer.loaded is not None), group)).ravel()
    if not loaded.any() or loaded.all():
        return
    if loaded[group.rank]:
        optimizer._mpicomp.drop_loaded()
    if group.rank == 0:
        warn_user(
            f"{_STATE}: state['mpicomp'], which was loaded on {loaded.sum()} of {group.size} ranks, is left out, and "
            "residuals start at zero; to keep them save and load a file of each rank"
        )


def from_root(tensor: torch.Tensor, root: int, group: Group) -> Rounds[None]:
    """Overwrite a strided tensor with the root's."""
    if tensor.numel() == 0:
        return
    # One element stands for all along a dimension that was expanded.
    tensor = tensor.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    host = tensor.cpu().contiguous()
    received = torch.empty_like(host)
    send, recv = as_bytes(host), as_bytes(received)
    yield Round("bcast", (send.size,), _BYTE, root=root, send=send, recv=recv)
    if group.rank != root:
        with torch.no_grad():
            tensor.copy_(received)


def as_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous tensor in host memory; lazily conjugated ones are copied."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a single element is contiguous whatever its strides
    view: NDArray[np.uint8] = flat.resolve_conj().resolve_neg().view(torch.uint8).numpy()
    return view


def _check_root(root: int, group: Group, subsystem: str) -> None:
    if not 0 <= root < group.size:
        raise ConfigurationError(f"{subsystem}: root must be a rank from 0 to {group.size - 1}, got {root}")


def _value_from_root(value: Any, parameter: torch.Tensor, root: int, group: Group) -> Rounds[Any]:
    content = np.empty(0, _BYTE)
    if group.rank == root:
        content = np.frombuffer(_saved(_plain(value, parameter, torch.clone)), _BYTE)
    length = np.array([content.size], _SIZE)
    [size] = yield Round("bcast", (1,), _SIZE, root=root, send=length, recv=np.empty(1, _SIZE))
    received = yield Round("bcast", (int(size),), _BYTE, root=root, send=content, recv=np.empty(size, _BYTE))
    if group.rank == root:
        return value
    restore: Any = default_restore_location  # which has no types
    device = str(local_of(parameter).device)
    return _loaded(bytes(received), lambda data, place: restore(data, place if place == "cpu" else device))


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _loaded(content: bytes, place: Any = None) -> Any:
    return torch.load(io.BytesIO(content), map_location=place, weights_only=True)


def _entries_of(model: Any, group: Group) -> list[tuple[str, Any]]:
    is_state = isinstance(model, Mapping) and {"state", "param_groups"} <= set(model)
    if isinstance(model, torch.optim.Optimizer) or is_state:
        raise ConfigurationError(
            f"{_PARAMETERS}: a model is needed, got {'the state of an optimizer' if is_state else type(model).__name__}"
            "; call mpicomp.torch.broadcast_optimizer_state(optimizer)"
        )
    advice = "an iterator such as model.named_parameters() is used up after its first use: pass a new one, or the model"
    if isinstance(model, torch.nn.Module):
        pairs = list(model.state_dict(keep_vars=True).items())
        advice = "models in a plain list or dict are not registered: use torch.nn.ModuleList or ModuleDict"
    else:
        pairs = to_pairs(model, _PARAMETERS, "pass the model, or model.named_parameters()")
        if len(dict(pairs)) < len(pairs):
            raise ConfigurationError(f"{_PARAMETERS}: two tensors have the same name; names must differ")
    if isinstance(model, torch.nn.Module | Mapping):  # a state_dict() may have other entries
        others = [name for name, value in pairs if not hasattr(value, "dtype")]
        if others and group.rank == 0:
            warn_user(f"{_PARAMETERS}: passed over, since they are no tensors: {', '.join(map(repr, others))}")
        pairs = [(name, value) for name, value in pairs if name not in others]
    if not pairs:
        raise ConfigurationError(f"{_PARAMETERS}: there is no tensor to send; {advice}")
    return pairs


def _kind(name: str, entry: Any) -> str:
    if not isinstance(entry, torch.Tensor):
        raise ArrayTypeError(
            f"{_PARAMETERS}: '{name}' must be a tensor, got {type(entry).__name__}; pass the model's tensors alone: "
            "model.named_parameters()"
        )
    problem = None
    if torch.nn.parameter.is_lazy(entry):
        problem = "has no shape yet; run one batch through the model, on all ranks, before its parameters are sent"
    elif is_sharded(entry) and refusal_of(entry) is not None:
        problem = "; ".join(refusal_of(entry) or ())
    elif entry.is_meta:
        problem = "is on the device 'meta' and has no values; call model.to_empty(device=...) first"
    elif entry.layout != torch.strided:
        problem = f"has the layout {entry.layout}; send its indices and values by themselves"
    elif entry.is_quantized:
        problem = "is quantised; pass tensor.int_repr(), and set the same scales on all ranks"
    if problem is not None:
        raise ConfigurationError(f"{_PARAMETERS}: '{name}' {problem}")
    kind = spec_of(name, entry).dtype
    expanded = [axis for axis, stride in enumerate(entry.stride()) if stride == 0 and entry.shape[axis] > 1]
    return f"{kind} expanded along {expanded}" if expanded else kind


def _plain(value: Any, parameter: Any, copied: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if not is_sharded(value):
            return copied(value.detach())
        shards: list[Any] = [held for held in (value, parameter) if is_sharded(held)]
        cuts = [(shard.shape, shard.placements, shard.device_mesh) for shard in shards]
        if len(cuts) < 2 or cuts[0] != cuts[1]:
            shape, placements, mesh = cuts[0]
            raise ConfigurationError(
                f"{_STATE}: state tensors must be sharded as their parameter or not at all, got one that is a DTensor "
                f"of shape {tuple(shape)} with placements {tuple(placements)} on {mesh}"
            )
        return {_SHARD: copied(local_of(value).detach())}  # torch.load would not read a DTensor
    if isinstance(value, dict):
        return {key: _plain(inner, parameter, copied) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(inner, parameter, copied) for inner in value]
        return items if isinstance(value, list) else tuple(items)
    return value.item() if isinstance(value, np.generic) else value


@torch.no_grad()
def _filled(sent: Mapping[str, Any], present: Mapping[str, Any], parameter: Any) -> dict[str, Any]:
    filled = {}
    for key, value in sent.items():
        is_shard = isinstance(value, dict) and value.keys() == {_SHARD}
        value = value[_SHARD] if is_shard else value
        mine = local_of(present.get(key))
        if isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor):
            fits = (mine.dtype, mine.shape) == (value.dtype, value.shape) and 0 not in mine.stride()
            value = mine.copy_(value) if fits else value
        filled[key] = shard_like(parameter, value) if is_shard else value
    return filled
