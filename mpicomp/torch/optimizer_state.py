"""Broadcast of the root's optimizer state to every rank."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from mpicomp.errors import ConfigurationError, MpicompError
from mpicomp.reducer.agreement import Signature, agree
from mpicomp.rounds import Group, Rounds
from mpicomp.torch.broadcast import bytes_from_root, check_root, from_root, packed, unpacked
from mpicomp.torch.exchanging import Exchanging
from mpicomp.torch.named import described, is_sharded
from mpicomp.torch.updating import Updating
from mpicomp.transport.connect import connect

_WHO = "broadcast_optimizer_state"
_NOT_SENT = ("params", "param_names")


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root: int = 0, comm: Any = None) -> None:
    """Make every rank's optimizer state the root's, bit for bit.

    Collective over ``comm``. A script that resumes loads its checkpoint on one rank, then calls this and
    `broadcast_parameters` on all of them: moments, step counters and settings of groups, such as the learning rate, are
    the root's then, also on ranks that have no state yet. Tensors of the same shape and dtype are overwritten in place.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        A plain one, or one that mpicomp has wrapped or made. Of these, residuals and the state of reducers stay as they
        are on each rank: on the root load a plain optimizer's state (``del state["mpicomp"]``), or load each rank's
        own. `OneBitAdam`, `SketchedAMSGrad` and `UpdateOptimizer` take over the number of steps.
    root : int
        The rank whose state is taken.
    comm : mpi4py.MPI.Comm, Transport or None
        None stands for MPI.COMM_WORLD.

    Raises
    ------
    DisagreementError
        Where the class of the optimizer, the number of groups, or parameters differ between ranks, before any data
        moves.
    ConfigurationError
        For what is no optimizer, or has a state that cannot be sent; on all ranks.
    """
    transport = connect(comm)
    try:
        transport.run(_rounds(optimizer, root, transport.group))
    finally:
        if transport is not comm:
            transport.close()


def _rounds(optimizer: Any, root: int, group: Group) -> Rounds[None]:
    problem: MpicompError | None = None
    signature, content, leads = None, None, group.rank == root
    own: dict[str, Any] = {}
    try:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(f"{_WHO}: a torch optimizer is needed, got {type(optimizer).__name__}")
        signature = _signature(optimizer, root)
        own = _state_of(optimizer)
        if leads:
            tensors = list(_leaves(own))
            for tensor in tensors:
                if tensor.layout != torch.strided or is_sharded(tensor):
                    raise ConfigurationError(f"{_WHO}: state tensors must be dense and whole, got {tensor.layout}")
            on_host = [tensor.device.type == "cpu" for tensor in tensors]
            what = f"the state of {type(optimizer).__name__}"
            content = packed([on_host, _skeleton(own)], _WHO, what, "load the checkpoint on every rank")
    except MpicompError as error:
        problem = error
    yield from agree(signature, check_root(root, group, _WHO) or problem, group, _WHO)
    hosts, like = unpacked((yield from bytes_from_root(content, root, group)))
    places = iter(hosts)
    groups = []
    for settings, mine in zip(like["groups"], own["groups"], strict=True):
        groups.append((yield from _filled(settings, mine, torch.device("cpu"), places, root, group)))
    states = []
    for (_, parameter), state, mine in zip(_members(optimizer), like["states"], own["states"], strict=True):
        states.append((yield from _filled(state, mine, parameter.device, places, root, group)))
    if leads:
        return
    for member, settings in zip(optimizer.param_groups, groups, strict=True):
        member.update(settings)
    for (_, parameter), filled in zip(_members(optimizer), states, strict=True):
        if filled is None:
            optimizer.state.pop(parameter, None)
        else:
            optimizer.state[parameter] = filled
    if isinstance(optimizer, Exchanging):
        optimizer.steps = like["steps"]
    elif isinstance(optimizer, Updating):
        optimizer._mpicomp_steps, optimizer._mpicomp_every = like["steps"], like["sync_every"]


def _members(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"param_groups[{at}]['params'][{place}]", parameter)
        for at, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    ]


def _signature(optimizer: torch.optim.Optimizer, root: int) -> Signature:
    settings = {"root": root, "class of the optimizer": type(optimizer).__name__}
    sizes = {"len(param_groups)": len(optimizer.param_groups)}
    return Signature(settings | sizes, described(dict(_members(optimizer))))


def _state_of(optimizer: Any) -> dict[str, Any]:
    """Return all that is sent, as the optimizer holds it."""
    state: dict[str, Any] = {
        "groups": [
            {key: value for key, value in group.items() if key not in _NOT_SENT} for group in optimizer.param_groups
        ],
        "states": [optimizer.state.get(parameter) for _, parameter in _members(optimizer)],
    }
    if isinstance(optimizer, Exchanging):
        state["steps"] = optimizer.steps
    elif isinstance(optimizer, Updating):
        if any(part.under_way for part in optimizer._mpicomp_parts):
            raise ConfigurationError(f"{_WHO}: an exchange is under way; call synchronize() on all ranks first")
        state |= {"steps": optimizer._mpicomp_steps, "sync_every": optimizer._mpicomp_every}
    return state


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dicts, lists and tuples, in one order on all ranks."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)


def _skeleton(value: Any) -> Any:
    """Return a copy whose tensors have no values."""
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, dict):
        return {key: _skeleton(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_skeleton(inner) for inner in value] if isinstance(value, list) else tuple(map(_skeleton, value))
    return value.item() if isinstance(value, np.generic) else value


def _filled(like: Any, own: Any, device: torch.device, on_host: Iterator[bool], root: int, group: Group) -> Rounds[Any]:
    """Return the root's value, in the tensors that this rank has already where they fit. As rounds."""
    if isinstance(like, torch.Tensor):
        host = next(on_host)
        fits = isinstance(own, torch.Tensor) and (own.dtype, own.shape) == (like.dtype, like.shape)
        if not fits or own.layout != torch.strided or 0 in own.stride():
            own = own if group.rank == root else torch.empty_like(like, device="cpu" if host else device)
        yield from from_root(own, root, group)
        return own
    if isinstance(like, dict):
        mine = own if isinstance(own, dict) else {}
        members: dict[Any, Any] = {}
        for key, inner in like.items():
            members[key] = yield from _filled(inner, mine.get(key), device, on_host, root, group)
        return members
    if isinstance(like, list | tuple):
        known = list(own) if isinstance(own, list | tuple) and len(own) == len(like) else [None] * len(like)
        items = []
        for inner, one in zip(like, known, strict=True):
            items.append((yield from _filled(inner, one, device, on_host, root, group)))
        return items if isinstance(like, list) else tuple(items)
    return like
