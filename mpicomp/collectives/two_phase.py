"""Every rank owns a part of the array: ranks send it packed to the owner, which sends its mean to all, packed."""

import math
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.dense import OwnerRounds
from mpicomp.collectives.scheme import Exchange, Memory, Result, Scheme, failed_result
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base_compressor import Compressor
from mpicomp.compressors.context import Context
from mpicomp.compressors.kinds import CACHED_NUMEL, LARGEST_KEY, Packer, Quantiser, packers
from mpicomp.compressors.wire import HEADER_BYTES
from mpicomp.gpu import to_python
from mpicomp.kernels import cpu
from mpicomp.mpi.rounds import Group, Round, parts_of
from mpicomp.registry import register
from mpicomp.workspace import Workspace

_BYTE = np.dtype(np.uint8)


@register
class TwoPhase(Scheme[Quantiser]):
    """Alltoallv of packed parts, a mean in rank order by each part's owner, Allgatherv of the means, packed once more.

    About twice the packed array leaves a rank, whatever the number of ranks. The first packing's error stays
    with the sender. An owner's own share of its part enters the mean unpacked, so that its residual there is the second
    packing's error, times the number of ranks.
    """

    id: ClassVar[str] = "two-phase"
    precedence: ClassVar[int] = 10
    paper: ClassVar[str] = (
        "Seide et al. 2014 and the compressed allreduce of 1-bit Adam, Tang et al. 2021, arXiv 2102.02888; owners do "
        "not pack their own share, and their error, times the ranks, is part of the residual"
    )
    messages: ClassVar[str] = "packed"
    overwrites: ClassVar[bool] = True

    @classmethod
    def supports(cls, compressor: type[Compressor] | Compressor) -> bool:
        return super().supports(compressor) and compressor.averages

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        counts = [
            HEADER_BYTES + packer.packed_bytes for packer in packers(self.compressor, parts_of(numel, group.size))
        ]
        return [Round(operation, counts, _BYTE) for operation in ("alltoallv", "allgatherv")]

    def memory(self, numel: int, dtype: np.dtype[Any], group: Group) -> Memory:
        packed = packers(self.compressor, parts_of(numel, group.size))
        size = HEADER_BYTES + max(packer.packed_bytes for packer in packed)
        piece = max(packer.numel for whole in packed for *_, packer in whole.pieces)
        sent = 0 if all(packer.packs_in_place for packer in packed) else numel * dtype.itemsize
        return Memory((2 * group.size + 1) * size + 2 * piece * dtype.itemsize + sent, group.size * size)

    def exchange(self, accumulated: Accumulated, context: Context) -> Exchange:
        numel, workspace = accumulated.numel, context.workspace
        owners = OwnerRounds(self, accumulated, context)
        packed = packers(self.compressor, owners.counts)
        in_place = all(packer.packs_in_place for packer in packed) and accumulated.overwrite("residual")
        sent = None if in_place else workspace.scratch("sent", numel, accumulated.dtype)
        keys = [context.key(False, rank) for rank in range(context.group.size)]

        losses = [0.0] * len(packed)
        own_part = accumulated.memory[owners.span]
        for rank, (span, message, packer) in enumerate(zip(owners.spans, owners.outgoing, packed, strict=True)):
            out = message[HEADER_BYTES:]
            if rank == owners.rank:  # behind the header to itself stands nothing that is read
                accumulated.part(span.start, span.stop)
            elif sent is None:
                losses[rank] = packer.pack_in_place(accumulated, span.start, out, keys[rank])
            else:
                losses[rank] = packer.pack(accumulated.part(span.start, span.stop), out, sent[span], keys[rank])
        incoming = yield from owners.scatter(losses)

        own_sent = None
        if sent is not None:
            own_sent = sent[owners.span]
            own_sent[:] = own_part
        lost = self._average(packed[owners.rank], owners, incoming, own_part, own_sent, keys[owners.rank], workspace)
        finite = math.isfinite(lost)
        if not finite:  # squares of finite numbers overflow too, and are then not worth a fast answer
            with np.errstate(over="ignore", invalid="ignore"):
                finite = bool(np.isfinite(own_part if own_sent is None else own_part - own_sent).all())
        problem = yield from owners.gather(lost, finite, is_kept=True)
        if problem is not None:
            return failed_result(accumulated, problem, stale=False)

        def write(out: NDArray[np.floating]) -> None:
            for span, message, packer in zip(owners.spans, owners.replies, packed, strict=True):
                packer.unpack(message[HEADER_BYTES:], out[span])

        delivered = accumulated.array() if sent is None else sent
        return Result.from_headers(write, delivered, float(numel), owners.flags, owners.energy, owners.lost)

    def _average(
        self,
        packer: Packer,
        owners: OwnerRounds,
        incoming: NDArray[np.uint8],
        own_part: NDArray[np.floating],
        own_sent: NDArray[np.floating] | None,
        key: int,
        workspace: Workspace,
    ) -> float:
        """Pack the mean of an owner's part, subtract the error from its sent part, and return the lost energy.

        Without ``own_sent`` the residual takes the place of the part.
        """
        ranks, rank, dtype = len(owners.counts), owners.rank, own_part.dtype
        share, losses = 1 / ranks, []
        for elements, packed_bytes, number, quantiser in packer.pieces:
            piece = own_part[elements]
            total = workspace.scratch("total", quantiser.numel, dtype)
            np.multiply(piece, dtype.type(share), out=total)
            place = slice(HEADER_BYTES + packed_bytes.start, HEADER_BYTES + packed_bytes.stop)
            for others in (incoming[:rank], incoming[rank + 1 :]):
                quantiser.unpack_add_all(others, place.start, share, total)
            delivered = workspace.scratch("delivered", total.size, dtype)
            quantiser.pack(total, owners.reply[place], delivered, key + number & LARGEST_KEY)
            # This packing was of the mean: it took its error from every rank's share of it.
            chunk = CACHED_NUMEL if kernels.of(own_part) is cpu else max(1, total.size)
            for start in range(0, total.size, chunk):
                part = slice(start, start + chunk)
                owned = piece[part]
                sent = owned.copy() if own_sent is None else own_sent[elements][part]
                losses.append(kernels.share_rounding(total[part], delivered[part], ranks, owned, sent))
                if own_sent is None:
                    with np.errstate(over="ignore", invalid="ignore"):
                        np.subtract(owned, sent, out=owned)
        return float(sum(to_python(*losses)))
