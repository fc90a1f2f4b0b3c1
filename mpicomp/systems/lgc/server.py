"""Exchange of one rank's code for all ranks, with each rank's innovation on it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.scheme import Result, check_undamaged, failed_result, far_from_largest, gain_of, mean_at
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base_compressor import num_kept
from mpicomp.compressors.context import Context
from mpicomp.compressors.wire import (
    DAMAGED,
    NONFINITE,
    STALE,
    Selection,
    Wire,
    compact,
    read_sparse,
    sparse_bytes,
    write_damaged,
    write_sparse,
)
from mpicomp.errors import MessageError
from mpicomp.gpu import received_on_host, to_python
from mpicomp.mpi.rounds import Group, Round, Rounds
from mpicomp.systems.lgc.autoencoder import Autoencoder
from mpicomp.systems.lgc.compressor import LGC
from mpicomp.systems.lgc.leader_message import Frame, LeaderMessage, ReceivedSelection, leader_of, share_selection
from mpicomp.systems.lgc.ring import product

_BYTE = np.dtype(np.uint8)
_FACTOR = 8  # bytes


class CodeServer:
    """The third phase of LGC, instance of the parameter server, without a server.

    A bcast of one rank's indices, of the divisors of values, and of its code; every rank decodes it with each rank's
    decoder. Then an allgatherv of each rank's factor for its decoded values, its uncoded values, and its innovation:
    the exact values at which decoding is most wrong. So all ranks know each one's sent values, and average them.
    """

    def __init__(self, compressor: LGC, code: Autoencoder) -> None:
        self._compressor = compressor
        self._code = code

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int) -> list[Round]:
        lead = self._lead(numel, dtype)
        return [lead.round(leader_of(Context(group=group, step=step))), self._gather(lead, dtype, group)]

    def exchange(self, accumulated: Accumulated, context: Context) -> Rounds[tuple[Result, float]]:
        group, workspace, dtype = context.group, context.workspace, accumulated.dtype
        lead = self._lead(accumulated.numel, dtype)
        coded, count = lead.selected.coded, lead.selected.coded_count
        self._code.begin_step(context.step)
        # 1. One rank, drawn at random, broadcasts its indices, the divisors of values, and the code of its values.
        received = yield from share_selection(lead, accumulated, context, self._code)
        common = received.code[: lead.code_bytes].view(dtype)

        task = self._gather(lead, dtype, group)
        task.send = workspace.array("message", task.counts[0], _BYTE)
        task.recv = workspace.array("messages", sum(task.counts), _BYTE)
        if received.problem is not None:
            write_damaged(self._cut(lead, task.send, dtype)[2])
            yield task
            check_undamaged("learned", DAMAGED, received.problem)
        # 2. Decode it by this rank's decoder, and select the innovation: the values with the largest errors.
        decoded = workspace.array("decoded", count, dtype)
        self._decode(common, group.rank, received, decoded)
        missed, coded_energy = self._write(lead, received, decoded, accumulated, context, task.send)
        # 3. Gather factors, innovations and uncoded values; decode for every rank, and average.
        messages = yield task

        mean, sent = (workspace.array(f"learned {name}", received.values.size, dtype) for name in ("mean", "sent"))
        values = workspace.array("relative", received.values.size, dtype)
        mean[:] = 0
        flags, energy, lost = 0, 0.0, 0.0
        unread: MessageError | None = None
        for rank, message in enumerate(messages.reshape(group.size, -1)):
            stored, uncoded, sparse = self._cut(lead, message, dtype)
            self._decode(common, rank, received, values[coded])
            try:
                parsed = read_sparse(sparse, count, dtype, workspace, self._innovations(lead))
            except MessageError as error:
                unread = unread or MessageError(f"learned: from rank {rank}: {error}")
                continue
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                np.multiply(values[coded], dtype.type(received_on_host(stored)[0]), out=values[coded])
                values[coded][parsed.selection.indices] = parsed.selection.values
                values[: coded.start] = uncoded[: coded.start]
                values[coded.stop :] = uncoded[coded.start :]
                np.add(mean, values, out=mean)
            if rank == group.rank:
                sent[:] = values
            flags, energy, lost = flags | parsed.flags, energy + parsed.energy, lost + parsed.lost
            # A rank's values and residual are finite with these energies; all ranks find the same result.
            flags |= NONFINITE * (not far_from_largest(parsed.energy + parsed.lost, dtype))
        check_undamaged("learned", flags, None)
        if unread is not None:
            return failed_result(accumulated, unread, stale=False), 1.0
        with np.errstate(under="ignore", invalid="ignore"):
            np.multiply(mean, dtype.type(1 / group.size), out=mean)
        [mean_finite] = to_python(np.isfinite(mean).all())
        result = Result(
            mean=mean_at(received.indices, mean),
            sent=Selection(received.indices, received.values if self._compressor.error == "selected" else sent),
            energy=energy,
            gain=gain_of(lost, energy),
            kept=float(received.values.size),
            nonfinite=bool(flags & NONFINITE) or not mean_finite,
            stale=bool(flags & STALE),
        )
        return result, 1 - gain_of(missed, coded_energy)  # of this rank's values, innovation included

    def _decode(
        self, common: NDArray[np.floating], rank: int, received: ReceivedSelection, out: NDArray[np.floating]
    ) -> None:
        self._code.decode(common, out, rank)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            np.multiply(out, received.divisors, out=out)

    def _write(
        self,
        lead: LeaderMessage,
        received: ReceivedSelection,
        decoded: NDArray[np.floating],
        accumulated: Accumulated,
        context: Context,
        message: NDArray[np.uint8],
    ) -> tuple[float, float]:
        workspace, dtype, coded = context.workspace, accumulated.dtype, lead.selected.coded
        values = received.values[coded]
        missed = workspace.array("missed", values.size, dtype)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            match, energy = map(float, to_python(product(values, decoded), kernels.energy(decoded)))
            best = match / energy if match > 0 and energy > 0 else 0.0  # loses least on this rank
            factor = dtype.type(1.0 if self._compressor.published else best)
            np.multiply(decoded, factor, out=missed)
            np.subtract(values, missed, out=missed)
        places = workspace.array("innovation.places", self._innovations(lead), np.uint32)
        off, innovation = (workspace.array(f"innovation.{name}", places.size, dtype) for name in ("off", "values"))
        kernels.select_largest(missed, kernels.kth_magnitude(missed, places.size), places, off)
        kernels.gather(values, places, innovation)
        # Lost are the energies of unlisted elements and of the errors of coded ones outside of the innovation.
        energies = (kernels.energy(array) for array in (missed, off, received.values, values))
        missed_energy, off_energy, listed_energy, coded_energy = to_python(*energies)
        left_out = max(missed_energy - off_energy, 0.0)  # NaN stays

        stored, uncoded, sparse = self._cut(lead, message, dtype)
        stored[0] = factor
        uncoded[: coded.start] = received.values[: coded.start]
        uncoded[coded.start :] = received.values[coded.stop :]
        flags, moments = STALE * accumulated.stale, accumulated.device_moments
        arguments = flags, moments.energy, listed_energy - left_out, moments.finite
        write_sparse(sparse, Selection(places, innovation), values.size, self._wire(lead), *arguments)
        return left_out, coded_energy

    def _lead(self, numel: int, dtype: np.dtype[Any]) -> LeaderMessage:
        selected = self._compressor.selected(numel)
        length = self._code.length(selected.coded_count)
        return LeaderMessage(selected, numel, Frame(selected, self._compressor.signs), length * dtype.itemsize)

    def _innovations(self, lead: LeaderMessage) -> int:
        return num_kept(self._compressor.innovation, lead.selected.coded_count)

    def _wire(self, lead: LeaderMessage) -> Wire:
        return Wire(None, compact(self._innovations(lead), lead.selected.coded_count))

    def _gather(self, lead: LeaderMessage, dtype: np.dtype[Any], group: Group) -> Round:
        innovation = sparse_bytes(self._innovations(lead), lead.selected.coded_count, dtype, self._wire(lead))
        return Round("allgatherv", [_FACTOR + _uncoded_bytes(lead, dtype) + innovation] * group.size, _BYTE)

    def _cut(
        self, lead: LeaderMessage, message: NDArray[np.uint8], dtype: np.dtype[Any]
    ) -> tuple[NDArray[np.float64], NDArray[np.floating], NDArray[np.uint8]]:
        middle = _FACTOR + _uncoded_bytes(lead, dtype)
        uncoded = message[_FACTOR:middle].view(dtype)[: lead.selected.count - lead.selected.coded_count]
        return message[:_FACTOR].view(np.float64), uncoded, message[middle:]


def _uncoded_bytes(lead: LeaderMessage, dtype: np.dtype[Any]) -> int:
    return -(-(lead.selected.count - lead.selected.coded_count) * dtype.itemsize // 8) * 8
