"""Broadcast of the root's parameters to every rank."""

from collections.abc import Generator, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpicomp.arrays import Described
from mpicomp.errors import ArrayTypeError, ConfigurationError, MpicompError
from mpicomp.reducer.agreement import Signature, agree
from mpicomp.rounds import Group, Round
from mpicomp.transport.connect import connect


def broadcast_parameters(
    model: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    root: int = 0,
    comm: Any = None,
) -> None:
    """Overwrite every rank's parameters and buffers with the root's, in place.

    Collective over ``comm``. Tensors of every dtype are sent, bit for bit.

    Parameters
    ----------
    model : torch.nn.Module, mapping or iterable of (name, tensor)
        A module stands for its parameters and persistent buffers (``model.state_dict()``).
    root : int
        The rank whose values are taken.
    comm : mpi4py.MPI.Comm, Transport or None
        None stands for MPI.COMM_WORLD.

    Raises
    ------
    DisagreementError
        Where names, dtypes or shapes differ between ranks, on all ranks before any data moves.
    ArrayTypeError, ConfigurationError
        For what is no tensor, and for a root that is no rank, on all ranks.
    """
    transport = connect(comm)
    try:
        if isinstance(model, torch.nn.Module):
            tensors = dict(model.state_dict())
        else:
            tensors = dict(model.items() if isinstance(model, Mapping) else model)
        transport.run(_rounds(tensors, root, transport.group))
    finally:
        if transport is not comm:
            transport.close()


def _rounds(tensors: Mapping[str, torch.Tensor], root: int, group: Group) -> Generator[Round, Any, None]:
    problem: MpicompError | None = None
    members = []
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            members.append(Described(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
        else:
            problem = ArrayTypeError(f"broadcast_parameters: '{name}' must be a tensor, got {type(tensor).__name__}")
    if not 0 <= root < group.size:
        problem = ConfigurationError(
            f"broadcast_parameters: root must be a rank from 0 to {group.size - 1}, got {root}"
        )
    signature = None if isinstance(problem, ArrayTypeError) else Signature({"root": root}, members)
    yield from agree(signature, problem, group, "broadcast_parameters")
    for tensor in tensors.values():
        if tensor.numel() == 0:
            continue
        mine = tensor.detach().cpu().contiguous()
        roots = torch.empty_like(mine)
        send, recv = (as_bytes(side) for side in (mine, roots))
        yield Round("bcast", (send.size,), np.dtype(np.uint8), root=root, send=send, recv=recv)
        if group.rank != root:
            with torch.no_grad():
                tensor.copy_(roots)


def as_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous tensor in host memory, not copied."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # what has one element is contiguous whatever its strides
    seen: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return seen
