"""Headers of messages to the owners of parts and of their answers, and the handling of damaged ones."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives.dense_message import read_header, read_headers
from mpicomp.collectives.scheme import check_undamaged
from mpicomp.compressors.wire_format import DAMAGED
from mpicomp.errors import MessageError


def read_sent(
    collective: str, messages: NDArray[np.uint8], count: int
) -> tuple[int, float, float, MessageError | None]:
    """Read the messages that an owner received.

    Parameters
    ----------
    collective : str
        Its name, for the error.
    messages : array of uint8, shape (ranks, bytes)
        One from each rank.
    count : int
        Elements of the owner's part.

    Returns
    -------
    flags : int
        Of all ranks, for the answer; `DAMAGED` where a message cannot be read.
    energy, lost : float
        Sums over ranks.
    problem : MessageError or None
        What is wrong.
    """
    try:
        return *read_headers(messages, count), None
    except MessageError as error:
        return DAMAGED, 0.0, 0.0, MessageError(f"{collective}: {error}")


def read_answers(
    collective: str,
    messages: NDArray[np.uint8],
    sizes: Sequence[int],
    counts: Sequence[int],
    problem: MessageError | None,
) -> tuple[int, float, float, MessageError | None]:
    """Read the answers of all owners.

    Parameters
    ----------
    collective : str
        Its name, for errors.
    messages : array of uint8
        One from each owner, one after the other.
    sizes, counts : sequence of int
        Bytes and elements of each.
    problem : MessageError or None
        The error that this rank has found as an owner.

    Returns
    -------
    flags, energy, lost : int, float, float
        Of all ranks.
    problem : MessageError or None
        What is wrong with one of them: the other ranks do not know of it.

    Raises
    ------
    MessageError
        On all ranks, where some owner was sent what it could not read.
    """
    flags, energy, lost, start = 0, 0.0, 0.0, 0
    unread: MessageError | None = None
    for rank, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        try:
            seen, energy, own_lost = read_header(messages[start : start + size], count)  # all say the same energy
            flags, lost = flags | seen, lost + own_lost
        except MessageError as error:
            unread = unread or MessageError(f"{collective}: from rank {rank}: {error}")
        start += size
    check_undamaged(collective, flags, problem)
    return flags, energy, lost, unread
