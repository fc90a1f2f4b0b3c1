"""The leading rank's message before values travel: its indices, and the scales and signs that values are divided by."""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.algorithms.lgc.compressor import Selected, index_bytes
from mpicomp.algorithms.lgc.learned_code import LearnedCode
from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.context import Context
from mpicomp.compressors.topk import largest_of_parts
from mpicomp.compressors.wire import compact
from mpicomp.errors import MessageError
from mpicomp.kernels import cpu
from mpicomp.rounds import Round
from mpicomp.workspace import Workspace

_BYTE = np.dtype(np.uint8)
_LIMIT = 100.0  # times a layer's scale: larger values are clipped to it before coding, so that no code overflows
_LANES = 64  # signs in a 64-bit word


@dataclass(frozen=True)
class Lead:
    """The leading rank's message.

    Parts follow each other, each a multiple of 8 bytes: for each coded layer the scale of its values, a float64; for
    each coded layer the signs of its values, in words of 64; the leader's code, where it alone has one; the indices of
    everything but what travels dense, see `mpicomp.algorithms.lgc.compressor.index_bytes`.

    Parameters
    ----------
    selected : Selected
        The elements of the bucket that are sent.
    numel : int
        Length of the bucket.
    frame : bool
        Whether scales travel.
    signs : bool
        Whether signs travel, too.
    code_bytes : int
        Length of the code; 0 where it does not travel here.
    """

    selected: Selected
    numel: int
    frame: bool = False
    signs: bool = False
    code_bytes: int = 0

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
class Led:
    """Indices, values and frame that every rank has after the broadcast, in the workspace's arrays.

    Attributes
    ----------
    indices : array of uint32, shape (count,)
        Of all elements that are sent, ascending; the same on all ranks.
    values : array, shape (count,)
        This rank's, at these indices.
    frame : array, shape (coded,)
        Divisors of the coded values; the same on all ranks.
    code : array of uint8
        The leader's code.
    problem : MessageError or None
        The error in the message that this rank received, or None; with an error values are zeros, and the frame is one.
    """

    indices: NDArray[np.uint32]
    values: NDArray[np.floating]
    frame: NDArray[np.floating]
    code: NDArray[np.uint8]
    problem: MessageError | None = None


def leader_of(context: Context) -> int:
    """Draw the rank that leads in a step, the same on all ranks."""
    return int(context.random(shared=True).integers(context.group.size))


def follow(
    lead: Lead, accumulated: Accumulated, context: Context, code: LearnedCode | None = None
) -> Generator[Round, NDArray[Any], Led]:
    """Select on the leading rank and broadcast its message; as rounds.

    Parameters
    ----------
    lead : Lead
        The message of the leading rank.
    accumulated, context
        See `Scheme.exchange`.
    code : LearnedCode, optional
        Of the leader, where the code is a part of the message.
    """
    workspace = context.workspace
    leader = leader_of(context)
    task = lead.round(leader)
    if context.group.rank == leader:
        task.send = workspace.array("lead", task.counts[0], _BYTE)
        _write(lead, accumulated, context, code, task.send)
    task.recv = workspace.array("led", task.counts[0], _BYTE)
    received = yield task
    scales, signs, told, indices = lead.cut(received)
    frame = workspace.array("frame", lead.selected.coded_count * lead.frame, accumulated.dtype)
    try:
        listed = _listed(lead, _decoded(lead, indices, leader, workspace), workspace)
        values = _gathered(listed, accumulated, workspace)
        if lead.frame:
            _check_scales(scales.view(np.float64), leader)
            _unpack_frame(lead, scales.view(np.float64), signs.view(np.uint64), frame)
    except MessageError as error:
        frame[:] = 1
        none = np.zeros(lead.selected.count, accumulated.dtype)
        return Led(np.arange(none.size, dtype=np.uint32), none, frame, told, error)
    return Led(listed, values, frame, told)


def make_frame(lead: Lead, values: NDArray[np.floating], frame: NDArray[np.floating]) -> None:
    """Write the divisors of coded values as if a rank with these values led; for the rank that learns."""
    words = np.empty(sum(-(-(layer.stop - layer.start) // _LANES) for layer in lead.layers), np.uint64)
    scales = np.empty(len(lead.layers))
    _pack_frame(lead, values, scales, words)
    _unpack_frame(lead, scales, words, frame)


def relative(values: NDArray[np.floating], frame: NDArray[np.floating], out: NDArray[np.floating]) -> None:
    """Divide values by a frame, and clip them to `_LIMIT`; infinity too, but not NaN."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        np.divide(values, frame, out=out)
    np.clip(out, -_LIMIT, _LIMIT, out=out)


def _write(
    lead: Lead, accumulated: Accumulated, context: Context, code: LearnedCode | None, message: NDArray[np.uint8]
) -> None:
    """Fill the leader's message."""
    workspace = context.workspace
    chosen = largest_of_parts(accumulated, context, lead.selected.regions).indices
    scales, signs, told, indices = lead.cut(message)
    if _plain(lead):
        indices[:] = 0  # and what is left of the last word
        indices.view(np.uint32)[: chosen.size] = chosen
    else:
        cpu.encode_indices(chosen, lead.numel, indices)
    if not lead.frame:
        return
    values = _gathered(_listed(lead, chosen, workspace), accumulated, workspace)[lead.selected.coded]
    _pack_frame(lead, values, scales.view(np.float64), signs.view(np.uint64))
    if code is not None:
        frame = workspace.array("frame", values.size, accumulated.dtype)
        _unpack_frame(lead, scales.view(np.float64), signs.view(np.uint64), frame)
        own = workspace.array("relative", values.size, accumulated.dtype)
        relative(values, frame, own)
        code.encode(own, told[: lead.code_bytes].view(accumulated.dtype))


def _plain(lead: Lead) -> bool:
    """Return whether indices travel as they are."""
    return compact(lead.selected.indices, lead.numel) == "plain"


def _decoded(lead: Lead, message: NDArray[np.uint8], leader: int, workspace: Workspace) -> NDArray[np.uint32]:
    count = lead.selected.indices
    if _plain(lead):
        indices: NDArray[np.uint32] = message.view(np.uint32)[:count]
        right = cpu.ascending_below(indices, lead.numel)
    else:
        indices = workspace.array("lead.indices", count, np.uint32)
        right = cpu.decode_indices(message, count, lead.numel, indices)
    if not right:
        raise MessageError(f"learned: from rank {leader}: indices do not ascend below {lead.numel}")
    return indices


def _listed(lead: Lead, indices: NDArray[np.uint32], workspace: Workspace) -> NDArray[np.uint32]:
    """Return the indices of everything that is sent: those of dense parts are known."""
    selected = lead.selected
    if selected.count == selected.indices:
        return indices
    listed: NDArray[np.uint32] = workspace.array("listed", selected.count, np.uint32)
    start = 0
    for part, place in zip(selected.parts, selected.places, strict=True):
        if part.travels == "dense":
            bounds = part.start, part.stop
            listed[place] = workspace.made(("dense", *bounds), partial(np.arange, *bounds, dtype=np.uint32))
        else:
            listed[place] = indices[start : start + part.kept]
            start += part.kept
    return listed


def _gathered(listed: NDArray[np.uint32], accumulated: Accumulated, workspace: Workspace) -> NDArray[np.floating]:
    values: NDArray[np.floating] = workspace.array("listed.values", listed.size, accumulated.dtype)
    if not cpu.gather(accumulated.array(), listed, values):
        raise MessageError(f"learned: an index that all ranks were told is not below {accumulated.numel}")
    return values


def _check_scales(scales: NDArray[np.float64], leader: int) -> None:
    """Raise where a scale of the leading rank is not a positive number."""
    for scale in scales.tolist():
        if not 0 < scale < inf:
            raise MessageError(f"learned: from rank {leader}: scales must be positive numbers, got {scale}")


def _pack_frame(
    lead: Lead, values: NDArray[np.floating], scales: NDArray[np.float64], signs: NDArray[np.uint64]
) -> None:
    """Write the root mean square of each layer's values, and their signs."""
    start = 0
    for number, layer in enumerate(lead.layers):
        own = values[layer]
        energy = cpu.energy(own)
        scale = float(values.dtype.type(sqrt(energy / own.size))) if isfinite(energy) else 0.0
        scales[number] = scale if scale > 0 else 1.0
        if lead.signs:
            words = -(-own.size // _LANES)
            cpu.pack_votes(own, signs[start : start + words])
            start += words


def _unpack_frame(
    lead: Lead, scales: NDArray[np.float64], signs: NDArray[np.uint64], frame: NDArray[np.floating]
) -> None:
    start = 0
    for layer, scale in zip(lead.layers, scales.tolist(), strict=True):
        own = frame[layer]
        own[:] = scale
        if lead.signs:
            words = -(-own.size // _LANES)
            cpu.unpack_votes(signs[start : start + words], scale, own)
            start += words
