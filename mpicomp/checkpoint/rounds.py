"""Saving and loading, as rounds: all ranks do it, or all raise the same error."""

import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpicomp.arrays import ArraySpec
from mpicomp.checkpoint.file import Header, Leaf, RankFile, encode, file_name, write_file
from mpicomp.checkpoint.folder import begin, complete_folder, drop_older, finish, newest, part_folder
from mpicomp.checkpoint.redistribution import STATES, Redistribution, Rows, reducer_states, rows_in
from mpicomp.errors import CheckpointError, ConfigurationError, MpicompError
from mpicomp.reducer.agreement import Signature, agree
from mpicomp.rounds import Group, Round, Rounds
from mpicomp.transport.base import Value
from mpicomp.transport.connect import run_over

Folder = str | os.PathLike[str]


def save_checkpoint(folder: Folder, state: Any, comm: Any = None, keep: int = 1) -> None:
    """Write every rank's state, as a new checkpoint below a folder.

    Collective over ``comm``. An error on one rank is raised on all of them; after it, and after a crash at any moment,
    the checkpoints before are as they were. The next call removes what was left half written, and nothing else.

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
    >>> from mpicomp.transport import LocalWorld
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
    M, but residuals and velocities of reducers are redistributed: their means over the ranks are what they were.

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
        Where the checkpoint is incomplete, torn, changed since it was written, or made of files of several ones, or
        has nothing that fits other rows: the same on all ranks.
    DisagreementError
        Where ranks differ in ``folder`` or ``rows``.
    """
    return run_over(comm, lambda group: load_rounds(folder, group, rows))


def save_rounds(folder: Folder, state: Any, keep: int, group: Group) -> Rounds[Any]:
    """Do what `save_checkpoint` does as a generator of rounds, for ranks that live in one process."""

    def prepare() -> tuple[Path, str, list[tuple[Leaf, Any]], Signature]:
        path = _path(folder, "save_checkpoint")
        if type(keep) is not int or keep < 1:
            raise ConfigurationError(f"save_checkpoint: keep must be at least 1, got {keep!r}")
        tree, arrays = encode(state)
        sharded = rows_in(state)
        specs = [
            ArraySpec(f"{place}[{kind!r}][{name!r}]", str(array.dtype).removeprefix("torch."), tuple(array.shape))
            for place, reducer_state in reducer_states(state)
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
        what = f"save_checkpoint: cannot write below '{path}'"
        started, problem = _attempt(lambda: [begin(path), secrets.randbits(62)], what)
    number, token = yield from _from_rank_0(started or [0, 0], problem, group)
    part = part_folder(path, number)
    try:
        header = Header(number, token, group.size, group.rank)
        try:
            write_file(part / file_name(group.rank), header, tree, arrays)
        except Exception as error:
            problem = _not_saved(f"cannot write the file of rank {group.rank}: {error}")
        yield from agree(None, problem, group)
        if group.rank == 0:
            try:
                finish(path, number, group.size)
            except Exception as error:
                problem = _not_saved(str(error))
        yield from agree(None, problem, group)
    except MpicompError:
        if group.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise
    if group.rank == 0:
        drop_older(path, keep)


def load_rounds(folder: Folder, group: Group, rows: Rows | None = None) -> Rounds[Any]:
    """Do what `load_checkpoint` does as a generator of rounds, for ranks that live in one process."""
    path, problem = _attempt(lambda: _path(folder, "load_checkpoint"), "load_checkpoint: folder cannot be used")
    held = (rows or {}).items()
    specs = [ArraySpec(name, f"rows {first} to {end}", (length,)) for name, (first, end, length) in held]
    signature = None if path is None else Signature({"folder": str(path)}, specs)
    yield from agree(signature, problem, group, "load_checkpoint")
    assert path is not None
    found = problem = None
    if group.rank == 0:
        found, problem = _attempt(lambda: newest(path), f"load_checkpoint: cannot look into '{path}'")
    name, number, token, ranks = yield from _from_rank_0(found or [0, 0, 0, 0], problem, group)
    if ranks == 0:
        return None
    header = Header(number, token, ranks, 0)
    what = f"load_checkpoint: '{path}' cannot be read"
    state, problem = _attempt(lambda: _read(complete_folder(path, name), header, rows, group), what)
    yield from agree(None, problem, group)
    return state


def _path(folder: Any, subsystem: str) -> Path:
    if not isinstance(folder, str | os.PathLike) or not isinstance(os.fspath(folder), str):
        raise ConfigurationError(f"{subsystem}: folder must be a str or a path, got {folder!r}")
    return Path(folder)


def _attempt(work: Callable[[], Value], what: str) -> tuple[Value | None, MpicompError | None]:
    """Return the result of ``work`` and None, or None and an error that can be raised on all ranks."""
    try:
        return work(), None
    except MpicompError as error:
        return None, error
    except Exception as error:  # whatever it is, the other ranks have to raise it, too
        text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        return None, CheckpointError(f"{what}: {text}")


def _from_rank_0(numbers: Sequence[int], problem: MpicompError | None, group: Group) -> Rounds[list[int]]:
    """Return the numbers of rank 0 on all ranks, or raise its problem on all of them."""
    yield from agree(None, problem, group)
    send = np.array(numbers, np.int64)
    received = yield Round("bcast", (send.size,), send.dtype, send=send, recv=np.empty_like(send))
    return [int(number) for number in received]


def _not_saved(text: str) -> CheckpointError:
    return CheckpointError(
        f"save_checkpoint: {text}; the folder must be on a file system that all ranks share, with room for one more "
        "checkpoint. Those before are as they were"
    )


def _read(folder: Path, header: Header, rows: Rows | None, group: Group) -> Any:
    """Read this rank's state, however many ranks have written it."""

    def open_file(rank: int) -> RankFile:
        return RankFile(folder / file_name(rank)).check(header.of(rank))

    return Redistribution(open_file, header.ranks, rows, group).read()
