"""Saving and loading, as rounds: all ranks do it, or all raise the same error."""

import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpicomp.arrays import ArraySpec
from mpicomp.checkpoint.file import Header, RankFile, encode, file_name, write_file
from mpicomp.checkpoint.folder import begin, complete_folder, drop_older, finish, newest, part_folder
from mpicomp.checkpoint.shares import STATES, reducers, shared_anew, weights
from mpicomp.errors import CheckpointError, ConfigurationError, MpicompError
from mpicomp.reducer.agreement import Signature, agree
from mpicomp.rounds import Group, Round, Rounds
from mpicomp.transport.connect import connect

Folder = str | os.PathLike[str]


def save_checkpoint(folder: Folder, state: Any, comm: Any = None, keep: int = 1) -> None:
    """Write every rank's state, as a new checkpoint below a folder.

    Collective over ``comm``. An error on one rank is raised on all of them; it, and a crash at any moment, leaves the
    checkpoints before as they were. The next call removes what was left half written. What else lies in the folder is
    left alone, also where its name is a number.

    Parameters
    ----------
    folder : str or path
        On a file system that all ranks share; made where it is missing. One job at a time writes there.
    state : dict, list or tuple
        A tree of dicts with strings or ints as keys, lists, tuples, None, bool, int, float, str, NumPy arrays and
        numbers, and dense torch tensors of any dtype and device. What is derived from dict, list or tuple comes back
        as one of these, a parameter as a tensor. Each rank passes its state.
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
    _run(comm, lambda group: save_rounds(folder, state, keep, group))


def load_checkpoint(folder: Folder, comm: Any = None) -> Any:
    """Read the newest checkpoint below a folder, on any number of ranks.

    Collective over ``comm``. With as many ranks as wrote it, each gets its state. Otherwise rank ``r`` of N gets
    that of rank ``r * M // N`` of M, but residuals and velocities of reducers are redistributed: their means over
    the ranks are what they were. Nothing is modified.

    Parameters
    ----------
    folder : str or path
        The state that `save_checkpoint` was given.
    comm : mpi4py.MPI.Comm, Transport or None
        None stands for MPI.COMM_WORLD.

    Returns
    -------
    dict, list or tuple
        The state, its tensors in host memory; None on all ranks where there is no checkpoint yet.

    Raises
    ------
    CheckpointError
        Where the checkpoint is incomplete, torn, changed since it was written, or made of files of several ones: the
        same on all ranks.
    """
    return _run(comm, lambda group: load_rounds(folder, group))


def save_rounds(folder: Folder, state: Any, keep: int, group: Group) -> Rounds[Any]:
    """Do what `save_checkpoint` does as a generator of rounds, for ranks that live in one process."""
    signature, problem = None, None
    try:
        path = _path(folder, "save_checkpoint")
        if type(keep) is not int or keep < 1:
            raise ConfigurationError(f"save_checkpoint: keep must be at least 1, got {keep!r}")
        tree, arrays = encode(state)
        members = [
            ArraySpec(f"{place}[{kind!r}][{name!r}]", str(array.dtype).removeprefix("torch."), tuple(array.shape))
            for place, reducer_state in reducers(state)
            for kind in STATES
            for name, array in reducer_state[kind].items()
        ]
        signature = Signature({"folder": str(path), "keep": keep}, members)
    except Exception as error:  # whatever it is, the others have to know
        problem = _problem(error, "save_checkpoint: state cannot be stored")
    yield from agree(signature, problem, group, "save_checkpoint")

    mine = [0, 0]
    if group.rank == 0:
        try:
            mine = [begin(path), secrets.randbits(62)]
        except Exception as error:
            problem = _problem(error, f"save_checkpoint: cannot write below '{path}'")
    number, token = yield from _from_rank_0(mine, problem, group)
    part = part_folder(path, number)
    try:
        try:
            write_file(part / file_name(group.rank), Header(number, token, group.size, group.rank), tree, arrays)
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


def load_rounds(folder: Folder, group: Group) -> Rounds[Any]:
    """Do what `load_checkpoint` does as a generator of rounds, for ranks that live in one process."""
    signature, problem = None, None
    try:
        path = _path(folder, "load_checkpoint")
        signature = Signature({"folder": str(path)}, [])
    except Exception as error:  # whatever it is, the others have to know
        problem = _problem(error, "load_checkpoint: folder cannot be used")
    yield from agree(signature, problem, group, "load_checkpoint")

    mine = [0, 0, 0, 0]
    if group.rank == 0:
        try:
            mine = newest(path)
        except Exception as error:
            problem = _problem(error, f"load_checkpoint: cannot look into '{path}'")
    name, number, token, ranks = yield from _from_rank_0(mine, problem, group)
    if ranks == 0:
        return None
    state = None
    try:
        state = _read(complete_folder(path, name), Header(number, token, ranks, 0), group)
    except Exception as error:
        problem = _problem(error, f"load_checkpoint: '{path}' cannot be read")
    yield from agree(None, problem, group)
    return state


def _run(comm: Any, rounds: Callable[[Group], Rounds[Any]]) -> Any:
    transport = connect(comm)
    try:
        return transport.run(rounds(transport.group))
    finally:
        if transport is not comm:
            transport.close()


def _path(folder: Any, subsystem: str) -> Path:
    if not isinstance(folder, str | os.PathLike) or not isinstance(os.fspath(folder), str):
        raise ConfigurationError(f"{subsystem}: folder must be a str or a path, got {folder!r}")
    return Path(folder)


def _problem(error: Exception, what: str) -> MpicompError:
    """Return an error that can be raised on all ranks; errors of mpicomp are returned unchanged."""
    if isinstance(error, MpicompError):
        return error
    text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return CheckpointError(f"{what}: {text}")


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


def _read(folder: Path, header: Header, group: Group) -> Any:
    """Read this rank's state, however many ranks have written it."""

    def file_of(rank: int) -> RankFile:
        return RankFile(folder / file_name(rank)).check(header.of(rank))

    nearest = file_of(group.rank * header.ranks // group.size)
    state = nearest.tree(nearest.read)
    sources = weights(group.rank, group.size, header.ranks)
    if len(sources) == 1:
        return state
    return shared_anew(state, ((weight, file_of(rank)) for rank, weight in sources.items()))
