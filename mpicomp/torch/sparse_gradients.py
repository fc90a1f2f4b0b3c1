"""Sparse gradients of embeddings: the mean of the rows that ranks have."""

import numpy as np
import torch
from numpy.typing import NDArray

from mpicomp.collectives.sparse_rows import mean_of_rows
from mpicomp.rounds import Group, Rounds
from mpicomp.torch.named import as_real


def mean_of_sparse(
    gradient: torch.Tensor | None, parameter: torch.Tensor, factor: float, group: Group
) -> Rounds[tuple[NDArray[np.int64], NDArray[np.floating]] | None]:
    """Average a gradient of a parameter over the ranks by its rows, as rounds.

    Parameters
    ----------
    gradient : torch.Tensor or None
        This rank's, sparse or dense; None where it has none.
    parameter : torch.Tensor
        The parameter that the gradient belongs to.
    factor : float
        Factor of the rank's rows.
    group : Group
        The ranks.

    Returns
    -------
    (array of int64, array) or None
        Indices of the rows that any rank has, and their means; None where no rank has a gradient.
    """
    like = as_real(parameter.detach())
    work = torch.float64 if like.dtype == torch.float64 else torch.float32
    width = like[0].numel() if len(like) else 1
    indices, rows = None, torch.empty((0, width), dtype=work)
    if gradient is not None:
        if not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        gradient = gradient.coalesce()
        indices = gradient.indices()[0].cpu().numpy()
        rows = as_real(gradient.values()).to(device="cpu", dtype=work).reshape(-1, width) * factor
    return (yield from mean_of_rows(indices, rows.numpy(), group))


def as_sparse(
    mean: tuple[NDArray[np.int64], NDArray[np.floating]], parameter: torch.Tensor, skipped: bool
) -> torch.Tensor:
    """Return rows as a sparse gradient; zeros in a step that is skipped, in which they may not be finite."""
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
