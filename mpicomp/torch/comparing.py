"""Comparison of tensors that have to have the same values on all ranks."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpicomp.errors import DisagreementError, warn_user
from mpicomp.rounds import Group, Rounds, gather_rows
from mpicomp.torch.broadcast import as_bytes
from mpicomp.torch.named import MAX_NORM

_BYTE = np.dtype(np.uint8)
_DIGEST = 16  # bytes of a digest
_BATCH_STEPS = 2  # steps of which gradients are compared: the first of a task may be the same for all
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COMPARE_EVERY = 500
"""Exchanges from one comparison of replicas to the next, where nothing else is said: it costs under a thousandth."""

DRIFT_ADVICE = (
    "replicas have drifted apart: load the last checkpoint, and have all ranks write the same to parameters between "
    "steps"
)


def share(own: Any, group: Group) -> Rounds[NDArray[np.uint8]]:
    """Return everyone's bytes, of which all have equally many, a row for each rank. As rounds."""
    return (yield from gather_rows(np.asarray(own, _BYTE), group))


def check_same(tensors: Mapping[str, torch.Tensor], group: Group, subsystem: str, advice: str) -> Rounds[None]:
    """Make sure that all ranks have the same values, bit for bit. As rounds.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
        Of the same names, shapes and dtypes on all ranks.
    group : Group
        All ranks.
    subsystem, advice : str
        Start and end of the error message.

    Raises
    ------
    DisagreementError
        On all ranks where some tensor differs.
    """
    digests = np.frombuffer(b"".join(map(_digest, tensors.values())), _BYTE)
    everyones = (yield from share(digests, group)).reshape(group.size, len(tensors), _DIGEST)
    differs = (everyones != everyones[0]).any(axis=2)
    for name, ranks in zip(tensors, differs.T, strict=True):
        if ranks.any():
            others = ranks_named(np.flatnonzero(ranks).tolist())
            renormed = yield from share([_is_renormed(tensors[name])], group)
            hint = f". If it belongs to one: {MAX_NORM}" if renormed.any() else ""
            raise DisagreementError(
                f"{subsystem}: parameter '{name}' has other values on {others} than on rank 0; {advice}{hint}"
            )


class Fingerprint:
    """Compares replicas now and then, bit for bit, so that ranks which drift apart are found.

    Parameters are compared after steps 1, 2, 4, 8 ... and then after every so many. First a sum of all bits is
    compared, eight bytes a rank: one sweep over the parameters. With it, in the first steps, goes that of gradients:
    where they are the same on all ranks, so are the batches, and nothing is gained by their number.

    Parameters
    ----------
    every : int
        Most steps from one comparison to the next; 0 compares never.
    subsystem : str
        Start of messages.
    same_batches : bool
        Whether ranks are meant to compute the same gradients.
    """

    def __init__(self, every: int, subsystem: str, same_batches: bool = False) -> None:
        self.every = every
        self._subsystem = subsystem
        self.same_batches = same_batches
        self._steps = -1
        self._equal_gradients = 0  # steps in which all ranks had the same ones

    def look(
        self,
        tensors: Mapping[str, torch.Tensor],
        group: Group,
        gradients: Iterable[torch.Tensor] = (),
        advice: str = DRIFT_ADVICE,
    ) -> Rounds[None]:
        """Compare, if it is time to; once a step, before it is applied, on all ranks. As rounds; see `check_same`.

        Parameters
        ----------
        tensors : mapping of str to torch.Tensor
            The parameters.
        group : Group
            All ranks.
        gradients : iterable of torch.Tensor
            This rank's, before they are averaged; none where some rank has no batch.
        advice : str
            End of the error message.
        """
        self._steps += 1
        steps = self._steps
        early = steps <= self.every and steps & (steps - 1) == 0
        if not self.every or not steps or not (early or steps % self.every == 0) or group.size == 1:
            return
        tells_batches = steps <= _BATCH_STEPS and not self.same_batches
        sums = [sum_of_bits(tensors.values()), sum_of_bits(gradients) if tells_batches else np.int64(0)]
        everyones = (yield from share(np.array(sums).view(_BYTE), group)).copy().view(np.int64)
        if (everyones[:, 0] != everyones[0, 0]).any():
            yield from check_same(tensors, group, self._subsystem, advice)
        if tells_batches:
            self._equal_gradients += bool(everyones[0, 1] and (everyones[:, 1] == everyones[0, 1]).all())
            if self._equal_gradients == _BATCH_STEPS and group.rank == 0:
                warn_user(
                    f"{self._subsystem}: the gradients of all {group.size} ranks were the same in the first steps, bit "
                    "for bit, so all ranks draw the same batches and their number gains nothing; give each rank a "
                    "share of the data, as by torch.utils.data.DistributedSampler(dataset, ranks, rank), or seed what "
                    "draws batches by the rank. same_batches=True says that it is meant",
                )


def sum_of_bits(tensors: Iterable[torch.Tensor]) -> np.int64:
    """Return a number that differs, all but surely, where some tensor does."""
    sums = []
    for tensor in tensors:
        values = tensor.detach()
        values = values.coalesce().values() if values.is_sparse else values
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        sums.append(values.reshape(-1).view(_WORDS[values.element_size()]).sum(dtype=torch.int64))
    host = torch.stack([part.to(sums[0].device) for part in sums]).cpu().numpy() if sums else np.zeros(1, np.int64)
    with np.errstate(over="ignore"):  # sums wrap around
        return np.int64((host * np.arange(1, host.size + 1)).sum())


def _is_renormed(tensor: torch.Tensor) -> bool:
    """Whether many rows have one norm, as those that an Embedding with ``max_norm`` has looked up."""
    if tensor.dim() != 2 or not tensor.is_floating_point() or len(tensor) < 2:
        return False
    digits = (tensor.detach().double().norm(dim=1).log() * 1e5).round()
    _, counts = digits[digits.isfinite()].unique(return_counts=True)
    return counts.numel() > 0 and int(counts.max()) >= max(2, len(tensor) // 1000)


def ranks_named(ranks: list[int]) -> str:
    """Return some ranks for a message."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _digest(tensor: torch.Tensor) -> bytes:
    values = as_bytes(tensor.detach().cpu().contiguous())
    return hashlib.blake2b(values.data, digest_size=_DIGEST).digest()
