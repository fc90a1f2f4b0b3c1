"""The leading rank's message before values travel: its indices, and the scales and signs that values are divided by."""

from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, sqrt

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.context import Context
from mpicomp.compressors.topk import largest_of_parts
from mpicomp.compressors.wire_format import compact
from mpicomp.errors import MessageError
from mpicomp.gpu import current_device, received_on_host, to_python
from mpicomp.rounds import Round, Rounds
from mpicomp.systems.lgc.autoencoder import Autoencoder
from mpicomp.systems.lgc.compressor import Selected, index_bytes
from mpicomp.workspace import Workspace

_BYTE = np.dtype(np.uint8)
_LIMIT = 100.0  # times a layer's scale: larger values are clipped to it before coding, so that no code overflows
_LANES = 64  # signs in a 64-bit word


@dataclass(frozen=True)
class LeaderMessage:
    """The leading rank's message.

    Parts follow each other, each a multiple of 8 bytes: for each coded layer the scale of its values, a float64; for
    each coded layer the signs of its values, in words of 64; the leader's code; the indices of all elements but those
    that travel dense, see `mpicomp.systems.lgc.compressor.index_bytes`.
    """

    selected: Selected
    numel: int  # length of the bucket
    frame: bool = False  # whether scales travel
    signs: bool = False  # whether signs travel, too
    code_bytes: int = 0  # 0 if no code travels

    @property
    def layers(self) -> list[slice]:
        """The places of coded layers among the coded values."""
        first = self.selected.coded.start
        pairs = zip(self.selected.parts, self.selected.places, strict=True)
        coded = [place for part, place in pairs if part.travels == "coded"]
        return [slice(place.start - first, place.stop - first) for place in coded]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Bytes of scales, signs, code and indices."""
        layers = self.layers
        words = sum(-(-(layer.stop - layer.start) // _LANES) for layer in layers)
        indices = index_bytes(self.selected.indices, self.numel)
        return 8 * len(layers) * self.frame, 8 * words * self.signs, -(-self.code_bytes // 8) * 8, indices

    def round(self, leader: int) -> Round:
        """Return the shape of the broadcast."""
        return Round("bcast", (sum(self.sizes),), _BYTE, root=leader)

    def cut(self, message: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], ...]:
        """Return scales, signs, code and indices as views of the message."""
        parts, start = [], 0
        for size in self.sizes:
            parts.append(message[start : start + size])
            start += size
        return tuple(parts)


@dataclass
class ReceivedSelection:
    """Indices, values and frame that every rank has after the broadcast, in the workspace's arrays."""

    indices: NDArray[np.uint32]  # of all elements that are sent, ascending; the same on all ranks
    values: NDArray[np.floating]  # of this rank, at these indices
    frame: NDArray[np.floating]  # divisors of the coded values; the same on all ranks
    code: NDArray[np.uint8]  # of the leader
    problem: MessageError | None = None  # in the message that this rank received; values are zeros then, the frame 1


def leader_of(context: Context) -> int:
    """Draw the rank that leads in a step, the same on all ranks."""
    return int(context.random(shared=True).integers(context.group.size))


def share_selection(
    lead: LeaderMessage, accumulated: Accumulated, context: Context, code: Autoencoder | None = None
) -> Rounds[ReceivedSelection]:
    """Select on the leading rank and broadcast its message; as rounds."""
    workspace = context.workspace
    leader = leader_of(context)
    task = lead.round(leader)
    if context.group.rank == leader:
        task.send = workspace.array("lead", task.counts[0], _BYTE)
        _write(lead, accumulated, context, code, task.send)
    task.recv = workspace.array("led", task.counts[0], _BYTE)
    scales, signs, code_part, indices = lead.cut((yield task))
    frame = workspace.array("frame", lead.selected.coded_count * lead.frame, accumulated.dtype)
    try:
        chosen, ascending = _decoded(lead, indices, workspace)
        listed = _listed(lead, chosen, workspace)
        values, known = _gathered(listed, accumulated, workspace)
        _check_indices(lead, accumulated.numel, leader, *to_python(ascending, known))
        if lead.frame:
            layer_scales = received_on_host(scales).view(np.float64)
            for scale in layer_scales.tolist():
                if not 0 < scale < inf:
                    raise MessageError(f"learned: from rank {leader}: scales must be positive numbers, got {scale}")
            _unpack_frame(lead, layer_scales, signs.view(np.uint64), frame)
    except MessageError as error:
        frame[:] = 1
        count = lead.selected.count
        zeros = current_device().zeros(count, accumulated.dtype)
        return ReceivedSelection(_on_device(0, count), zeros, frame, code_part, error)
    return ReceivedSelection(listed, values, frame, code_part)


def local_values(
    selected: Selected, accumulated: Accumulated, context: Context
) -> tuple[NDArray[np.uint32], NDArray[np.floating]]:
    """Return the ascending indices of this rank's largest values and of all dense elements, and the values."""
    workspace, lead = context.workspace, LeaderMessage(selected, accumulated.numel)
    chosen = largest_of_parts(accumulated, context, selected.regions).indices
    indices = _listed(lead, chosen, workspace)
    return indices, _gathered(indices, accumulated, workspace)[0]


def make_frame(lead: LeaderMessage, values: NDArray[np.floating], frame: NDArray[np.floating]) -> None:
    """Write the divisors of coded values as if a rank with these values were the leader."""
    words = np.empty(sum(-(-(layer.stop - layer.start) // _LANES) for layer in lead.layers), np.uint64)
    _unpack_frame(lead, _pack_frame(lead, values, words), words, frame)


def relative(values: NDArray[np.floating], frame: NDArray[np.floating], out: NDArray[np.floating]) -> None:
    """Divide values by a frame, and clip the results to `_LIMIT`; infinity too, but not NaN."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        np.divide(values, frame, out=out)
    np.clip(out, -_LIMIT, _LIMIT, out=out)


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
    if _plain(lead):
        indices[:] = 0  # the rest of the last word, too
        indices.view(np.uint32)[: chosen.size] = chosen
    else:
        kernels.encode_indices(chosen, lead.numel, indices)
    if not lead.frame:
        return
    values, _ = _gathered(_listed(lead, chosen, workspace), accumulated, workspace)
    values = values[lead.selected.coded]
    layer_scales = _pack_frame(lead, values, signs.view(np.uint64))
    current_device().assign(scales.view(np.float64), layer_scales)
    if code is not None:
        frame = workspace.array("frame", values.size, accumulated.dtype)
        _unpack_frame(lead, layer_scales, signs.view(np.uint64), frame)
        relative_values = workspace.array("relative", values.size, accumulated.dtype)
        relative(values, frame, relative_values)
        code.encode(relative_values, code_part[: lead.code_bytes].view(accumulated.dtype))


def _plain(lead: LeaderMessage) -> bool:
    """Return whether indices travel as they are."""
    return compact(lead.selected.indices, lead.numel) == "plain"


def _decoded(lead: LeaderMessage, message: NDArray[np.uint8], workspace: Workspace) -> tuple[NDArray[np.uint32], bool]:
    """Return a message's indices, and whether they ascend below the length of the bucket: a flag on the device."""
    count = lead.selected.indices
    if _plain(lead):
        indices: NDArray[np.uint32] = message.view(np.uint32)[:count]
        return indices, kernels.ascending_below(indices, lead.numel)
    indices = workspace.array("lead.indices", count, np.uint32)
    return indices, kernels.decode_indices(message, count, lead.numel, indices)


def _check_indices(lead: LeaderMessage, numel: int, leader: int, ascending: bool, known: bool) -> None:
    if not ascending:
        raise MessageError(f"learned: from rank {leader}: indices do not ascend below {lead.numel}")
    if not known:
        raise MessageError(f"learned: an index that all ranks know is not below {numel}")


def _listed(lead: LeaderMessage, indices: NDArray[np.uint32], workspace: Workspace) -> NDArray[np.uint32]:
    """Return the indices of all elements that are sent: those of dense parts are known."""
    selected = lead.selected
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
    """Return the values at some indices, and whether all of these are in the array: a flag on the device."""
    values: NDArray[np.floating] = workspace.array("listed.values", listed.size, accumulated.dtype)
    return values, kernels.gather(accumulated.array(), listed, values)


def _pack_frame(lead: LeaderMessage, values: NDArray[np.floating], signs: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return the root mean square of each layer's values, in host memory, and write their signs."""
    start, energies = 0, []
    for layer in lead.layers:
        layer_values = values[layer]
        energies.append(kernels.energy(layer_values))
        if lead.signs:
            words = -(-layer_values.size // _LANES)
            kernels.pack_votes(layer_values, signs[start : start + words])
            start += words
    scales = np.ones(len(energies))
    for number, (layer, energy) in enumerate(
        zip(lead.layers, current_device().to_host(np.stack(energies)).tolist(), strict=True)
    ):
        scale = float(values.dtype.type(sqrt(energy / (layer.stop - layer.start)))) if isfinite(energy) else 0.0
        if scale > 0:
            scales[number] = scale
    return scales


def _unpack_frame(
    lead: LeaderMessage, scales: NDArray[np.float64], signs: NDArray[np.uint64], frame: NDArray[np.floating]
) -> None:
    start = 0
    for layer, scale in zip(lead.layers, scales.tolist(), strict=True):
        divisors = frame[layer]
        if lead.signs:
            words = -(-divisors.size // _LANES)
            kernels.unpack_votes(signs[start : start + words], scale, divisors)
            start += words
        else:
            divisors[:] = scale
