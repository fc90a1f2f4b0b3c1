"""Comparison of tensors that have to have the same values on all ranks."""

import hashlib
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpicomp.errors import ConfigurationError, DisagreementError
from mpicomp.rounds import Asked, Group, Round
from mpicomp.torch.broadcast import as_bytes
from mpicomp.torch.named import MAX_NORM

_BYTE = np.dtype(np.uint8)
_DIGEST = 16  # bytes of a digest
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COMPARE_EVERY = 500
"""Exchanges from one comparison of replicas to the next, where nothing else is said: it costs under a thousandth."""


def share(own: Any, group: Group) -> Generator[Asked, Any, NDArray[np.uint8]]:
    """Return everyone's bytes, of which all have equally many, a row for each rank. As rounds."""
    send = np.asarray(own, _BYTE)
    everyones = yield Round(
        "allgatherv", [send.size] * group.size, _BYTE, send=send, recv=np.empty(group.size * send.size, _BYTE)
    )
    told: NDArray[np.uint8] = everyones.reshape(group.size, -1)
    return told


def check_same(
    tensors: Mapping[str, torch.Tensor], group: Group, subsystem: str, advice: str
) -> Generator[Asked, Any, None]:
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
            others = np.flatnonzero(ranks).tolist()
            renormed = yield from share([_is_renormed(tensors[name])], group)
            hint = f". If it belongs to one: {MAX_NORM}" if renormed.any() else ""
            raise DisagreementError(
                f"{subsystem}: parameter '{name}' has other values on {_named(others)} than on rank 0; {advice}{hint}"
            )


class Fingerprint:
    """Compares the parameters of replicas now and then, bit for bit, so that ranks which drift apart are found.

    What is compared first is a sum of all bits, eight bytes a rank: one sweep over the parameters.

    Parameters
    ----------
    every : int
        Exchanges from one comparison to the next; 0 compares never.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._exchanges = 0

    def look(self, tensors: Mapping[str, torch.Tensor], group: Group, subsystem: str) -> Generator[Asked, Any, None]:
        """Compare, if it is time to; once an exchange, on all ranks. As rounds; see `check_same`."""
        self._exchanges += 1
        if not self.every or self._exchanges % self.every or group.size == 1:
            return
        everyones = yield from share(np.array([_sum_of_bits(tensors.values())]).view(_BYTE), group)
        if (everyones != everyones[0]).any():
            yield from check_same(
                tensors,
                group,
                subsystem,
                "replicas have drifted apart: load the last checkpoint, and have all ranks write the same to "
                "parameters between steps",
            )


def check_every(subsystem: str, every: Any) -> int:
    """Return a setting for `Fingerprint`, or say what is wrong with it."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise ConfigurationError(f"{subsystem}: compare_every must be a whole number of at least 0, got {every!r}")
    return every


def _sum_of_bits(tensors: Iterable[torch.Tensor]) -> np.int64:
    """Return a number that differs, all but surely, where some tensor does."""
    sums = []
    for tensor in tensors:
        own = tensor.detach()
        own = torch.view_as_real(own) if own.is_complex() else own
        sums.append(own.reshape(-1).view(_WORDS[own.element_size()]).sum(dtype=torch.int64))
    host = torch.stack([own.to(sums[0].device) for own in sums]).cpu().numpy() if sums else np.zeros(1, np.int64)
    with np.errstate(over="ignore"):  # sums wrap around
        return np.int64((host * np.arange(1, host.size + 1)).sum())


def _is_renormed(tensor: torch.Tensor) -> bool:
    """Whether many rows have one norm, as those that an Embedding with ``max_norm`` has looked up."""
    if tensor.dim() != 2 or not tensor.is_floating_point() or len(tensor) < 2:
        return False
    digits = (tensor.detach().double().norm(dim=1).log() * 1e5).round()
    _, counts = digits[digits.isfinite()].unique(return_counts=True)
    return counts.numel() > 0 and int(counts.max()) >= max(2, len(tensor) // 1000)


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _digest(tensor: torch.Tensor) -> bytes:
    values = as_bytes(tensor.detach().cpu().contiguous())
    return hashlib.blake2b(values.data, digest_size=_DIGEST).digest()
