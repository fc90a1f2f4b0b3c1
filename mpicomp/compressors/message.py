"""The sparse message: a header, the values, the indices.

==========  =====  =======================================================================================
offset      bytes  what
==========  =====  =======================================================================================
0           1      version, 2
1           1      flags: 1 non-finite, 2 stale (see `mpicomp.reducer`), 4 damaged: the sender could not read what it
                   was sent, and nothing but flags is to be read of this
2           1      values: 1 float32, 2 float64, 3 fp16, 4 bf16, 5 signs, 6 q8, 7 q4, 8 q2
3           1      indices: 1 plain, 2 elias-fano
4           4      count c, unsigned
8           8      energy: squared L2 norm of the accumulated gradient
16          8      lost: energy of what is not sent, and of what rounding takes away from what is
24          c x v  values, of v = 4, 8, 2 or 2 bytes; padded to 8 bytes. Of signs, where there are values: a bit each,
                   in words of 8 bytes, set where one is negative; then their mean magnitude, float32, padded to 8 bytes
                   as well. Of q8, q4 and q2: codes of 8, 4 or 2 bits, from the lowest bits of bytes on, padded to 8
                   bytes; then for every 256 values a base and a step, float32, see `mpicomp.kernels.cpu.squares`
then        ..     indices, ascending: c x 4 bytes, unsigned and padded to 8 bytes; or their code, see
                   `mpicomp.kernels.cpu.index_bytes`
==========  =====  =======================================================================================

Numbers are little-endian, and padding is zero. Every field is aligned where the message is to 8 bytes.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.compressors.kinds import Selection
from mpicomp.compressors.wire import BITS, SHARING, SIGNS, Wire, value_bytes
from mpicomp.errors import MessageError
from mpicomp.kernels import sizes
from mpicomp.places import numbers, received
from mpicomp.workspace import Workspace

VERSION = 2  # version of the message format
NONFINITE = 1  # flag: some element was NaN or infinite
STALE = 2  # flag: this rank asks all ranks to agree anew
DAMAGED = 4  # flag: this rank could not read a message

HEADER_BYTES = 24  # bytes of the header of a message
_PACKED = struct.Struct("<BBBBIdd")


class _Header(NamedTuple):
    version: int
    flags: int
    values: int
    indices: int
    elements: int
    energy: float
    lost: float


_FULL = {np.dtype(np.float32): "float32", np.dtype(np.float64): "float64"}
_KNOWN = NONFINITE | STALE | DAMAGED
_VALUES = {"float32": 1, "float64": 2, "fp16": 3, "bf16": 4, "signs": 5, "q8": 6, "q4": 7, "q2": 8}
_INDICES = {"plain": 1, "elias-fano": 2}


@dataclass
class Sparse:
    """A message that was read."""

    selection: Selection
    flags: int
    energy: float
    lost: float


@dataclass
class Told:
    """What the header of a message says, and where in the memory of several messages its parts are.

    Attributes
    ----------
    flags : int
        See `NONFINITE`, `STALE` and `DAMAGED`.
    energy, lost : float
        Squared L2 norms.
    stored, coding : str
        How values and indices are stored; empty where it is damaged.
    count : int
        Number of values.
    values_at, indices_at : int
        Bytes before the values and before the indices.
    """

    flags: int
    energy: float
    lost: float
    stored: str = ""
    coding: str = ""
    count: int = 0
    values_at: int = 0
    indices_at: int = 0


def message_bytes(count: int, numel: int, dtype: np.dtype[Any], wire: Wire) -> int:
    """Return the length in bytes of a message with ``count`` elements of an array of ``numel``.

    Examples
    --------
    >>> import numpy as np
    >>> single = np.dtype(np.float32)
    >>> message_bytes(0, 10_000, single, Wire()), message_bytes(100, 10_000, single, Wire())
    (24, 824)
    >>> message_bytes(100, 10_000, single, Wire("fp16", "elias-fano"))
    344
    """
    return _parts(count, numel, value_bytes(count, dtype, wire.values), wire.indices)[1]


def capacity_bytes(count: int, numel: int, dtype: np.dtype[Any], wire: Wire) -> int:
    """Return a length that holds any message with at most ``count`` elements of an array of ``numel``.

    Codes of fewer indices are at most two words longer than that of ``count``: their bits never are more, but low parts
    and bitmap are padded each.

    Examples
    --------
    >>> import numpy as np
    >>> single = np.dtype(np.float32)
    >>> capacity_bytes(100, 10_000, single, Wire()), capacity_bytes(100, 10_000, single, Wire("fp16", "elias-fano"))
    (824, 360)
    """
    return message_bytes(count, numel, dtype, wire) + (0 if wire.indices == "plain" else 16)


def write_message(
    out: NDArray[np.uint8],
    selection: Selection,
    numel: int,
    wire: Wire,
    flags: int,
    energy: float,
    kept: float | NDArray[np.floating],
    finite: bool = True,
) -> float:
    """Fill a message.

    Parameters
    ----------
    out : array of uint8
        As long as `message_bytes` says; aligned to 8 bytes.
    selection : Selection
        What is sent. Where values are stored in fewer bits, ``selection.values`` is overwritten by what receivers will
        see, so that the rounding error stays in the residual: it must not be memory of the accumulated array.
    numel : int
        Length of the array that was selected from.
    wire : Wire
        How to store it: of ``"signs"``, the signs and the mean magnitude, which of all magnitudes loses least; of
        ``"q8"``, ``"q4"`` and ``"q2"`` see `mpicomp.kernels.cpu.pack_squares`.
    flags : int
        `NONFINITE` and `STALE`.
    energy, kept : float
        Squared L2 norms of the accumulated array, and of the selected values as they are before the call. On a device
        they, and ``finite``, may be known there only. Where values are stored as they are, ``kept`` may be
        ``selection.values``: their norm is then made in the launch that writes the header.
    finite : bool
        False sets `NONFINITE`.

    Returns
    -------
    float
        Energy that rounding took away from the values: the squared L2 norm of the error. The message says that
        ``energy - kept`` and this are lost.

    Notes
    -----
    Nothing is raised for indices that do not ascend or are not below ``numel``, since that would be on one rank only:
    such a message is refused by `read_message`, on all.

    Examples
    --------
    >>> import numpy as np
    >>> array, wire = np.array([1, 2049, 0], np.float32), Wire("fp16")
    >>> selection = Selection(np.array([1], np.uint32), array[1:2].copy())
    >>> out = np.empty(message_bytes(1, array.size, array.dtype, wire), np.uint8)
    >>> write_message(out, selection, array.size, wire, 0, energy=1 + 2049**2, kept=2049**2)
    1.0
    >>> selection.values.tolist(), read_message(out, array.size, array.dtype, Workspace()).lost
    ([2048.0], 2.0)
    """
    indices, values = selection.indices, selection.values
    if values.size != indices.size:
        raise ValueError(f"write_message: {indices.size} indices do not fit {values.size} values")
    middle, end = _parts(indices.size, numel, value_bytes(values.size, values.dtype, wire.values), wire.indices)
    if out.size != end:
        raise ValueError(f"write_message: the message has {end} bytes, out has {out.size}")
    stored, coding = _VALUES[wire.values or _FULL[values.dtype]], _INDICES[wire.indices]
    lead = VERSION | flags << 8 | stored << 16 | coding << 24 | indices.size << 32
    at_once = getattr(kernels.of(out), "write_pairs", None)
    if at_once is not None and kept is values and wire.values is None and wire.indices == "plain":
        at_once(out, lead, finite, energy, values, indices, middle)
        return 0.0
    filled = HEADER_BYTES + value_bytes(values.size, values.dtype, wire.values)
    _clear(out, filled, middle)

    rounding = 0.0
    if wire.values is None:
        _payload(out, HEADER_BYTES, values.size, values.dtype)[:] = values
    elif wire.values == "signs":
        signs, magnitude = _signs_at(out, HEADER_BYTES, values.size)
        rounding = kernels.pack_signs(values, SIGNS * signs.size, magnitude, signs, values)
    elif wire.values in BITS:
        rounding = kernels.pack_squares(values, BITS[wire.values], out[HEADER_BYTES:filled], values)
    else:
        halves = _payload(out, HEADER_BYTES, values.size, np.uint16)
        rounding = kernels.narrow(values, wire.values, halves)
        kernels.widen(halves, wire.values, values)
    if wire.indices == "plain":
        _payload(out, middle, indices.size, np.uint32)[:] = indices
        _clear(out, middle + 4 * indices.size, end)
    else:
        kernels.encode_indices(indices, numel, out[middle:])
    kernels.write_header(out, lead, finite, energy, kept, rounding)
    return rounding


def _clear(out: NDArray[np.uint8], start: int, stop: int) -> None:
    """Set padding to zero."""
    if start < stop:
        out[start:stop] = 0


def write_damaged(out: NDArray[np.uint8]) -> None:
    """Mark a message of any length as damaged: this rank could not read a message that it received."""
    kernels.write_header(out, VERSION | DAMAGED << 8, True, 0.0, None, 0.0)


def read_message(
    message: NDArray[np.uint8], numel: int, dtype: np.dtype[Any], workspace: Workspace, expected: int | None = None
) -> Sparse:
    """Read a message, without copying what is stored as it is.

    Parameters
    ----------
    message : array of uint8
        Aligned to 8 bytes.
    numel : int
        Length of the array that was selected from.
    dtype : numpy.dtype
        The array's dtype: float32 or float64.
    workspace : Workspace
        Where what has to be decoded goes, as ``decoded.indices`` and ``decoded.values``.
    expected : int, optional
        How many values there have to be, where that is known.

    Returns
    -------
    Sparse
        Its indices ascend and are below ``numel``; it has none where the message is `DAMAGED`. Valid while the message
        is there and until the next one is read with the same workspace.

    Raises
    ------
    MessageError
        Where a field, the length, an index or a scale is not what it has to be.
    """
    told = look_at(message, numel, dtype, expected)
    stored, coding, count, middle = told.stored, told.coding, told.count, told.indices_at
    if told.flags & DAMAGED:
        nothing = Selection(workspace.array("none", 0, np.uint32), workspace.array("none", 0, dtype))
        return Sparse(nothing, told.flags, 0.0, 0.0)
    if coding == "plain":
        indices = _payload(message, middle, count, np.uint32)
        right = kernels.ascending_below(indices, numel)
    else:
        indices = workspace.array("decoded.indices", count, np.uint32)
        right = kernels.decode_indices(message[middle:], count, numel, indices)
    sound: bool = True
    if stored in ("float32", "float64"):
        values = _payload(message, HEADER_BYTES, count, dtype)
    else:
        values = workspace.array("decoded.values", count, dtype)
        if stored in SHARING:
            sound = unpack_sharing(message, [told], values)
        else:
            kernels.widen(_payload(message, HEADER_BYTES, count, np.uint16), stored, values)
    ascend, sound = numbers(right, sound)
    if not ascend:
        raise MessageError(f"message: indices do not ascend below {numel}")
    if not sound:
        raise MessageError("message: scales of values are negative, or no finite numbers")
    return Sparse(Selection(indices, values), told.flags, told.energy, told.lost)


def unpack_sharing(memory: NDArray[np.uint8], told: Sequence[Told], out: NDArray[np.floating]) -> bool:
    """Write the values of messages that store them in one of the forms `mpicomp.compressors.wire.SHARING`.

    Parameters
    ----------
    memory : array of uint8
        Holds the messages.
    told : sequence of Told
        Of each, with its places in ``memory``; all are stored in the same form.
    out : array
        Receives one message's values after the other's.

    Returns
    -------
    bool
        False where a scale of two to eight bits is negative or no finite number, though nobody said that elements are
        not finite. On a device a 0-d array, or True.
    """
    stored = told[0].stored
    if stored in BITS:
        places, counts = [each.values_at for each in told], [each.count for each in told]
        sound: bool = kernels.unpack_squares(memory, places, counts, BITS[stored], out)
        return True if any(each.flags & NONFINITE for each in told) else sound
    start = 0
    for each in told:
        signs, magnitude = _signs_at(memory, each.values_at, each.count)
        kernels.unpack_signs(magnitude, signs, SIGNS * signs.size, out[start : start + each.count])
        start += each.count
    return True


def look_at(
    message: NDArray[np.uint8], numel: int, dtype: np.dtype[Any], expected: int | None = None, start: int = 0
) -> Told:
    """Read a message's header; see `read_message` for its arguments and for what is refused, but wrong indices.

    ``start`` is where the message begins in the memory that the result's places are counted in.
    """
    header = _header_of(message)
    if header.flags & DAMAGED:
        return Told(header.flags, 0.0, 0.0)
    stored, coding = _layout_of(header, numel, dtype)
    count = header.elements
    if expected is not None and count != expected:
        raise MessageError(f"message: {expected} values are expected, got {count}")
    middle, end = _parts(count, numel, value_bytes(count, dtype, stored), coding)
    if message.size != end:
        raise MessageError(f"message: {count} values make {end} bytes, got {message.size}")
    values_at, indices_at = start + HEADER_BYTES, start + middle
    return Told(header.flags, header.energy, header.lost, stored, coding, count, values_at, indices_at)


def read_padded(room: NDArray[np.uint8], numel: int, dtype: np.dtype[Any], workspace: Workspace) -> Sparse:
    """Read the message that a longer piece of memory begins with; see `read_message` and `capacity_bytes`.

    How many values there have to be is not known here, so that padding is looked at: it has to be zero.
    """
    header = _header_of(room)
    if header.flags & DAMAGED:
        return read_message(room, numel, dtype, workspace)
    stored, coding = _layout_of(header, numel, dtype)
    count = header.elements
    filled = value_bytes(count, dtype, stored)
    middle, end = _parts(count, numel, filled, coding)
    sparse = read_message(room[:end], numel, dtype, workspace)
    behind = middle + 4 * count if coding == "plain" else end
    if room[HEADER_BYTES + filled : middle].any() or room[behind:end].any():
        raise MessageError(f"message: it has more than {count} values")
    return sparse


def _header_of(message: NDArray[np.uint8]) -> _Header:
    """Return a message's header; see `read_message` for the messages that are refused."""
    if message.size < HEADER_BYTES:
        raise MessageError(f"message: at least {HEADER_BYTES} bytes are needed, got {message.size}")
    header = _Header(*_PACKED.unpack_from(received(message[:HEADER_BYTES]).data))
    if header.version != VERSION:
        raise MessageError(f"message: version must be {VERSION}, got {header.version}; run one mpicomp on all ranks")
    if header.flags > _KNOWN:
        raise MessageError(f"message: flags must be below {_KNOWN + 1}, got {header.flags}")
    return header


def _layout_of(header: _Header, numel: int, dtype: np.dtype[Any]) -> tuple[str, str]:
    """Return the storage format of a message's values and indices; see `read_message` for refused messages."""
    stored = _name_of(header.values, _VALUES, "values")
    coding = _name_of(header.indices, _INDICES, "indices")
    if stored in ("float32", "float64") and stored != _FULL[dtype]:
        raise MessageError(f"message: values must be {dtype.name} or have at most 16 bits, got {stored}")
    if header.elements > numel:
        raise MessageError(f"message: {header.elements} values do not come from {numel} elements")
    return stored, coding


def _parts(count: int, numel: int, values: int, coding: str) -> tuple[int, int]:
    """Return the bytes at which the indices begin and the message ends, of so many bytes of values."""
    middle = HEADER_BYTES + _padded(values)
    return middle, middle + (_padded(4 * count) if coding == "plain" else sizes.index_bytes(count, numel))


def _signs_at(memory: NDArray[np.uint8], start: int, count: int) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    """Return the words of ``count`` signs that begin at a byte, and the magnitude behind them; none for no values."""
    words = -(-count // SIGNS)
    return _payload(memory, start, words, np.uint64), _payload(memory, start + 8 * words, min(count, 1), np.float32)


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def _payload(message: NDArray[np.uint8], start: int, count: int, dtype: Any) -> NDArray[Any]:
    dtype = np.dtype(dtype)
    return message[start : start + count * dtype.itemsize].view(dtype)


def _name_of(code: int, names: dict[str, int], field: str) -> str:
    for name, known in names.items():
        if code == known:
            return name
    raise MessageError(f"message: {field} are stored in an unknown way, {code}; run one mpicomp on all ranks")
