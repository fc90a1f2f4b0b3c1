"""Broadcast of the root's parameters to every rank."""

import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpicomp.arrays import Described
from mpicomp.errors import ArrayTypeError, ConfigurationError, MpicompError
from mpicomp.reducer.agreement import Signature, agree
from mpicomp.rounds import Group, Round, Rounds
from mpicomp.torch.named import is_sharded, pairs_of
from mpicomp.transport.connect import connect

_BYTE = np.dtype(np.uint8)
_SIZE = np.dtype(np.int64)
_WHO = "broadcast_parameters"
_ROWS = (torch.sparse_csr, torch.sparse_bsr)


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
        its modules (``get_extra_state``), which may consist of tensors, numbers, strings, dicts and lists.
    root : int
        The rank whose values are taken.
    comm : mpi4py.MPI.Comm, Transport or None
        None stands for MPI.COMM_WORLD.

    Raises
    ------
    DisagreementError
        Where names, dtypes, layouts or shapes differ between ranks, on all ranks before any data moves.
    ArrayTypeError, ConfigurationError
        For what is no tensor or has no values, such as parameters of lazy modules and on the device ``meta``; where
        there is nothing to send; for a root that is no rank. On all ranks.

    See Also
    --------
    mpicomp.torch.broadcast_optimizer_state
    """
    transport = connect(comm)
    try:
        transport.run(_rounds(model, root, transport.group))
    finally:
        if transport is not comm:
            transport.close()


def _rounds(model: Any, root: int, group: Group) -> Rounds[None]:
    problem: MpicompError | None = None
    members: list[Described] | None = None
    try:
        modules = dict(_modules_with_state(model))
        tensors = _tensors_of(model, modules)
        states = {name: _packed(name, module) for name, module in modules.items()} if group.rank == root else {}
        members = [Described(name, _kind(name, tensor), tuple(tensor.shape)) for name, tensor in tensors.items()]
        members += [Described(name, "extra state", ()) for name in modules]
    except MpicompError as error:
        problem = error
    problem = check_root(root, group, _WHO) or problem
    signature = None if members is None else Signature({"root": root}, members)
    yield from agree(signature, problem, group, _WHO)
    for tensor in tensors.values():
        if tensor.layout == torch.strided:
            yield from from_root(tensor, root, group)
        else:
            yield from _sparse_from_root(tensor, root, group)
    for name, module in modules.items():
        content = yield from bytes_from_root(states.get(name), root, group)
        if group.rank != root:
            module.set_extra_state(unpacked(content))


def check_root(root: int, group: Group, subsystem: str) -> ConfigurationError | None:
    """Return the error of a root that is no rank."""
    if 0 <= root < group.size:
        return None
    return ConfigurationError(f"{subsystem}: root must be a rank from 0 to {group.size - 1}, got {root}")


def from_root(tensor: torch.Tensor, root: int, group: Group) -> Rounds[None]:
    """Overwrite a strided tensor with the root's. As rounds."""
    if tensor.numel() == 0:
        return
    # One element stands for all along a dimension that was expanded.
    tensor = tensor.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    mine = tensor.cpu().contiguous()
    roots = torch.empty_like(mine)
    send, recv = (as_bytes(side) for side in (mine, roots))
    yield Round("bcast", (send.size,), _BYTE, root=root, send=send, recv=recv)
    if group.rank != root:
        with torch.no_grad():
            tensor.copy_(roots)


def bytes_from_root(content: bytes | None, root: int, group: Group) -> Rounds[bytes]:
    """Return the root's bytes, of which others need not know how many there are. As rounds."""
    leads = group.rank == root
    send = np.frombuffer(content or b"", _BYTE) if leads else None
    length = None if send is None else np.array([send.size], _SIZE)
    arrived = yield Round("bcast", (1,), _SIZE, root=root, send=length, recv=np.empty(1, _SIZE))
    size = int(arrived[0])
    content_of_root = yield Round("bcast", (size,), _BYTE, root=root, send=send, recv=np.empty(size, _BYTE))
    return bytes(content_of_root)


def packed(value: Any, subsystem: str, what: str, advice: str) -> bytes:
    """Return a value of tensors, numbers, strings, dicts and lists as bytes, which run no code when they are read."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        unpacked(file.getvalue())
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"{subsystem}: {what} must consist of tensors, numbers, strings, dicts and lists, and cannot be sent "
            f"({type(error).__name__}: {text:.80}); {advice}"
        ) from None
    return file.getvalue()


def unpacked(content: bytes) -> Any:
    """Return what `packed` was given."""
    return torch.load(io.BytesIO(content), weights_only=True)


def as_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous tensor in host memory, not copied unless it is conjugated or negated lazily."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # what has one element is contiguous whatever its strides
    seen: NDArray[np.uint8] = flat.resolve_conj().resolve_neg().view(torch.uint8).numpy()
    return seen


def _modules_with_state(model: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that have a state of more than parameters and buffers, by its name in ``state_dict()``."""
    if isinstance(model, torch.nn.Module):
        for name, module in model.named_modules():
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                yield f"{name}{'.' if name else ''}_extra_state", module


def _packed(name: str, module: torch.nn.Module) -> bytes:
    return packed(
        module.get_extra_state(), _WHO, f"'{name}'", "pass the model's tensors alone: model.named_parameters()"
    )


def _tensors_of(model: Any, modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return the tensors to send, or raise the error of what cannot be sent."""
    is_state = isinstance(model, Mapping) and {"state", "param_groups"} <= set(model)
    if isinstance(model, torch.optim.Optimizer) or is_state:
        raise ConfigurationError(
            f"{_WHO}: a model is needed, got {'the state of an optimizer' if is_state else type(model).__name__}; call "
            "mpicomp.torch.broadcast_optimizer_state(optimizer)"
        )
    if isinstance(model, torch.nn.Module):
        tensors = {name: value for name, value in model.state_dict(keep_vars=True).items() if name not in modules}
        advice = "models in a plain list or dict are not registered: use torch.nn.ModuleList or ModuleDict"
    else:
        pairs = pairs_of(model, _WHO, "pass the model, or model.named_parameters()")
        tensors = dict(pairs)
        if len(tensors) < len(pairs):
            raise ConfigurationError(f"{_WHO}: two tensors have the same name; names must differ")
        advice = (
            "an iterator such as model.named_parameters() is used up after its first use: pass it anew, or the model"
        )
    if not tensors and not modules:
        raise ConfigurationError(f"{_WHO}: there is no tensor to send; {advice}")
    return tensors


def _kind(name: str, tensor: Any) -> str:
    """Return the dtype and all else that has to be the same on all ranks but the shape."""
    if not isinstance(tensor, torch.Tensor):
        raise ArrayTypeError(
            f"{_WHO}: '{name}' must be a tensor, got {type(tensor).__name__}; pass the model's tensors alone: "
            "model.named_parameters()"
        )
    problem = None
    if torch.nn.parameter.is_lazy(tensor):
        problem = "has no shape yet; run one batch through the model, on all ranks, before its parameters are sent"
    elif is_sharded(tensor):
        problem = "is a DTensor, of which each rank holds a part; pass tensors that every rank holds as a whole"
    elif tensor.is_meta:
        problem = "is on the device 'meta' and has no values; call model.to_empty(device=...) first"
    elif tensor.is_quantized:
        problem = "is quantised; pass tensor.int_repr() and set scales on all ranks alike"
    if problem is not None:
        raise ConfigurationError(f"{_WHO}: '{name}' {problem}")
    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided:
        return f"{kind}, {str(tensor.layout).removeprefix('torch.')}"
    once = [axis for axis, stride in enumerate(tensor.stride()) if stride == 0 and tensor.shape[axis] > 1]
    return f"{kind} expanded along {once}" if once else kind


@torch.no_grad()
def _sparse_from_root(tensor: torch.Tensor, root: int, group: Group) -> Rounds[None]:
    """Overwrite a sparse tensor with the root's, which may have another number of elements. As rounds."""
    leads = group.rank == root
    parts = _parts(tensor) if leads else []
    said = [tensor.layout == torch.sparse_coo and tensor.is_coalesced(), [part.to("meta") for part in parts]]
    content = packed(said, _WHO, "a sparse tensor", "make it dense") if leads else None
    coalesced, like = unpacked((yield from bytes_from_root(content, root, group)))
    if not leads:
        parts = [torch.empty_like(part, device="cpu") for part in like]
    for part in parts:
        yield from from_root(part, root, group)
    if leads:
        return
    if tensor.layout == torch.sparse_coo:
        new = torch.sparse_coo_tensor(parts[0], parts[1], tensor.shape, is_coalesced=coalesced, check_invariants=True)
    else:
        new = torch.sparse_compressed_tensor(
            parts[0], parts[1], parts[2], tensor.shape, layout=tensor.layout, check_invariants=True
        )
        tensor.resize_as_sparse_(new.to(tensor.device))
    tensor.copy_(new)  # of a detached one it would reach neither indices nor values


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors that a sparse one consists of."""
    if tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in _ROWS:
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    else:
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [part.detach().cpu().contiguous() for part in parts]
