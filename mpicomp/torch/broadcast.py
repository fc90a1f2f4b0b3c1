"""Broadcast of the root's parameters, buffers and optimizer state to every rank."""

import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.serialization import default_restore_location

from mpicomp.arrays import ArraySpec
from mpicomp.errors import ArrayTypeError, ConfigurationError, MpicompError, warn_user
from mpicomp.reducer.agreement import Signature, agree
from mpicomp.reducer.settings import check_arguments
from mpicomp.rounds import Group, Round, Rounds, gather_rows
from mpicomp.torch.arguments import array_specs, to_pairs
from mpicomp.torch.optimizer_proxy import OptimizerProxy
from mpicomp.torch.shards import exchanged, is_sharded, local_of, refusal_of, shard_like, spec_of
from mpicomp.transport.connect import run_over

_BYTE, _SIZE = np.dtype(np.uint8), np.dtype(np.int64)
_PARAMETERS, _STATE = "broadcast_parameters", "broadcast_optimizer_state"
_NOT_SENT = ("params", "param_names")
_SHARD = "this rank's rows of a DTensor"


@check_arguments(_PARAMETERS)
def broadcast_parameters(
    model: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    root: int = 0,
    comm: Any = None,
) -> None:
    """Overwrite every rank's parameters and buffers with the root's, in place.

    Collective over ``comm``. Tensors of every dtype are sent, bit for bit, sparse ones among them.

    Parameters
    ----------
    model : torch.nn.Module, mapping or iterable of (name, tensor)
        A module stands for its parameters and persistent buffers (``model.state_dict()``), and for the extra state of
        its modules (``get_extra_state``), which may consist of tensors, numbers, strings, dicts and lists. Other
        entries of a ``state_dict()`` are passed over, with a warning.
    root : int
        The rank whose values are sent.
    comm : mpi4py.MPI.Comm, Transport or None
        None stands for MPI.COMM_WORLD.

    Raises
    ------
    DisagreementError
        Where names, dtypes, layouts or shapes differ between ranks, before any data moves.
    ArrayTypeError, ConfigurationError
        On all ranks: for an object that is no tensor or has no values, such as parameters of lazy modules and on the
        device ``meta``; where there is nothing to send; for a root that is no rank.
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
        stay as they are; what not all ranks have loaded of them is left out, with a warning. Of a sharded model each
        root has its shard's state, with ``comm=mpicomp.torch.replicas(model)``.
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
    states: dict[str, bytes] = {}
    try:
        modules = dict(_modules_with_state(model))
        tensors = _tensors_of(model, modules, group)
        advice = "pass the model's tensors alone: model.named_parameters()"
        for name, module in modules.items() if group.rank == root else ():
            states[name] = _packed(module.get_extra_state(), _PARAMETERS, f"'{name}'", advice)
        specs = [ArraySpec(name, _kind(name, tensor), tuple(tensor.shape)) for name, tensor in tensors.items()]
        specs += [ArraySpec(name, "extra state", ()) for name in modules]
        tensors = {name: exchanged(tensor) for name, tensor in tensors.items()}
    except MpicompError as error:
        problem = error
    problem = _check_root(root, group, _PARAMETERS) or problem
    yield from agree(None if specs is None else Signature({"root": root}, specs), problem, group, _PARAMETERS)
    for tensor in tensors.values():
        if tensor.layout == torch.strided:
            yield from from_root(tensor, root, group)
        else:
            yield from _sparse_from_root(tensor, root, group)
    for name, module in modules.items():
        content = yield from _bytes_from_root(states.get(name), root, group)
        if group.rank != root:
            module.set_extra_state(_unpacked(content))


def _send_state(optimizer: Any, root: int, group: Group) -> Rounds[None]:
    problem: MpicompError | None = None
    signature: Signature | None = None
    try:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(f"{_STATE}: a torch optimizer is needed, got {type(optimizer).__name__}")
        settings = {"root": root, "class of the optimizer": type(optimizer).__name__}
        settings |= {"len(param_groups)": len(optimizer.param_groups)}
        signature = Signature(settings, array_specs(dict(_members(optimizer))))
        if group.rank == root:
            _check_state(optimizer)
    except MpicompError as error:
        problem = error
    yield from agree(signature, _check_root(root, group, _STATE) or problem, group, _STATE)
    if isinstance(optimizer, OptimizerProxy):
        yield from _drop_partial_load(optimizer, group)
    for settings in optimizer.param_groups:
        sent = yield from _value_from_root(_settings_of(settings), torch.empty(0), root, group)
        if group.rank != root:
            settings.update(_filled(sent, settings, None))
    for _, parameter in _members(optimizer):  # one at a time, since all of them may be larger than the model
        sent = yield from _value_from_root(optimizer.state.get(parameter), parameter, root, group)
        if sent is None:
            optimizer.state.pop(parameter, None)
        elif group.rank != root:
            optimizer.state[parameter] = _filled(sent, optimizer.state.get(parameter), parameter)
    if hasattr(optimizer, "_mpicomp_progress"):
        progress = yield from _value_from_root(optimizer._mpicomp_progress(), torch.empty(0), root, group)
        if group.rank != root:
            optimizer._mpicomp_load_progress(progress)


def _drop_partial_load(optimizer: OptimizerProxy, group: Group) -> Rounds[None]:
    """Leave out a state of reducers that not all ranks have loaded, such as the root's, whose residuals are its own."""
    loaded = (yield from gather_rows(np.uint8(optimizer._mpicomp_has_loaded()), group)).ravel()
    if not loaded.any() or loaded.all():
        return
    if loaded[group.rank]:
        optimizer._mpicomp_drop_loaded()
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


def _check_root(root: int, group: Group, subsystem: str) -> ConfigurationError | None:
    if 0 <= root < group.size:
        return None
    return ConfigurationError(f"{subsystem}: root must be a rank from 0 to {group.size - 1}, got {root}")


def _bytes_from_root(content: bytes | None, root: int, group: Group) -> Rounds[bytes]:
    """Return the root's bytes."""
    send = np.frombuffer(content or b"", _BYTE) if group.rank == root else None
    length = None if send is None else np.array([send.size], _SIZE)
    lengths = yield Round("bcast", (1,), _SIZE, root=root, send=length, recv=np.empty(1, _SIZE))
    size = int(lengths[0])
    received = yield Round("bcast", (size,), _BYTE, root=root, send=send, recv=np.empty(size, _BYTE))
    return bytes(received)


def _packed(value: Any, subsystem: str, what: str, advice: str) -> bytes:
    """Return a value as bytes that run no code when they are read, or raise the error of another value."""
    try:
        content = _saved(value)
        _unpacked(content)
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"{subsystem}: {what} must consist of tensors, numbers, strings, dicts and lists, and cannot be sent "
            f"({type(error).__name__}: {text:.80}); {advice}"
        ) from None
    return content


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(content: Any, place: Any = None) -> Any:
    return torch.load(io.BytesIO(content), map_location=place, weights_only=True)


def _modules_with_state(model: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield modules with an extra state, by its name in ``state_dict()``."""
    if isinstance(model, torch.nn.Module):
        for name, module in model.named_modules():
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                yield f"{name}{'.' if name else ''}_extra_state", module


def _without_others(entries: Mapping[str, Any], group: Group) -> dict[str, Any]:
    """Return entries of a state without those that are neither tensors nor arrays, which are named on rank 0."""
    others = [name for name, value in entries.items() if not hasattr(value, "dtype")]
    if others and group.rank == 0:
        warn_user(f"{_PARAMETERS}: passed over, since they are no tensors: {', '.join(map(repr, others))}")
    return {name: value for name, value in entries.items() if name not in others}


def _tensors_of(model: Any, modules: Mapping[str, torch.nn.Module], group: Group) -> dict[str, torch.Tensor]:
    """Return the tensors to send, or raise the error of a model that cannot be sent."""
    is_state = isinstance(model, Mapping) and {"state", "param_groups"} <= set(model)
    if isinstance(model, torch.optim.Optimizer) or is_state:
        raise ConfigurationError(
            f"{_PARAMETERS}: a model is needed, got {'the state of an optimizer' if is_state else type(model).__name__}"
            "; call mpicomp.torch.broadcast_optimizer_state(optimizer)"
        )
    if isinstance(model, torch.nn.Module):
        entries = model.state_dict(keep_vars=True).items()
        tensors = _without_others({name: value for name, value in entries if name not in modules}, group)
        advice = "models in a plain list or dict are not registered: use torch.nn.ModuleList or ModuleDict"
    else:
        pairs = to_pairs(model, _PARAMETERS, "pass the model, or model.named_parameters()")
        tensors = dict(pairs)
        if len(tensors) < len(pairs):
            raise ConfigurationError(f"{_PARAMETERS}: two tensors have the same name; names must differ")
        if isinstance(model, Mapping):  # it may be a state_dict()
            tensors = _without_others(tensors, group)
        advice = (
            "an iterator such as model.named_parameters() is used up after its first use: pass a new one, or the model"
        )
    if not tensors and not modules:
        raise ConfigurationError(f"{_PARAMETERS}: there is no tensor to send; {advice}")
    return tensors


def _kind(name: str, tensor: Any) -> str:
    """Return what must be the same on all ranks beyond name and shape."""
    if not isinstance(tensor, torch.Tensor):
        raise ArrayTypeError(
            f"{_PARAMETERS}: '{name}' must be a tensor, got {type(tensor).__name__}; pass the model's tensors alone: "
            "model.named_parameters()"
        )
    problem = None
    if torch.nn.parameter.is_lazy(tensor):
        problem = "has no shape yet; run one batch through the model, on all ranks, before its parameters are sent"
    elif is_sharded(tensor) and refusal_of(tensor) is not None:
        problem = "; ".join(refusal_of(tensor) or ())
    elif tensor.is_meta:
        problem = "is on the device 'meta' and has no values; call model.to_empty(device=...) first"
    elif tensor.is_quantized:
        problem = "is quantised; pass tensor.int_repr() and set scales on all ranks alike"
    if problem is not None:
        raise ConfigurationError(f"{_PARAMETERS}: '{name}' {problem}")
    kind = spec_of(name, tensor).dtype
    if tensor.layout != torch.strided:
        return f"{kind}, {str(tensor.layout).removeprefix('torch.')}"
    expanded = [axis for axis, stride in enumerate(tensor.stride()) if stride == 0 and tensor.shape[axis] > 1]
    return f"{kind} expanded along {expanded}" if expanded else kind


@torch.no_grad()
def _sparse_from_root(tensor: torch.Tensor, root: int, group: Group) -> Rounds[None]:
    """Overwrite a sparse tensor with the root's, of any number of elements."""
    new = yield from _value_from_root(tensor, tensor, root, group)
    if group.rank == root:
        return
    if tensor.layout != torch.sparse_coo:
        tensor.resize_as_sparse_(new)
    tensor.copy_(new)  # of a detached one it would reach neither indices nor values


def _members(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"param_groups[{index}]['params'][{place}]", parameter)
        for index, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    ]


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_SENT}


def _check_state(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a state that cannot be sent, and shards that are not of the same rows as the parameter."""
    states = [(parameter, optimizer.state.get(parameter)) for _, parameter in _members(optimizer)]
    held = [(None, _settings_of(group)) for group in optimizer.param_groups] + states
    plain = [_plain(value, parameter, with_values=False) for parameter, value in held]
    _packed(plain, _STATE, f"the state of {type(optimizer).__name__}", "load the checkpoint on every rank")


def _cut_of(tensor: Any) -> str:
    return f"of shape {tuple(tensor.shape)} with placements {tuple(tensor.placements)} on {tensor.device_mesh}"


def _plain(value: Any, parameter: Any, with_values: bool = True) -> Any:
    """Return a copy of what ``torch.load`` reads by its defaults: a shard is its rank's tensor in a dict."""
    if isinstance(value, torch.Tensor):
        if not is_sharded(value):
            return value.detach().clone() if with_values else torch.empty(0)  # of a view all its memory would be saved
        if not (is_sharded(parameter) and _cut_of(value) == _cut_of(parameter)):
            raise ConfigurationError(
                f"{_STATE}: state tensors must be sharded as their parameter or not at all, got one that is a DTensor "
                f"{_cut_of(value)}"
            )
        return {_SHARD: _plain(local_of(value), None, with_values)}
    if isinstance(value, dict):
        return {key: _plain(inner, parameter, with_values) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(inner, parameter, with_values) for inner in value]
        return items if isinstance(value, list) else tuple(items)
    return value.item() if isinstance(value, np.generic) else value


def _value_from_root(value: Any, parameter: torch.Tensor, root: int, group: Group) -> Rounds[Any]:
    """Return the root's value, with its tensors on the host or on the parameter's device."""
    content = None
    if group.rank == root:
        content = _saved(_plain(value, parameter))
    content = yield from _bytes_from_root(content, root, group)
    if group.rank == root:
        return value
    restore: Any = default_restore_location  # which has no types
    device = str(local_of(parameter).device)
    return _unpacked(content, lambda data, place: restore(data, place if place == "cpu" else device))


@torch.no_grad()
def _filled(sent: Any, present: Any, parameter: Any) -> Any:
    """Return the root's value, in this rank's tensors where they fit."""
    if isinstance(sent, torch.Tensor):
        present = local_of(present)
        fits = isinstance(present, torch.Tensor) and (present.dtype, present.shape) == (sent.dtype, sent.shape)
        fits = fits and present.layout == sent.layout == torch.strided and 0 not in present.stride()
        return present.copy_(sent) if fits else sent
    if isinstance(sent, dict):
        if sent.keys() == {_SHARD}:
            return shard_like(parameter, _filled(sent[_SHARD], present, None))
        known = present if isinstance(present, dict) else {}
        return {key: _filled(inner, known.get(key), parameter) for key, inner in sent.items()}
    if isinstance(sent, list | tuple):
        matches = isinstance(present, list | tuple) and len(present) == len(sent)
        pairs = zip(sent, present if matches else [None] * len(sent), strict=True)
        items = [_filled(inner, item, parameter) for inner, item in pairs]
        return items if isinstance(sent, list) else tuple(items)
    return sent
