"""Checkpoints: one safetensors file a rank, in a folder that is renamed when all ranks have written theirs.

A crash at any moment leaves a checkpoint that can be loaded, on any number of ranks. torch is not imported here: a
script with tensors has imported it.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from mpicomp._version import __version__
from mpicomp.arrays import ArraySpec, to_host
from mpicomp.errors import CheckpointError, ConfigurationError, MpicompError
from mpicomp.mpi.connect import run_over
from mpicomp.mpi.rounds import Group, Round, Rounds
from mpicomp.mpi.transport import Value
from mpicomp.reducer.agreement import Signature, agree

Folder = str | os.PathLike[str]
Rows = Mapping[str, Sequence[int]]  # first row, end and number of rows of sharded parameters, by name

SCHEMA = 1
STATES = ("residuals", "velocities")  # keys of a reducer's state whose arrays belong to one rank

_NAME = re.compile(r"checkpoint-([0-9]{8,18})")
_STORED = {"bool": "BOOL", "float16": "F16", "float32": "F32", "float64": "F64"}  # safetensors' name of each dtype
_STORED |= {
    f"{name}{bits}": f"{sign}{bits}" for name, sign in (("int", "I"), ("uint", "U")) for bits in (8, 16, 32, 64)
}
_KINDS = "biufc"  # of NumPy's dtypes
_MAX_HEADER_BYTES = 100_000_000  # safetensors reads no larger one
_open_file: Any = safe_open  # typed in some versions only


def save_checkpoint(folder: Folder, state: Any, comm: Any = None, keep: int = 1) -> None:
    """Write every rank's state, as a new checkpoint below a folder.

    Collective over ``comm``. An error on one rank is raised on all of them; after it, and after a crash at any moment,
    older checkpoints are unchanged, and the next call removes incomplete files.

    Parameters
    ----------
    folder : str or path
        On a file system that all ranks share; made where it is missing. One job at a time writes there.
    state : dict, list or tuple
        A tree of dicts with strings or ints as keys, lists, tuples, None, bool, int, float, str, NumPy arrays and
        numbers, and dense torch tensors of any dtype and device. Subclasses of dict, list and tuple are loaded as
        these, a parameter as a tensor. Each rank passes its state.
    comm : mpi4py.MPI.Comm, Transport or None
        None stands for MPI.COMM_WORLD.
    keep : int
        How many checkpoints there are afterwards; older ones are removed once this one is in its place.

    Raises
    ------
    CheckpointError
        Where something in ``state`` cannot be stored, before a file is touched; where a file cannot be written.
    DisagreementError
        Where ranks differ in ``folder`` or ``keep``, or their reducers' states in names or shapes.

    Examples
    --------
    >>> import tempfile
    >>> from mpicomp.mpi import LocalWorld
    >>> alone = LocalWorld(1).transports[0]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(folder, {"epoch": 3, "betas": (0.9, 0.999)}, comm=alone)
    ...     load_checkpoint(folder, comm=alone)
    {'epoch': 3, 'betas': (0.9, 0.999)}
    """
    run_over(comm, lambda group: save_rounds(folder, state, keep, group))


def load_checkpoint(folder: Folder, comm: Any = None, rows: Rows | None = None) -> Any:
    """Read the newest checkpoint below a folder, on any number of ranks; nothing is modified. Collective over ``comm``.

    With as many ranks as wrote it, each gets its state. Otherwise rank ``r`` of N gets that of rank ``r * M // N`` of
    M, but residuals and velocities of reducers are redistributed: their means over the ranks are preserved.

    Parameters
    ----------
    folder : str or path
        As in `save_checkpoint`.
    comm : mpi4py.MPI.Comm, Transport or None
        None stands for MPI.COMM_WORLD.
    rows : mapping of str to (int, int, int), optional
        First row, end and number of rows of each parameter of a sharded model that this rank holds, as in
        ``optimizer.state_dict()["mpicomp"]["rows"]``. ``comm`` then is `mpicomp.torch.replicas`, ranks with the same
        rows, and all ranks of the job may have written: with any number of shards and replicas.

    Returns
    -------
    dict, list or tuple
        The state, its tensors in host memory; None on all ranks where there is no checkpoint yet.

    Raises
    ------
    CheckpointError
        Where the checkpoint is incomplete, torn or made of files of several ones, or has nothing that fits other rows:
        the same on all ranks.
    DisagreementError
        Where ranks differ in ``folder`` or ``rows``.
    """
    return run_over(comm, lambda group: load_rounds(folder, group, rows))


def save_rounds(folder: Folder, state: Any, keep: int, group: Group) -> Rounds[Any]:
    """Run `save_checkpoint` as a generator of rounds, for ranks that live in one process."""

    def prepare() -> tuple[Path, str, list[tuple[_Leaf, Any]], Signature]:
        path = _path(folder, "save_checkpoint")
        if type(keep) is not int or keep < 1:
            raise ConfigurationError(f"save_checkpoint: keep must be at least 1, got {keep!r}")
        arrays: list[tuple[_Leaf, Any]] = []
        tree = json.dumps(_encode(state, "state", arrays))
        sharded = _rows_in(state)
        specs = [
            ArraySpec(f"{place}[{kind!r}][{name!r}]", str(array.dtype).removeprefix("torch."), tuple(array.shape))
            for place, reducer_state in _reducer_states(state)
            for kind in STATES
            for name, array in reducer_state[kind].items()
            if name not in sharded
        ]
        return path, tree, arrays, Signature({"folder": str(path), "keep": keep}, specs)

    prepared, problem = _attempt(prepare, "save_checkpoint: state cannot be stored")
    yield from agree(prepared and prepared[-1], problem, group, "save_checkpoint")
    assert prepared is not None
    path, tree, arrays, _ = prepared
    started = problem = None
    if group.rank == 0:
        failure = f"save_checkpoint: cannot write below '{path}'"
        started, problem = _attempt(lambda: [_begin(path), secrets.randbits(62)], failure)
    number, token = yield from _from_rank_0(started or [0, 0], problem, group)
    part = path / f"{_name(number)}.part"
    try:
        try:
            _write(part, _Header(number, token, group.size, group.rank), tree, arrays)
        except Exception as error:
            problem = _not_saved(f"cannot write the file of rank {group.rank}: {error}")
        yield from agree(None, problem, group)
        if group.rank == 0:
            try:
                _finish(part, group.size)
            except Exception as error:
                problem = _not_saved(str(error))
        yield from agree(None, problem, group)
    except MpicompError:
        if group.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise
    if group.rank == 0:
        _drop_older(path, keep)


def load_rounds(folder: Folder, group: Group, rows: Rows | None = None) -> Rounds[Any]:
    """Run `load_checkpoint` as a generator of rounds, for ranks that live in one process."""
    path, problem = _attempt(lambda: _path(folder, "load_checkpoint"), "load_checkpoint: folder cannot be used")
    held = (rows or {}).items()
    specs = [ArraySpec(name, f"rows {first} to {end}", (length,)) for name, (first, end, length) in held]
    signature = None if path is None else Signature({"folder": str(path)}, specs)
    yield from agree(signature, problem, group, "load_checkpoint")
    assert path is not None
    newest = problem = None
    if group.rank == 0:
        newest, problem = _attempt(lambda: _newest(path), f"load_checkpoint: cannot look into '{path}'")
    header = _Header(*(yield from _from_rank_0(newest or [0, 0, 0, 0], problem, group)))
    if header.ranks == 0:
        return None
    state, problem = _attempt(
        lambda: _Redistribution(path / _name(header.number), header, rows, group).read(),
        f"load_checkpoint: '{path}' cannot be read",
    )
    yield from agree(None, problem, group)
    return state


def _path(folder: Any, subsystem: str) -> Path:
    if not isinstance(folder, str | os.PathLike) or not isinstance(os.fspath(folder), str):
        raise ConfigurationError(f"{subsystem}: folder must be a str or a path, got {folder!r}")
    return Path(folder)


def _attempt(work: Callable[[], Value], failure: str) -> tuple[Value | None, MpicompError | None]:
    try:
        return work(), None
    except MpicompError as error:
        return None, error
    except Exception as error:  # whatever it is, the other ranks have to raise it, too
        text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        return None, CheckpointError(f"{failure}: {text}")


def _from_rank_0(numbers: Sequence[int], problem: MpicompError | None, group: Group) -> Rounds[list[int]]:
    yield from agree(None, problem, group)
    send = np.array(numbers, np.int64)
    received = yield Round("bcast", (send.size,), send.dtype, send=send, recv=np.empty_like(send))
    return [int(number) for number in received]


def _not_saved(text: str) -> CheckpointError:
    return CheckpointError(
        f"save_checkpoint: {text}; the folder must be on a file system that all ranks share, with room for one more "
        "checkpoint. Older ones are unchanged"
    )


def _name(number: int) -> str:
    return f"checkpoint-{number:08d}"


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _numbers(folder: Path) -> list[int]:
    matches = [_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir()]
    return sorted(int(match[1]) for match in matches if match)


def _begin(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("checkpoint-*.part"):
        if _NAME.fullmatch(path.stem):
            shutil.rmtree(path)
    number = max([0, *_numbers(folder)]) + 1
    (folder / f"{_name(number)}.part").mkdir()
    return number


def _finish(part: Path, ranks: int) -> None:
    for rank in range(ranks):
        if not (part / _file_name(rank)).exists():
            raise CheckpointError(f"rank 0 does not see the file of rank {rank} in '{part}'")
    _sync(part)
    part.rename(part.with_suffix(""))
    _sync(part.parent)


def _sync(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot sync folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _drop_older(folder: Path, keep: int) -> None:
    with contextlib.suppress(OSError):
        for number in _numbers(folder)[:-keep]:
            complete = folder / _name(number)
            shutil.rmtree(complete.rename(f"{complete}.part"), ignore_errors=True)


def _newest(folder: Path) -> list[int]:
    try:
        number = max(_numbers(folder), default=0)
    except FileNotFoundError:
        number = 0
    return [number, *_RankFile(folder / _name(number) / _file_name(0)).header[1:]] if number else [0] * 4


class _Header(NamedTuple):
    """The checkpoint of a file; the token differs between checkpoints with the same number."""

    number: int
    token: int
    ranks: int
    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks} of checkpoint {self.number:08d}-{self.token:016x}"


class _Leaf(NamedTuple):
    """Kind, dtype and shape in which an array is restored, and its name in the file; odd dtypes are stored as bytes."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]


def _encode(value: Any, path: str, arrays: list[tuple[_Leaf, Any]]) -> Any:
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
            f"save_checkpoint: {path} is a {_type_name(value)} and cannot be stored; a state consists of dicts, lists, "
            "tuples, None, bool, int, float, str, NumPy numbers and arrays of them, and dense torch tensors"
        )
    arrays.append((leaf, value))
    return {leaf.kind: path, "dtype": leaf.dtype, "shape": leaf.shape}


def _leaf(value: Any, path: str) -> _Leaf | None:
    if type(value) is np.ndarray or isinstance(value, np.generic):
        dtype = value.dtype
        if dtype.kind not in _KINDS:
            return None
        name = dtype.name if dtype.isnative and dtype.name in _STORED else dtype.str
        return _Leaf("array" if type(value) is np.ndarray else "scalar", path, name, value.shape)
    torch = sys.modules.get("torch")
    # A subclass may hold more than its numbers, or only this rank's part of them.
    if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        return None
    return _Leaf("tensor", path, str(value.dtype).removeprefix("torch."), tuple(value.shape))


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


def _write(folder: Path, header: _Header, tree: str, arrays: Sequence[tuple[_Leaf, Any]]) -> None:
    about = json.dumps({"schema": SCHEMA, "mpicomp": __version__, **header._asdict()})
    entries: dict[str, Any] = {"__metadata__": {"mpicomp": about, "state": tree}}
    arrays = sorted(arrays, key=lambda array: -array[1].itemsize if array[0].dtype in _STORED else 0)  # keeps alignment
    stop = 0
    for leaf, value in arrays:
        start, stop = stop, stop + value.nbytes
        shape = leaf.shape if leaf.dtype in _STORED else [value.nbytes]
        entries[leaf.name] = {"dtype": _STORED.get(leaf.dtype, "U8"), "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise ValueError(
            f"state without its arrays may have at most {_MAX_HEADER_BYTES} bytes as JSON, got {len(text)}; make "
            "arrays of long lists"
        )
    with open(folder / _file_name(header.rank), "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, value in arrays:
            file.write(_bytes_of(value).data)
        file.flush()
        os.fsync(file.fileno())


class _RankFile:
    """A rank's file of a checkpoint, open for reading; its tree has descriptions in place of arrays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = _open_file(path, framework="numpy")
            metadata: dict[str, str] = self._file.metadata() or {}
            about = json.loads(metadata["mpicomp"])
            schema, wrote = about["schema"], about["mpicomp"]
            if schema == SCHEMA:
                self.header = _Header(*(int(np.int64(about[field])) for field in _Header._fields))
                self.tree = _decode(json.loads(metadata["state"]))
                self.leaves = {leaf.name: leaf for _, leaf in _walk(self.tree) if isinstance(leaf, _Leaf)}
        except FileNotFoundError:
            raise self.error("is missing") from None
        except Exception as error:
            raise self.error(f"is torn, or no file of a checkpoint ({type(error).__name__}: {error})") from None
        if schema != SCHEMA:
            raise CheckpointError(
                f"load_checkpoint: '{path}' has schema {schema!r} of mpicomp {wrote}, and mpicomp {__version__} reads "
                f"schema {SCHEMA}; load it with that version"
            )

    def read(self, leaf: _Leaf) -> Any:
        try:
            return self._read(leaf)
        except CheckpointError:
            raise
        except Exception as error:
            raise self.error(f"cannot be read ({type(error).__name__}: {error})") from None

    def _read(self, leaf: _Leaf) -> Any:
        stored = self._file.get_tensor(leaf.name)
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

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"load_checkpoint: '{self.path}' {problem}; where an older checkpoint was kept, moving this folder away "
            "loads that one"
        )


def _decode(node: Any) -> Any:
    if isinstance(node, list):
        return [_decode(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    if "dict" in node:
        return {key: _decode(inner) for key, inner in node["dict"]}
    if "tuple" in node:
        return tuple(_decode(inner) for inner in node["tuple"])
    (kind,) = node.keys() - {"dtype", "shape"}
    return _Leaf(kind, node[kind], node["dtype"], tuple(node["shape"]))


class _Redistribution:
    """Reads the part of a checkpoint's files that belongs to a rank of ``group``, which holds ``rows``, if any.

    Arrays of sharded parameters are concatenated by name and row, each from the ranks that held its rows, one in every
    replica. `STATES`, which replicas do not share, are averaged by `weights`; the rest is that of one replica.
    """

    def __init__(self, folder: Path, header: _Header, rows: Rows | None, group: Group) -> None:
        self._folder, self._header, self._group, self._rows = folder, header, group, rows or {}
        self._opened: dict[int, _RankFile] = {}
        _RankFile(folder / _file_name(header.ranks - 1))  # the number of ranks may be that of a damaged file
        self._pieces: dict[str, dict[tuple[int, int], list[int]]] = {}  # of a parameter, by rows those who held them
        shared_rows, self._is_same = [0] * header.ranks, [True] * header.ranks
        held = [{} if rows is None else _rows_in(self._file(rank).tree) for rank in range(header.ranks)]
        for name, (first, end, length) in self._rows.items():
            self._pieces[name] = self._pieces_of(name, length, held)
            for (low, high), ranks in self._pieces[name].items():
                for rank in ranks:
                    shared_rows[rank] += max(0, min(end, high) - max(first, low))
            for rank in range(header.ranks):
                self._is_same[rank] &= (first, end) == tuple(held[rank].get(name, (0, length)))[:2]
        nearest = [rank for rank in range(header.ranks) if shared_rows[rank] == max(shared_rows)]
        self._nearest = nearest[group.rank * len(nearest) // group.size]
        self._averaged: set[str] = set()  # places of dicts whose arrays are averaged

    def read(self) -> Any:
        """Return the state."""
        file = self._file(self._nearest)
        if not self._rows and self._group.size != self._header.ranks and _rows_in(file.tree):
            raise CheckpointError(
                f"load_checkpoint: '{file.path.parent}' was written by {self._header.ranks} ranks with shards of a "
                f"model, and {self._group.size} load it; pass comm=mpicomp.torch.replicas(model) and "
                "rows=optimizer.state_dict()['mpicomp']['rows']"
            )
        self._averaged = {f"{place}[{kind!r}]" for place, _ in _reducer_states(file.tree) for kind in STATES}
        state = self._made(file.tree, "state")
        if not self._is_same[self._nearest]:
            for _, reducer_state in _reducer_states(state):
                reducer_state["memories"] = {}  # learned from buckets with other rows
        return state

    def _pieces_of(self, name: str, length: int, held: Sequence[Rows]) -> dict[tuple[int, int], list[int]]:
        pieces: dict[tuple[int, int], list[int]] = {}
        for rank, of_rank in enumerate(held):
            first, end, whole = of_rank.get(name, (0, 0, 0)) if of_rank else (0, length, length)
            if whole != length:
                raise CheckpointError(
                    f"load_checkpoint: the checkpoint is of another model: '{name}' has {whole} rows in it, and "
                    f"{length} here; load it into the model that wrote it"
                )
            if first < end:
                pieces.setdefault((first, end), []).append(rank)
        return dict(sorted(pieces.items()))

    def _file(self, rank: int) -> _RankFile:
        if rank not in self._opened:
            file, expected = _RankFile(self._folder / _file_name(rank)), self._header._replace(rank=rank)
            if file.header != expected:
                raise file.error(f"is the file of {file.header}, where that of {expected} must be")
            self._opened[rank] = file
        return self._opened[rank]

    def _made(self, node: Any, place: str) -> Any:
        if isinstance(node, _Leaf):
            return self._file(self._nearest).read(node)
        if isinstance(node, list | tuple):
            return type(node)(self._made(inner, f"{place}[{index}]") for index, inner in enumerate(node))
        if not isinstance(node, dict):
            return node
        if place.endswith("['rows']") and _rows_in({"rows": node}) and self._rows:
            return {name: list(self._rows[name]) for name in self._rows if name in node}
        made = {}
        held = [name for name, (first, end, _) in self._rows.items() if first < end]
        for name in dict.fromkeys([*node, *held]):
            inside = f"{place}[{name!r}]"
            array = None
            if place in self._averaged or name in self._rows:
                array = self._array(name, inside, place in self._averaged)
            if array is not None:
                made[name] = array
            elif name in node:
                made[name] = self._made(node[name], inside)
        return made

    def _array(self, name: str, place: str, averaged: bool) -> Any:
        if name not in self._rows:
            return self._mean(range(self._header.ranks), place, averaged)
        parts: list[Any] = []
        first, end, _ = self._rows[name]
        for (low, high), ranks in self._pieces[name].items():
            if (low < end and first < high) or (first == end and not parts):  # without rows a part has the shape
                whole = self._mean(ranks, place, averaged)
                if whole is None or whole.shape[:1] != (high - low,):
                    return None
                parts.append(whole[max(first, low) - low : max(0, min(end, high) - low)])
        if len(parts) < 2:
            return parts[0] if parts else None
        return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else sys.modules["torch"].cat(parts)

    def _mean(self, ranks: Sequence[int], place: str, averaged: bool) -> Any:
        rank, size = self._group.rank, self._group.size
        shares = weights(rank, size, len(ranks)) if averaged else {rank * len(ranks) // size: 1.0}
        arrays = []
        for replica in shares:
            file = self._file(ranks[replica])
            if place not in file.leaves:
                return None
            arrays.append(file.read(file.leaves[place]))
        if len(arrays) == 1:
            return arrays[0]
        wide = [to_host(array).astype(np.float64) for array in arrays]
        mean = sum((share * array for share, array in zip(shares.values(), wide, strict=True)), np.zeros_like(wide[0]))
        mean = np.asarray(mean, to_host(arrays[0]).dtype)
        return mean if isinstance(arrays[0], np.ndarray) else sys.modules["torch"].from_numpy(mean)


def _walk(tree: Any, place: str = "state") -> Iterator[tuple[str, Any]]:
    yield place, tree
    if isinstance(tree, dict | list | tuple) and not isinstance(tree, _Leaf):
        for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _walk(inner, f"{place}[{key!r}]")


def _rows_in(tree: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for _, node in _walk(tree):
        rows = node.get("rows") if isinstance(node, dict) else None
        if isinstance(rows, dict) and all(isinstance(held, list) and len(held) == 3 for held in rows.values()):
            found |= rows
    return found


def _reducer_states(tree: Any) -> list[tuple[str, dict[str, Any]]]:
    def holds_arrays(value: Any) -> bool:  # or their descriptions
        return isinstance(value, dict) and all(hasattr(array, "shape") for array in value.values())

    nodes = [(place, node) for place, node in _walk(tree) if isinstance(node, dict) and "schema" in node]
    return [(place, node) for place, node in nodes if all(holds_arrays(node.get(kind)) for kind in STATES)]


def weights(rank: int, ranks: int, written: int) -> dict[int, float]:
    """Return the share of each of the ``written`` ranks' residuals in that of a new rank.

    Old and new ranks share the line from 0 to 1 evenly, and weigh as much as their parts overlap. Shares of a rank sum
    to 1, so that the mean over ranks, which error feedback has still to deliver, stays the same.

    >>> weights(0, 2, 4), weights(3, 4, 2), weights(1, 2, 3)
    ({0: 0.5, 1: 0.5}, {1: 1.0}, {1: 0.3333333333333333, 2: 0.6666666666666666})
    """
    start, stop = rank * written, (rank + 1) * written  # in parts of which each old rank has `ranks`
    return {
        source: (min(stop, (source + 1) * ranks) - max(start, source * ranks)) / written
        for source in range(start // ranks, -(-stop // ranks))
    }
