"""One rank's file of a checkpoint: a tree of values as JSON, and its arrays, in the safetensors format.

torch is not imported here: a script with tensors has imported it.
"""

import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from mpicomp._version import __version__
from mpicomp.errors import CheckpointError

SCHEMA = 1

_safe_open: Any = safe_open  # typed in some versions only

_STORED = {"bool": "BOOL", "float16": "F16", "float32": "F32", "float64": "F64"}
_STORED |= {
    f"{name}{bits}": f"{sign}{bits}" for name, sign in (("int", "I"), ("uint", "U")) for bits in (8, 16, 32, 64)
}
_KINDS = "biufc"
LAST = 10**18 - 1  # highest number of a checkpoint, of 18 digits
_LARGEST = 2**63 - 1  # largest number of a checkpoint: rank 0 sends numbers to the others as int64
_PART = 1 << 20  # bytes that are worked on at a time
_START = b'{"__metadata__": {"mpicomp": '
_START_BYTES = 4096  # bytes at the start of a file that hold its description
_TREE_LIMIT = 20 << 20  # safetensors reads no header above 100 MB, and JSON within JSON grows
_BLANK = "0" * 8  # in place of a CRC-32 that is not known yet: of four bytes, as hexadecimal digits
_CHECKSUMS = "header_crc32", "crc32"
_WAY_OUT = "where an older checkpoint was kept, moving this folder away loads that one"


@dataclass(frozen=True)
class Leaf:
    """Kind, dtype and shape in which an array is restored, and its name in the file; odd dtypes are stored as bytes."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Header:
    """The checkpoint of a file; the token differs between checkpoints with the same number."""

    checkpoint: int
    token: int
    ranks: int
    rank: int

    def of(self, rank: int) -> "Header":
        return Header(self.checkpoint, self.token, self.ranks, rank)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks} of checkpoint {self.checkpoint:08d}-{self.token:016x}"


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def is_file_name(name: str) -> bool:
    """Return whether a name is that of a rank's file."""
    return re.fullmatch(r"rank-[0-9]{5,}\.safetensors", name) is not None


def header_of(path: Path) -> Header | None:
    """Return the header of a rank's file, even of a file that is torn after it; None if there is none."""
    try:
        with open(path, "rb") as file:
            start = file.read(_START_BYTES)[8:]
        if not start.startswith(_START):
            return None
        about, _ = json.JSONDecoder().raw_decode(start[len(_START) :].decode("ascii", "replace"))
        return _header(json.loads(about))
    except Exception:  # a file of another program may hold anything
        return None


def _header(about: dict[str, Any]) -> Header:
    header = Header(**{key: about[key] for key in about.keys() - {"schema", "mpicomp"}})
    values = asdict(header).values()
    if about["schema"] != SCHEMA or any(type(value) is not int or not 0 <= value <= _LARGEST for value in values):
        raise ValueError(header)
    if header.checkpoint > LAST or header.rank >= header.ranks:
        raise ValueError(header)
    return header


def encode(state: Any) -> tuple[str, list[tuple[Leaf, Any]]]:
    """Return a tree as JSON, with names in place of arrays, and its arrays; or raise a `CheckpointError`."""
    arrays: list[tuple[Leaf, Any]] = []
    try:
        text = json.dumps(_encode(state, "state", arrays))
    except (RecursionError, ValueError) as error:  # a tree that holds itself; an int of thousands of digits
        raise CheckpointError(f"save_checkpoint: state cannot be written as JSON: {error}") from None
    if len(text) > _TREE_LIMIT:
        raise CheckpointError(
            f"save_checkpoint: state without its arrays may have at most {_TREE_LIMIT} bytes as JSON, got {len(text)}; "
            "make arrays of long lists"
        )
    return text, arrays


def _encode(value: Any, path: str, arrays: list[tuple[Leaf, Any]]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (int, str):
                raise CheckpointError(
                    f"save_checkpoint: keys must be strings or ints, got {key!r} ({_type_name(key)}) in {path}"
                )
        return {"dict": [[key, _encode(inner, f"{path}[{key!r}]", arrays)] for key, inner in value.items()]}
    if isinstance(value, list | tuple):
        items = [_encode(inner, f"{path}[{place}]", arrays) for place, inner in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    leaf = _leaf(value, path)
    if leaf is None:
        raise CheckpointError(
            f"save_checkpoint: {path} is a {_type_name(value)} and cannot be stored; what can are dicts, lists, "
            "tuples, None, bool, int, float, str, NumPy numbers and arrays of them, and dense torch tensors"
        )
    arrays.append((leaf, value))
    return {leaf.kind: path, "dtype": leaf.dtype, "shape": leaf.shape}


def _leaf(value: Any, path: str) -> Leaf | None:
    """Return the description of an array; None for another object, or an array that cannot be stored."""
    if type(value) is np.ndarray or isinstance(value, np.generic):
        dtype = value.dtype
        if dtype.kind not in _KINDS:
            return None
        name = dtype.name if dtype.isnative and dtype.name in _STORED else dtype.str
        return Leaf("array" if type(value) is np.ndarray else "scalar", path, name, value.shape)
    torch = sys.modules.get("torch")
    # A subclass may hold more than its numbers, or only this rank's part of them.
    if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        return None
    return Leaf("tensor", path, str(value.dtype).removeprefix("torch."), tuple(value.shape))


def _bytes_of(value: Any) -> NDArray[np.uint8]:
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value, order="C").reshape(-1).view(np.uint8)
    tensor = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    tensor = tensor.as_strided((tensor.numel(),), (1,))  # reshape keeps the odd stride of a single element
    flat: NDArray[np.uint8] = tensor.view(sys.modules["torch"].uint8).numpy()
    return flat


def _type_name(value: Any) -> str:
    cls = type(value)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    dtype = getattr(value, "dtype", None)
    return name if dtype is None else f"{name} of {dtype}"


def write_file(path: Path, header: Header, tree: str, arrays: Sequence[tuple[Leaf, Any]]) -> None:
    """Write a new file, and sync it to the disk.

    The metadata has a CRC-32 of each array, in the order of the file, and one of the header with zeros in its place:
    against damage by disks and networks, not against forgery. A GB takes a quarter of a second; BLAKE2 takes more than
    one, as long as writing. The writer of safetensors is not used: its permissions and errors differ between versions,
    and it needs all arrays in host memory at once.
    """
    about = {"schema": SCHEMA, "mpicomp": __version__, **asdict(header)}
    metadata = {"mpicomp": json.dumps(about), "header_crc32": _BLANK, "crc32": _BLANK * len(arrays), "state": tree}
    entries: dict[str, Any] = {"__metadata__": metadata}
    arrays = sorted(arrays, key=lambda array: -array[1].itemsize if array[0].dtype in _STORED else 0)  # keeps alignment
    stop = 0
    for leaf, value in arrays:
        start, stop = stop, stop + value.nbytes
        shape = leaf.shape if leaf.dtype in _STORED else [value.nbytes]
        entries[leaf.name] = {"dtype": _STORED.get(leaf.dtype, "U8"), "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    sums = ""
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, value in arrays:
            sums += _write(file, _bytes_of(value).data)
        # Checksums are known only now: an array on a device is copied once.
        text = _with_field(text, "crc32", metadata["crc32"], sums)
        file.seek(8)
        file.write(_with_field(text, "header_crc32", _BLANK, _crc32(text)))
        file.flush()
        os.fsync(file.fileno())


def _write(file: BinaryIO, data: memoryview) -> str:
    """Write bytes and return their CRC-32, part by part: each is still in a cache when the system copies it."""
    crc32 = 0
    for start in range(0, len(data), _PART):
        part = data[start : start + _PART]
        crc32 = zlib.crc32(part, crc32)
        file.write(part)
    return f"{crc32:08x}"


def _crc32(data: Any) -> str:
    return f"{zlib.crc32(data):08x}"


def _with_field(text: bytes, key: str, old: str, new: str) -> bytes:
    """Return a header with another value in its metadata; within other values quotes have a backslash."""
    return text.replace(f'"{key}": "{old}"'.encode(), f'"{key}": "{new}"'.encode(), 1)


class RankFile:
    """A rank's file of a checkpoint, open for reading; one that is missing, torn or foreign is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = _safe_open(path, framework="numpy")
            self._metadata: dict[str, str] = self._file.metadata() or {}
        except FileNotFoundError:
            raise self._error("is missing") from None
        except Exception as error:
            raise self._error(f"is torn, or no safetensors file ({error})") from None
        try:
            about = json.loads(self._metadata["mpicomp"])
            schema, wrote = about["schema"], about["mpicomp"]
            if type(schema) is not int or type(wrote) is not str:
                raise ValueError(about)
            if schema == SCHEMA:
                self.header = _header(about)
        except Exception:
            raise self._error("is a safetensors file, but not one of a checkpoint of mpicomp") from None
        if schema != SCHEMA:
            raise CheckpointError(
                f"load_checkpoint: '{path}' has schema {schema!r} of mpicomp {wrote}, and mpicomp {__version__} reads "
                f"schema {SCHEMA}; load it with that version"
            )
        self._sums: dict[str, str] = self._guarded(self._checked_sums)

    def check(self, header: Header) -> "RankFile":
        """Return self, or raise the error of another header."""
        if self.header != header:
            raise self._error(f"is the file of {self.header}, where that of {header} must be")
        return self

    def tree(self, fetch: Callable[[Leaf], Any] = lambda leaf: leaf) -> Any:
        """Return the tree, with the results of ``fetch`` in place of arrays."""
        return self._guarded(lambda: _decode(json.loads(self._metadata["state"]), fetch))

    def read(self, leaf: Leaf) -> Any:
        return self._guarded(lambda: self._read(leaf))

    def _checked_sums(self) -> dict[str, str]:
        """Return the checksum of each array, or raise the error of a header that has changed."""
        with open(self.path, "rb") as file:
            text = file.read(int.from_bytes(file.read(8), "little"))
        header_sum, sums = (self._metadata.get(key, "") for key in _CHECKSUMS)
        if _crc32(_with_field(text, "header_crc32", header_sum, _BLANK)) != header_sum:
            raise self._error("cannot be read: its header has changed since it was written")
        names = [name for name in json.loads(text) if name != "__metadata__"]
        return {name: sums[8 * place : 8 * place + 8] for place, name in enumerate(names)}

    def _read(self, leaf: Leaf) -> Any:
        stored = self._file.get_tensor(leaf.name)
        if _crc32(stored.reshape(-1).view(np.uint8)) != self._sums[leaf.name]:
            raise self._error(f"cannot be read: {leaf.name} has changed since it was written")
        if leaf.kind == "tensor":
            torch = sys.modules.get("torch")
            if torch is None:
                raise CheckpointError(f"load_checkpoint: '{self.path}' holds torch tensors; import torch before it")
            tensor, dtype = torch.from_numpy(stored), getattr(torch, leaf.dtype)
            if tensor.dtype != dtype:  # bytes; an empty tensor cannot be viewed as another dtype
                tensor = tensor.view(dtype) if stored.size else torch.empty(0, dtype=dtype)
            return tensor.reshape(leaf.shape)
        dtype = np.dtype(leaf.dtype)
        if dtype.kind not in _KINDS:
            raise ValueError(f"dtype {dtype} of {leaf.name}")
        array = (stored if stored.dtype == dtype else stored.view(dtype)).reshape(leaf.shape)
        return array[()] if leaf.kind == "scalar" else array

    def _guarded(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except CheckpointError:
            raise
        except Exception as error:
            raise self._error(f"cannot be read ({type(error).__name__}: {error})") from None

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"load_checkpoint: '{self.path}' {what}; {_WAY_OUT}")


def _decode(node: Any, fetch: Callable[[Leaf], Any]) -> Any:
    if isinstance(node, list):
        return [_decode(inner, fetch) for inner in node]
    if not isinstance(node, dict):
        return node
    if "dict" in node:
        return {key: _decode(inner, fetch) for key, inner in node["dict"]}
    if "tuple" in node:
        return tuple(_decode(inner, fetch) for inner in node["tuple"])
    (kind,) = node.keys() - {"dtype", "shape"}
    return fetch(Leaf(kind, node[kind], node["dtype"], tuple(node["shape"])))
