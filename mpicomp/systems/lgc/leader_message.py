"""The leading rank's message before values travel: its indices, and the scales and signs that values are divided by."""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import inf, isfinite, sqrt

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.context import Context
from mpicomp.compressors.topk import largest_of_parts
from mpicomp.compressors.wire import compact
from mpicomp.errors import MessageError
from mpicomp.gpu import current_device, received_on_host, to_python
from mpicomp.mpi.rounds import Round, Rounds
from mpicomp.systems.lgc.autoencoder import Autoencoder
from mpicomp.systems.lgc.compressor import Selected, index_bytes
from mpicomp.workspace import Workspace

_BYTE = np.dtype(np.uint8)
_MAX_SCALED = 100.0  # times a layer's scale: larger values are clipped to it before coding, so that no code overflows
_WORD_SIGNS = 64


class Frame:
    """The divisors of coded values: a scale for each layer, with the signs of the leader's values if these travel."""

    def __init__(self, selected: Selected, signs: bool) -> None:
        first = selected.coded.start
        self.layers = [slice(place.start - first, place.stop - first) for place in selected.coded_layers]
        ends = list(accumulate(-(-(layer.stop - layer.start) // _WORD_SIGNS) * signs for layer in self.layers))
        self.signs = signs
        self.count = selected.coded_count
        self.num_words = ends[-1] if ends else 0
        self._words = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]  # of signs, by layer

    def pack(self, values: NDArray[np.floating], words: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Return the root mean square of each layer's values, in host memory, and write their signs."""
        scales = np.ones(len(self.layers))
        energies = [kernels.energy(values[layer]) for layer in self.layers]
        for layer, place in zip(self.layers, self._words, strict=True) if self.signs else ():
            kernels.pack_votes(values[layer], words[place])
        for number, energy in enumerate(current_device().to_host(np.stack(energies)).tolist()):
            numel = self.layers[number].stop - self.layers[number].start
            scale = float(values.dtype.type(sqrt(energy / numel))) if isfinite(energy) else 0.0
            scales[number] = scale if scale > 0 else 1.0
        return scales

    def unpack(self, scales: NDArray[np.float64], words: NDArray[np.uint64], out: NDArray[np.floating]) -> None:
        """Write the divisors to ``out``."""
        for layer, place, scale in zip(self.layers, self._words, scales.tolist(), strict=True):
            if self.signs:
                kernels.unpack_votes(words[place], scale, out[layer])
            else:
                out[layer] = scale

    def divisors(self, values: NDArray[np.floating], out: NDArray[np.floating]) -> None:
        """Write the divisors as if a rank with these values were the leader."""
        words = np.empty(self.num_words, np.uint64)
        self.unpack(self.pack(values, words), words, out)


def relative(values: NDArray[np.floating], divisors: NDArray[np.floating], out: NDArray[np.floating]) -> None:
    """Divide values by a frame's divisors, and clip the results to `_MAX_SCALED`; infinity too, but not NaN."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        np.divide(values, divisors, out=out)
    np.clip(out, -_MAX_SCALED, _MAX_SCALED, out=out)


@dataclass(frozen=True)
class LeaderMessage:
    """The leading rank's message.

    Parts follow each other, each a multiple of 8 bytes: for each coded layer the scale of its values, a float64; for
    each coded layer the signs of its values, in words of 64; the leader's code; the indices of all elements but those
    that travel dense, see `mpicomp.systems.lgc.compressor.index_bytes`.
    """

    selected: Selected
    numel: int  # length of the bucket
    frame: Frame | None = None  # None if no scales travel
    code_bytes: int = 0  # 0 if no code travels

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Bytes of scales, signs, code and indices."""
        indices = index_bytes(self.selected.indices, self.numel)
        scales, words = (len(self.frame.layers), self.frame.num_words) if self.frame is not None else (0, 0)
        return 8 * scales, 8 * words, -(-self.code_bytes // 8) * 8, indices

    def round(self, leader: int) -> Round:
        """Return the shape of the broadcast."""
        return Round("bcast", (sum(self.sizes),), _BYTE, root=leader)

    def cut(self, message: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """Return scales, signs, code and indices as views of the message."""
        ends = list(accumulate(self.sizes))
        return [message[end - size : end] for size, end in zip(self.sizes, ends, strict=True)]


@dataclass
class ReceivedSelection:
    """Indices, values and divisors that every rank has after the broadcast, in the workspace's arrays."""

    indices: NDArray[np.uint32]  # of all elements that are sent, ascending; the same on all ranks
    values: NDArray[np.floating]  # of this rank, at these indices
    divisors: NDArray[np.floating]  # of the coded values; the same on all ranks
    code: NDArray[np.uint8]  # of the leader
    problem: MessageError | None = None  # in the message that this rank received; values are zeros then, divisors 1


def leader_of(context: Context) -> int:
    """Draw the rank that leads in a step, the same on all ranks."""
    return int(context.random(shared=True).integers(context.group.size))


def share_selection(
    lead: LeaderMessage, accumulated: Accumulated, context: Context, code: Autoencoder | None = None
) -> Rounds[ReceivedSelection]:
    """Select on the leading rank and broadcast its message; as rounds."""
    workspace, leader = context.workspace, leader_of(context)
    task = lead.round(leader)
    if context.group.rank == leader:
        task.send = workspace.array("lead", task.counts[0], _BYTE)
        _write(lead, accumulated, context, code, task.send)
    task.recv = workspace.array("led", task.counts[0], _BYTE)
    scales, signs, code_part, message = lead.cut((yield task))
    divisors = workspace.array("frame", lead.frame.count if lead.frame is not None else 0, accumulated.dtype)
    try:
        count = lead.selected.indices
        if _is_plain(lead):
            indices = message.view(np.uint32)[:count]
            ascending = kernels.ascending_below(indices, lead.numel)
        else:
            indices = workspace.array("lead.indices", count, np.uint32)
            ascending = kernels.decode_indices(message, count, lead.numel, indices)
        listed = _with_dense(lead.selected, indices, workspace)
        values, known = _gathered(listed, accumulated, workspace)
        ascending, known = to_python(ascending, known)
        if not ascending:
            raise MessageError(f"learned: from rank {leader}: indices do not ascend below {lead.numel}")
        if not known:
            raise MessageError(f"learned: an index that all ranks know is not below {accumulated.numel}")
        if lead.frame is not None:
            layer_scales = received_on_host(scales).view(np.float64)
            for scale in layer_scales.tolist():
                if not 0 < scale < inf:
                    raise MessageError(f"learned: from rank {leader}: scales must be positive numbers, got {scale}")
            lead.frame.unpack(layer_scales, signs.view(np.uint64), divisors)
    except MessageError as error:
        divisors[:] = 1
        count = lead.selected.count
        zeros = current_device().zeros(count, accumulated.dtype)
        return ReceivedSelection(_on_device(0, count), zeros, divisors, code_part, error)
    return ReceivedSelection(listed, values, divisors, code_part)


def _write(
    lead: LeaderMessage,
    accumulated: Accumulated,
    context: Context,
    code: Autoencoder | None,
    message: NDArray[np.uint8],
) -> None:
    workspace = context.workspace
    chosen = largest_of_parts(accumulated, context, lead.selected.regions).indices
    scales, signs, code_part, indices = lead.cut(message)
    if _is_plain(lead):
        indices[:] = 0  # the rest of the last word, too
        indices.view(np.uint32)[: chosen.size] = chosen
    else:
        kernels.encode_indices(chosen, lead.numel, indices)
    if lead.frame is None:
        return
    values, _ = _gathered(_with_dense(lead.selected, chosen, workspace), accumulated, workspace)
    values = values[lead.selected.coded]
    layer_scales = lead.frame.pack(values, signs.view(np.uint64))
    current_device().assign(scales.view(np.float64), layer_scales)
    if code is not None:
        divisors, quotients = (workspace.array(name, values.size, accumulated.dtype) for name in ("frame", "relative"))
        lead.frame.unpack(layer_scales, signs.view(np.uint64), divisors)
        relative(values, divisors, quotients)
        code.encode(quotients, code_part[: lead.code_bytes].view(accumulated.dtype))


def _is_plain(lead: LeaderMessage) -> bool:
    return compact(lead.selected.indices, lead.numel) == "plain"


def _with_dense(selected: Selected, indices: NDArray[np.uint32], workspace: Workspace) -> NDArray[np.uint32]:
    if selected.count == selected.indices:
        return indices
    listed: NDArray[np.uint32] = workspace.array("listed", selected.count, np.uint32)
    start = 0
    for part, place in zip(selected.parts, selected.places, strict=True):
        if part.travels == "dense":
            bounds = part.start, part.stop
            listed[place] = workspace.made(("dense", *bounds), partial(_on_device, *bounds))
        else:
            listed[place] = indices[start : start + part.kept]
            start += part.kept
    return listed


def _on_device(start: int, stop: int) -> NDArray[np.uint32]:
    indices: NDArray[np.uint32] = current_device().to_device(np.arange(start, stop, dtype=np.uint32))
    return indices


def _gathered(
    listed: NDArray[np.uint32], accumulated: Accumulated, workspace: Workspace
) -> tuple[NDArray[np.floating], bool]:
    values: NDArray[np.floating] = workspace.array("listed.values", listed.size, accumulated.dtype)
    return values, kernels.gather(accumulated.array(), listed, values)
