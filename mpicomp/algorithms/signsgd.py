"""SignSGD: signs alone travel; owners of parts count the votes of all ranks and send back the majority."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpicomp import kernels
from mpicomp.collectives.dense_message import HEADER_BYTES, write_header
from mpicomp.collectives.regions import read_answers, read_sent
from mpicomp.collectives.scheme import Exchange, Result, Scheme, undelivered
from mpicomp.compressors.base_compressor import Compressor
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.wire_format import NONFINITE, STALE
from mpicomp.errors import ConfigurationError
from mpicomp.registry import register
from mpicomp.rounds import Group, Round, parts_of
from mpicomp.setting_checks import is_number

_LARGEST = float(np.finfo(np.float32).max)


@register
@dataclass(frozen=True, repr=False)
class SignSGD(Compressor):
    """signSGD with majority vote (arXiv 1810.05291): each rank votes with its signs, the sign that wins is delivered.

    ::

        votes = sum(np.where(np.signbit(x), -1, 1) for x in ranks)
        sent = scale * np.where(votes >= 0, 1, -1)

    Parameters
    ----------
    scale : float
        ``scale`` or ``-scale`` is delivered, whatever the size of the gradients.

    Notes
    -----
    Every element moves by the same amount in every step, so the learning rate has to be far smaller than for gradients:
    start from that of Adam, 0.001 or less, or set ``scale`` to a typical magnitude of a gradient. Elements that are
    always zero move too: a zero counts as plus, as does a tie. A negative zero counts as minus, by its sign bit.

    There is no error feedback: magnitudes do not travel, so the lost part of an element is unknown. `OneBit`
    sends magnitudes with the signs, and has it.
    """

    id: ClassVar[str] = "signsgd"
    family: ClassVar[str] = "quantiser"
    message: ClassVar[str] = "votes"
    paper: ClassVar[str] = (
        "signSGD with majority vote, Bernstein et al. 2018, arXiv 1802.04434 and 1810.05291; momentum is left to the "
        "optimizer, a tie is plus"
    )

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not is_number(self.scale) or not 0 < self.scale <= _LARGEST:
            raise ConfigurationError(
                f"signsgd: scale must be a positive number, got {self.scale!r}; at most {_LARGEST!r}, as a float32"
            )
        self._set(scale=float(self.scale))

    feedback = False  # without magnitudes the sent part of an element is unknown
    can_fall_back_to_dense = False  # signs have one size, whatever that of gradients

    contractive = False  # delivered values may be many times as large as the gradient

    def wire_bytes_per_element(self, itemsize: int) -> float:
        return 1 / 8


_BYTE, _WORD = np.dtype(np.uint8), np.dtype(np.uint64)
_SIGNS = 64  # signs in a word


@register
class MajorityVote(Scheme[SignSGD]):
    """Alltoallv of signs, a count by each part's owner, Allgatherv of the signs that have won.

    About two bits an element leave a rank, whatever the number of ranks. The mean is each rank's share. The gain is
    NaN, as magnitudes do not travel.
    """

    id: ClassVar[str] = "majority-vote"
    paper: ClassVar[str] = (
        "majority vote, Bernstein et al. 2018, arXiv 1810.05291; counted by an owner for each part in place of a "
        "server, as in 1-bit Adam's exchange"
    )
    messages: ClassVar[str] = "votes"

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        parts = parts_of(-(-numel // _SIGNS), group.size)
        counts = [HEADER_BYTES + count * _WORD.itemsize for count in parts]
        return [Round(operation, counts, _BYTE) for operation in ("alltoallv", "allgatherv")]

    def exchange(self, accumulated: GradientWithResidual, context: Context) -> Exchange:
        # 1. Pack the signs, a bit each, and send every rank its part of them.
        group, numel, dtype = context.group, accumulated.numel, accumulated.dtype
        workspace = context.workspace
        scatter, gather = self.rounds(numel, dtype, group)
        places = np.concatenate(([0], np.cumsum(scatter.counts)))
        parts = parts_of(-(-numel // _SIGNS), group.size)
        bounds = np.concatenate(([0], np.cumsum(parts)))

        signs = workspace.array("signs", bounds[-1], _WORD)
        kernels.pack_votes(accumulated.array(), signs)
        moments = accumulated.device_moments
        outgoing = workspace.array("outgoing", places[-1], _BYTE)
        for rank in range(group.size):
            message = outgoing[places[rank] : places[rank + 1]]
            write_header(message, parts[rank], STALE * accumulated.stale, moments.energy, 0.0, moments.finite)
            message[HEADER_BYTES:].view(_WORD)[:] = signs[bounds[rank] : bounds[rank + 1]]
        size = scatter.counts[group.rank]
        scatter.send = outgoing
        scatter.recv = workspace.array("incoming", size * group.size, _BYTE)
        incoming = (yield scatter).reshape(group.size, size)

        # 2. Count the votes of all ranks in this part, and send the majority to all ranks.
        flags, energy, _, problem = read_sent(self.id, incoming, parts[group.rank])
        reply = workspace.array("reply", size, _BYTE)
        kernels.majority(incoming.view(_WORD), reply.view(_WORD))  # of the headers too, which are written below
        write_header(reply, parts[group.rank], flags, energy, 0.0)
        gather.send = reply
        gather.recv = workspace.array("replies", places[-1], _BYTE)
        replies = yield gather

        # 3. Assemble the parts: the update is the majority times the scale.
        flags, energy, _, problem = read_answers(self.id, replies, scatter.counts, parts, problem)
        if problem is not None:
            return undelivered(accumulated, problem, stale=False)
        for rank in range(group.size):
            message = replies[places[rank] : places[rank + 1]]
            signs[bounds[rank] : bounds[rank + 1]] = message[HEADER_BYTES:].view(_WORD)
        mean = workspace.array("mean", numel, dtype)
        kernels.unpack_votes(signs, self.compressor.scale, mean)
        return Result(
            mean=mean,
            sent=mean,
            energy=energy,
            gain=math.nan,
            kept=float(numel),
            nonfinite=bool(flags & NONFINITE),
            stale=bool(flags & STALE),
        )
