"""Integers on a grid that all ranks share, which the transport sums."""

import math
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.dense_message import HEADER_BYTES, read_header, write_header
from mpicomp.collectives.scheme import Exchange, Result, Scheme, check_undamaged
from mpicomp.compressors.context import Context
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.kinds import SharedQuantiser
from mpicomp.compressors.wire_format import DAMAGED, STALE
from mpicomp.device import current_device, received_on_host, to_python
from mpicomp.errors import ConfigurationError, MessageError
from mpicomp.kernels import sizes
from mpicomp.registry import register
from mpicomp.rounds import Group, Round, Rounds

_BYTE, _WORD = np.dtype(np.uint8), np.dtype(np.uint64)
_MAX_SUM = 2**31 - 1  # largest value of a bit field: a wider field would take as many bits as a float32
_MAX_EXACT = 2**24 - 1  # largest integer up to which float32 represents every integer
_ENERGY_PARTS = 2.0**40
"""Parts of the total energy in which ranks send the energy they have lost, so that it is summed as integers too."""
_DAMAGED_PARTS = 2**47
"""Larger than the sum of all ranks' parts: a rank that could not read a header adds it to its own."""


@register
class IntegerSum(Scheme[SharedQuantiser]):
    """Allgatherv of norms, then an allreduce of integers that stand side by side in words of 64 bits.

    All ranks take the largest norm for the end of the grid. Every integer is as many bits wide as the sum over ranks
    needs, so that one 64-bit sum adds up to 64 of them and none can overflow, at any number of ranks. Integer sums are
    the same on every rank in whatever order a library takes them, and so is the mean.

    Where the compressor has several grids, each rank objects to the finer ones for elements that are too large for
    them, before they are rounded: an element goes on the finest grid to which nobody objects. That takes another
    allreduce, of objections.
    """

    id: ClassVar[str] = "integer-sum"
    paper: ClassVar[str] = (
        "the exchange of the max-norm quantisers, arXiv 2109.12497; bit fields as wide as the sum in place of 8, 16 or "
        "32 bits, elements are compared to the finer grids before they are rounded, which keeps them unbiased"
    )
    messages: ClassVar[str] = "integers"

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int = 0) -> list[Round]:
        limit, *finer = self.compressor.scales
        largest = 2 * limit * group.size
        if limit > _MAX_EXACT or largest > _MAX_SUM:
            raise ConfigurationError(
                f"integer-sum: integers up to {limit} from {group.size} ranks need fields of {largest.bit_length()} "
                f"bits, and 31 are the most; use fewer bits"
            )
        headers = Round("allgatherv", [HEADER_BYTES] * group.size, _BYTE)
        ask = Round("allreduce", (len(finer) * sizes.words_of(numel, group.size),), _WORD)
        add = Round("allreduce", (sizes.words_of(numel, largest) + 1,), _WORD)
        return [headers, ask, add] if finer else [headers, add]

    def exchange(self, accumulated: GradientWithResidual, context: Context) -> Exchange:
        group, workspace = context.group, context.workspace
        array, numel, dtype = accumulated.array(), accumulated.numel, accumulated.dtype
        scales = np.array(self.compressor.scales, np.float64)
        limit = self.compressor.scales[0]
        largest = 2 * limit * group.size
        headers, *asked, add = self.rounds(numel, dtype, group)
        moments = accumulated.device_moments

        headers.send = workspace.host_array("header", HEADER_BYTES, _BYTE)
        reach, energy, finite = to_python(self.compressor.reach(array), moments.energy, moments.finite)
        write_header(headers.send, numel, STALE * accumulated.stale, energy, reach, finite)
        headers.recv = workspace.host_array("headers", sum(headers.counts), _BYTE)
        flags, energy, norm, problem = _read((yield headers).reshape(group.size, -1), numel)

        steps = _clipped(norm, scales[-1] * group.size, dtype) / scales
        device, inverses = current_device(), (1 / steps).astype(dtype)
        levels = None
        if asked:
            levels = yield from self._levels(asked[0], array, inverses, context)

        words = workspace.array("words", add.counts[0], _WORD)
        sent = workspace.array("sent", numel, dtype)
        key = context.key(shared=False) if self.compressor.stochastic else None
        grids = device.to_device(inverses), device.to_device(steps.astype(dtype))
        [lost] = to_python(kernels.pack_fields(array, *grids, limit, largest, key, words[:-1], sent, levels))
        words[-1] = _parts_of(lost + accumulated.lost, energy, group.size) + _DAMAGED_PARTS * (problem is not None)
        add.send = words
        add.recv = workspace.array("sums", words.size, _WORD)
        sums = yield add
        of_parts = int(received_on_host(sums[-1:])[0])
        check_undamaged(self.id, DAMAGED * (of_parts >= _DAMAGED_PARTS), problem)

        mean = workspace.array("mean", numel, dtype)
        factors = device.to_device((steps / group.size).astype(dtype))
        kernels.unpack_fields(sums[:-1], factors, limit * group.size, largest, mean, levels)
        share = of_parts / _ENERGY_PARTS if math.isfinite(energy) else math.nan
        bad = not math.isfinite(norm)
        return Result.from_headers(mean, sent, float(numel), flags, energy, share * energy, bad)

    def _levels(
        self, ask: Round, array: NDArray[np.floating], inverses: NDArray[np.floating], context: Context
    ) -> Rounds[NDArray[np.uint8]]:
        """Return each element's grid."""
        workspace, ranks, limit = context.workspace, context.group.size, self.compressor.scales[0]
        width = sizes.words_of(array.size, ranks)
        objections = workspace.array("objections", ask.counts[0], _WORD)
        for level, inverse in enumerate(inverses[1:]):
            kernels.pack_out_of_range(array, inverse, limit, ranks, objections[level * width : (level + 1) * width])
        ask.send = objections
        ask.recv = workspace.array("objected", ask.counts[0], _WORD)
        objected = yield ask
        levels = workspace.array("levels", array.size, np.uint8)
        levels[:] = 0
        for level in range(1, inverses.size):
            kernels.resolve_levels(objected[(level - 1) * width : level * width], ranks, level, levels)
        return levels


def _clipped(norm: float, points: float, dtype: np.dtype[Any]) -> float:
    """Clip a norm so that a step, its inverse and all multiples of it are ordinary numbers; NaN if not finite."""
    limits = np.finfo(dtype)
    if not math.isfinite(norm):
        return math.nan
    return min(max(norm, points * float(limits.tiny)), float(limits.max) / 2)


def _read(messages: NDArray[np.uint8], numel: int) -> tuple[int, float, float, MessageError | None]:
    """Return the ranks' flags, their energy, the largest norm, and the error in one of their headers."""
    flags, energies, norms = 0, [], []
    problem: MessageError | None = None
    for rank, message in enumerate(messages):
        try:
            fields = read_header(message, numel)
        except MessageError as error:
            problem = problem or MessageError(f"integer-sum: from rank {rank}: {error}")
            continue
        flags |= fields[0]
        energies.append(fields[1])
        norms.append(fields[2])
    return flags, sum(energies), float(np.max(norms, initial=0.0)), problem


def _parts_of(lost: float, energy: float, ranks: int) -> int:
    """Return lost energy as parts of the total, so that the sum over ranks fits into 64 bits; 0 where it is unknown."""
    if not (energy > 0 and math.isfinite(energy) and lost >= 0):
        return 0
    return int(min(lost / energy * _ENERGY_PARTS, (_DAMAGED_PARTS - 1) // ranks))
