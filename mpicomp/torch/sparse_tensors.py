"""Sparse tensors: means of rows, and the dense tensors that one consists of."""

import numpy as np
import torch
from numpy.typing import NDArray

from mpicomp.collectives.rows import mean_of_rows
from mpicomp.rounds import Group, Rounds
from mpicomp.torch.arguments import as_real

Rows = tuple[NDArray[np.int64], NDArray[np.floating]]  # indices and values


def mean_of_sparse(
    gradient: torch.Tensor | None, parameter: torch.Tensor, factor: float, group: Group
) -> Rounds[Rows | None]:
    """Return the mean of the ranks' rows times their factors, of sparse or dense gradients; None without any."""
    like = as_real(parameter.detach())
    work = torch.float64 if like.dtype == torch.float64 else torch.float32
    width = like[0].numel() if len(like) else 1
    indices, rows = None, torch.empty((0, width), dtype=work)
    if gradient is not None:
        gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
        indices = gradient.indices()[0].cpu().numpy()
        rows = as_real(gradient.values()).to(device="cpu", dtype=work).reshape(-1, width) * factor
    return (yield from mean_of_rows(indices, rows.numpy(), group))


def as_sparse(mean: Rows, parameter: torch.Tensor, skipped: bool) -> torch.Tensor:
    """Return rows as a sparse gradient, with zeros in a skipped step, where they may not be finite."""
    indices, rows = mean
    like = as_real(parameter.detach())
    values = torch.from_numpy(np.zeros_like(rows) if skipped else rows).reshape(-1, *like.shape[1:]).to(like.dtype)
    return torch.sparse_coo_tensor(
        torch.from_numpy(indices)[None],
        torch.view_as_complex(values) if parameter.is_complex() else values,
        parameter.shape,
        device=parameter.device,
        is_coalesced=True,
        check_invariants=True,
    )


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors in host memory that a tensor consists of."""
    if tensor.layout == torch.strided:
        parts = [tensor]
    elif tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    else:
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [part.detach().cpu().contiguous() for part in parts]


def gradient_parts(gradient: torch.Tensor | None) -> list[torch.Tensor]:
    """Return no tensor for None, a dense gradient, or indices and values of a sparse one."""
    if gradient is None:
        return []
    return dense_parts(gradient.detach().coalesce() if gradient.is_sparse else gradient)


def gradient_of_parts(parts: list[torch.Tensor], parameter: torch.Tensor) -> torch.Tensor | None:
    """Undo `gradient_parts`, on the parameter's device."""
    if not parts:
        return None
    moved = [part.to(parameter.device) for part in parts]
    if len(moved) == 1:
        return moved[0]
    return torch.sparse_coo_tensor(moved[0], moved[1], parameter.shape, is_coalesced=True, check_invariants=True)
