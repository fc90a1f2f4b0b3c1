"""Messages on the wire, sparse and dense, written and read.

======  =====  ===========================================================================================
offset  bytes  sparse message: some elements and their indices
======  =====  ===========================================================================================
0       1      version, 2
1       1      flags: 1 non-finite, 2 stale (see `mpicomp.reducer`), 4 damaged: the sender could not read a message,
               and only the flags of this one count
2       1      values: 1 float32, 2 float64, 3 fp16, 4 bf16, 5 signs, 6 q8, 7 q4, 8 q2
3       1      indices: 1 plain, 2 elias-fano
4       4      count c, unsigned
8       8      energy: squared L2 norm of the sender's whole accumulated gradient
16      8      lost: energy of unsent elements, and of the rounding of sent ones
24      c x v  values, of v = 4, 8, 2 or 2 bytes; padded to 8 bytes. Of signs, where there are values: a bit each, in
               words of 8 bytes, set where one is negative; then their mean magnitude, float32, padded to 8 bytes as
               well. Of q8, q4 and q2: codes of 8, 4 or 2 bits, from the lowest bits of bytes on, padded to 8 bytes;
               then for every 256 values a base and a step, float32, see `mpicomp.kernels.cpu.quadratic_levels`
then    ..     indices, ascending: c x 4 bytes, unsigned and padded to 8 bytes; or their code, see
               `mpicomp.kernels.cpu.index_bytes`
======  =====  ===========================================================================================

A dense message has all elements, in full or in 16 bits, or as a quantiser packs them. Its header has version 1 and, in
bytes 2 and 3, the length in words of 8 bytes, this header among them, modulo 65536. Elements follow from byte 24 on.

Numbers are little-endian, and padding is zero. Every field is aligned where the message is to 8 bytes.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.errors import MessageError
from mpicomp.gpu import current_device, received_on_host, to_python
from mpicomp.kernels import sizes
from mpicomp.setting_checks import check_choice
from mpicomp.workspace import Workspace

HEADER_BYTES = 24
NONFINITE = 1  # flag: some element was NaN or infinite
STALE = 2  # flag: this rank asks all ranks to agree again
DAMAGED = 4  # flag: this rank could not read a message

BITS = {"q8": 8, "q4": 4, "q2": 2}  # bits of a value; see `mpicomp.kernels.cpu.quadratic_levels`
SHARING = ("signs", *BITS)
"""Formats whose values share a scale: they can neither be cut out of a message nor added in it."""
VALUES = (None, "fp16", "bf16", *SHARING)
INDICES = ("plain", "elias-fano")
SIGNS = 64  # signs in a word

_SPARSE, _DENSE = 2, 1  # versions
_MIN_CODED = 64  # indices; see `compact`
_CODE_BYTES = 3  # an index, at most; see `compact`
_CODED = {"plain": (1 << 62, 0), "elias-fano": (0, 1 << 20), "auto": (_MIN_CODED, _CODE_BYTES)}
"""Least number of indices that are coded, and most bytes of a coded one, by format of indices."""
_KNOWN_FLAGS = NONFINITE | STALE | DAMAGED
_FULL = {np.dtype(np.float32): "float32", np.dtype(np.float64): "float64"}
_VALUE_CODES = {"float32": 1, "float64": 2, "fp16": 3, "bf16": 4, "signs": 5, "q8": 6, "q4": 7, "q2": 8}
_INDEX_CODES = {"plain": 1, "elias-fano": 2}
_HEADER = struct.Struct("<BBHIdd")  # version, flags, formats or words, elements, energy, lost


@dataclass(frozen=True)
class Wire:
    """Formats of a sparse message: values in ``VALUES`` (None: the array's dtype), indices in ``INDICES``."""

    values: str | None = None
    indices: str = "plain"

    def __post_init__(self) -> None:
        check_choice("message", "values", self.values, VALUES)
        check_choice("message", "indices", self.indices, INDICES)


@dataclass
class Selection:
    """Elements of an array: ``indices`` ascending without repetition, and the array's ``values`` there."""

    indices: NDArray[np.uint32]
    values: NDArray[np.floating]


@dataclass
class Sparse:
    """A sparse message that was read."""

    selection: Selection
    flags: int
    energy: float
    lost: float


@dataclass
class SparseHeader:
    """The header of a sparse message, and where its values and indices begin among several messages."""

    flags: int
    energy: float
    lost: float
    stored: str = ""
    coding: str = ""
    count: int = 0
    values_at: int = 0
    indices_at: int = 0


def compact(count: int, numel: int) -> str:
    """Return the format of ``count`` indices below ``numel``, from shapes alone, so the same on all ranks.

    At least 64 indices are coded, to at most three quarters of plain integers: coding and decoding take 1.5 ns an index
    each, and together at least 3 us, more than fewer save at 1 Gbit/s.

    >>> compact(63, 100_000), compact(64, 100_000), compact(64, 2**32 - 1)
    ('plain', 'elias-fano', 'plain')
    """
    return "elias-fano" if count >= _MIN_CODED and sizes.index_bytes(count, numel) <= _CODE_BYTES * count else "plain"


def value_bytes(count: int, dtype: np.dtype[Any], stored: str | None) -> int:
    """Return the bytes of ``count`` values in a format of `Wire`, without padding.

    >>> [value_bytes(100, np.dtype(np.float32), stored) for stored in (None, "fp16", "q8", "q4", "q2", "signs")]
    [400, 200, 112, 64, 40, 20]
    """
    if stored in BITS:
        return sizes.quadratic_bytes(count, BITS[stored])
    if stored == "signs":
        return 8 * -(-count // SIGNS) + 4 * (count > 0)
    return count * (2 if stored in ("fp16", "bf16") else dtype.itemsize)


def sparse_bytes(count: int, numel: int, dtype: np.dtype[Any], wire: Wire) -> int:
    """Return the bytes of a sparse message with ``count`` elements of an array of ``numel``.

    >>> [sparse_bytes(100, 10_000, np.dtype(np.float32), wire) for wire in (Wire(), Wire("fp16", "elias-fano"))]
    [824, 344]
    """
    return sparse_parts(count, numel, dtype, wire.values, wire.indices)[1]


def sparse_parts(count: int, numel: int, dtype: np.dtype[Any], stored: str | None, coding: str) -> tuple[int, int]:
    """Return the bytes at which a sparse message's indices begin and at which it ends."""
    middle = HEADER_BYTES + _padded(value_bytes(count, dtype, stored))
    return middle, middle + (_padded(4 * count) if coding == "plain" else sizes.index_bytes(count, numel))


def capacity_bytes(count: int, numel: int, dtype: np.dtype[Any], wire: Wire) -> int:
    """Return the bytes that hold any sparse message with at most ``count`` elements of an array of ``numel``."""
    # A code of fewer indices never has more bits, but its two parts are padded, by at most two words.
    return sparse_bytes(count, numel, dtype, wire) + (0 if wire.indices == "plain" else 16)


def sparse_lead(count: int, dtype: np.dtype[Any], wire: Wire, flags: int = 0) -> int:
    """Return the first 8 bytes of a sparse message as an integer."""
    formats = _VALUE_CODES[wire.values or _FULL[dtype]] | _INDEX_CODES[wire.indices] << 8
    return _SPARSE | flags << 8 | formats << 16 | count << 32


def write_sparse(
    out: NDArray[np.uint8], selection: Selection, numel: int, wire: Wire,
    flags: int, energy: float, kept: float | NDArray[np.floating], finite: bool = True,
) -> float:  # fmt: skip
    """Fill a message of `sparse_bytes`, aligned to 8, and return the energy lost by rounding.

    If values are stored in fewer bits, ``selection.values`` receives the decoded numbers, so that the rounding error
    stays in the residual: it must not share memory with the accumulated array. ``energy`` and ``kept`` are the squared
    L2 norms of that array and of the selected values before the call; of values in full ``kept`` may be these values,
    whose norm is then computed with the header. ``finite=False`` sets `NONFINITE`. Wrong indices raise nothing here:
    `read_sparse` refuses them on all ranks.
    """
    indices, values = selection.indices, selection.values
    if values.size != indices.size:
        raise ValueError(f"write_sparse: {indices.size} indices do not fit {values.size} values")
    middle, end = sparse_parts(indices.size, numel, values.dtype, wire.values, wire.indices)
    if out.size != end:
        raise ValueError(f"write_sparse: the message has {end} bytes, out has {out.size}")
    filled = HEADER_BYTES + value_bytes(values.size, values.dtype, wire.values)
    if filled < middle:
        out[filled:middle] = 0

    rounding = 0.0
    if wire.values is None:
        _view(out, HEADER_BYTES, values.size, values.dtype)[:] = values
    elif wire.values == "signs":
        signs, magnitude = _signs_at(out, HEADER_BYTES, values.size)
        rounding = kernels.pack_signs(values, SIGNS * signs.size, magnitude, signs, values)
    elif wire.values in BITS:
        rounding = kernels.pack_quadratic(values, BITS[wire.values], out[HEADER_BYTES:filled], values)
    else:
        halves = _view(out, HEADER_BYTES, values.size, np.uint16)
        rounding = kernels.narrow(values, wire.values, halves)
        kernels.widen(halves, wire.values, values)
    if wire.indices == "plain":
        _view(out, middle, indices.size, np.uint32)[:] = indices
        if middle + 4 * indices.size < end:
            out[middle + 4 * indices.size : end] = 0
    else:
        kernels.encode_indices(indices, numel, out[middle:])
    kernels.write_header(out, sparse_lead(indices.size, values.dtype, wire, flags), finite, energy, kept, rounding)
    return rounding


def message_to_fill(
    workspace: Workspace, nbytes: int, capacity: int, dtype: np.dtype[Any], indices: str, flags: int
) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return a cleared message on a device, the place of its values, and the form that a selection gives it.

    The device counts at most ``capacity`` elements, and chooses an ``"auto"`` format.
    """
    message = workspace.array("message", nbytes, np.uint8)
    message.fill(0)
    form = message, sparse_lead(0, dtype, Wire(), flags), *_CODED[indices]
    return message, _view(message, HEADER_BYTES, capacity, dtype), form


def write_damaged(out: NDArray[np.uint8]) -> None:
    """Mark a sparse message of any length as `DAMAGED`."""
    kernels.write_header(out, _SPARSE | DAMAGED << 8, True, 0.0, None, 0.0)


def read_sparse(
    message: NDArray[np.uint8], numel: int, dtype: np.dtype[Any], workspace: Workspace, expected: int | None = None
) -> Sparse:
    """Return a sparse message, whose elements are views of it where nothing has to be decoded.

    Decoded parts are valid until the next message is read with the same workspace. A `DAMAGED` message has no elements.
    ``expected`` is their number, if known. A wrong field, length, index or scale raises `MessageError`.
    """
    header = read_sparse_header(message, numel, dtype, expected)
    count, place = header.count, header.indices_at
    if header.flags & DAMAGED:
        nothing = Selection(workspace.array("none", 0, np.uint32), workspace.array("none", 0, dtype))
        return Sparse(nothing, header.flags, 0.0, 0.0)
    if header.coding == "plain":
        indices = _view(message, place, count, np.uint32)
        ascending = kernels.ascending_below(indices, numel)
    else:
        indices = workspace.array("decoded.indices", count, np.uint32)
        ascending = kernels.decode_indices(message[place:], count, numel, indices)
    sound: bool = True
    if header.stored in ("float32", "float64"):
        values = _view(message, HEADER_BYTES, count, dtype)
    else:
        values = workspace.array("decoded.values", count, dtype)
        if header.stored in SHARING:
            sound = unpack_sharing(message, [header], values)
        else:
            kernels.widen(_view(message, HEADER_BYTES, count, np.uint16), header.stored, values)
    ascending, sound = to_python(ascending, sound)
    if not ascending:
        raise MessageError(f"message: indices do not ascend below {numel}")
    if not sound:
        raise MessageError("message: scales of values are negative, or no finite numbers")
    return Sparse(Selection(indices, values), header.flags, header.energy, header.lost)


def unpack_sharing(memory: NDArray[np.uint8], headers: Sequence[SparseHeader], out: NDArray[np.floating]) -> bool:
    """Write the values of messages with one format of `SHARING` to ``out``; return whether scales are sound."""
    stored = headers[0].stored
    if stored in BITS:
        places, counts = [header.values_at for header in headers], [header.count for header in headers]
        sound: bool = kernels.unpack_quadratic(memory, places, counts, BITS[stored], out)
        return True if any(header.flags & NONFINITE for header in headers) else sound
    start = 0
    for header in headers:
        signs, magnitude = _signs_at(memory, header.values_at, header.count)
        kernels.unpack_signs(magnitude, signs, SIGNS * signs.size, out[start : start + header.count])
        start += header.count
    return True


def read_sparse_header(
    message: NDArray[np.uint8], numel: int, dtype: np.dtype[Any], expected: int | None = None, start: int = 0,
    head: NDArray[np.uint8] | None = None,
) -> SparseHeader:  # fmt: skip
    """Return the header of a message that begins at byte ``start`` of its memory; see `read_sparse` and `heads_of`."""
    flags, formats, count, energy, lost = _read_fields(message, _SPARSE, head)
    if flags & DAMAGED:
        return SparseHeader(flags, 0.0, 0.0)
    stored = _name_of(formats & 255, _VALUE_CODES, "values")
    coding = _name_of(formats >> 8, _INDEX_CODES, "indices")
    if stored in ("float32", "float64") and stored != _FULL[dtype]:
        raise MessageError(f"message: values must be {dtype.name} or have at most 16 bits, got {stored}")
    if count > numel:
        raise MessageError(f"message: {count} values do not come from {numel} elements")
    if expected is not None and count != expected:
        raise MessageError(f"message: {expected} values are expected, got {count}")
    middle, end = sparse_parts(count, numel, dtype, stored, coding)
    if message.size != end:
        raise MessageError(f"message: {count} values make {end} bytes, got {message.size}")
    return SparseHeader(flags, energy, lost, stored, coding, count, start + HEADER_BYTES, start + middle)


def count_in(message: NDArray[np.uint8]) -> int:
    """Return the number of elements of a message in host memory."""
    return int(_HEADER.unpack_from(message.data)[3])


def dense_bytes(numel: int, dtype: np.dtype[Any], stored: str | None) -> int:
    """Return the bytes of a dense message of ``numel`` elements in full or in 16 bits; a multiple of 8.

    >>> dense_bytes(3, np.dtype(np.float32), None), dense_bytes(3, np.dtype(np.float32), "fp16")
    (40, 32)
    """
    return HEADER_BYTES + _padded(value_bytes(numel, dtype, stored))


def write_dense_header(
    message: NDArray[np.uint8], count: int, flags: int, energy: float, lost: float, finite: bool = True
) -> None:
    """Fill the header of a dense message of ``count`` elements; the numbers may be known on a device only."""
    lead = _DENSE | flags << 8 | message.size // 8 % (1 << 16) << 16 | count << 32
    kernels.write_header(message, lead, finite, energy, None, lost)


def heads_of(messages: Iterable[NDArray[np.uint8]]) -> Sequence[NDArray[np.uint8]]:
    """Return the first bytes of received messages in host memory, with one wait."""
    heads = [message[:HEADER_BYTES] for message in messages]
    return heads if type(heads[0]) is np.ndarray else current_device().received_on_host(heads)


def read_dense_header(
    message: NDArray[np.uint8], count: int, head: NDArray[np.uint8] | None = None
) -> tuple[int, float, float]:
    """Return the flags, the energy and the lost energy of a dense message that has to have ``count`` elements."""
    flags, words, elements, energy, lost = _read_fields(message, _DENSE, head)
    if elements != count:
        raise MessageError(f"message: {count} elements are expected, got {elements}")
    if words != message.size // 8 % (1 << 16) or message.size % 8:
        raise MessageError(
            f"message: it has {message.size} bytes, of which its sender has written {words} words of 8 "
            f"(modulo {1 << 16})"
        )
    return flags, energy, lost


def read_dense_headers(messages: NDArray[np.uint8], count: int) -> tuple[int, float, float]:
    """Return all flags, and sums of the energies, of one message a rank, shape (ranks, bytes)."""
    flags, energy, lost = 0, 0.0, 0.0
    for rank, (message, head) in enumerate(zip(messages, heads_of(messages), strict=True)):
        try:
            fields = read_dense_header(message, count, head)
        except MessageError as error:
            raise MessageError(f"from rank {rank}: {error}") from error
        flags, energy, lost = flags | fields[0], energy + fields[1], lost + fields[2]
    return flags, energy, lost


def write_dense(
    array: NDArray[np.floating], stored: str | None, message: NDArray[np.uint8], sent: NDArray[np.floating]
) -> float:
    """Write an array behind a header, its rounded form to ``sent``; return the squared L2 norm of the rounding."""
    if stored is None:
        _view(message, HEADER_BYTES, array.size, array.dtype)[:] = array
        return 0.0
    rounding: float = kernels.narrow(array, stored, _view(message, HEADER_BYTES, array.size, np.uint16), sent)
    return rounding


def read_dense(message: NDArray[np.uint8], stored: str | None, out: NDArray[np.floating]) -> None:
    """Write a dense message's numbers to an array."""
    if stored is None:
        out[:] = _view(message, HEADER_BYTES, out.size, out.dtype)
    else:
        kernels.widen(_view(message, HEADER_BYTES, out.size, np.uint16), stored, out)


def add_dense(message: NDArray[np.uint8], stored: str | None, out: NDArray[np.floating]) -> None:
    """Add a dense message's numbers to an array, infinity and NaN among them."""
    if stored is None:
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(out, _view(message, HEADER_BYTES, out.size, out.dtype), out=out)
    else:
        kernels.widen_add(_view(message, HEADER_BYTES, out.size, np.uint16), stored, out)


def _read_fields(
    message: NDArray[np.uint8], version: int, head: NDArray[np.uint8] | None
) -> tuple[int, int, int, float, float]:
    if message.size < HEADER_BYTES:
        raise MessageError(f"message: at least {HEADER_BYTES} bytes are needed, got {message.size}")
    head = received_on_host(message[:HEADER_BYTES]) if head is None else head
    found, flags, layout, elements, energy, lost = _HEADER.unpack_from(head.data)
    if found != version:
        raise MessageError(f"message: version must be {version}, got {found}; run one mpicomp on all ranks")
    if flags > _KNOWN_FLAGS:
        raise MessageError(f"message: flags must be below {_KNOWN_FLAGS + 1}, got {flags}")
    return flags, layout, elements, energy, lost


def _name_of(code: int, names: dict[str, int], field: str) -> str:
    for name, known in names.items():
        if code == known:
            return name
    raise MessageError(f"message: {field} are stored in an unknown way, {code}; run one mpicomp on all ranks")


def _signs_at(memory: NDArray[np.uint8], start: int, count: int) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    words = -(-count // SIGNS)
    return _view(memory, start, words, np.uint64), _view(memory, start + 8 * words, min(count, 1), np.float32)


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def _view(memory: NDArray[np.uint8], start: int, count: int, dtype: Any) -> NDArray[Any]:
    dtype = np.dtype(dtype)
    return memory[start : start + count * dtype.itemsize].view(dtype)
