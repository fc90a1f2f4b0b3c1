"""The folder of a job's checkpoints, which rank 0 alone changes.

A checkpoint is a folder ``00000012``, or ``00000012.part`` while it is written or removed. Anything else stays as it
is, such as a user's folder with a number as its name: the headers of the files show which folders mpicomp has made.
"""

import contextlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from mpicomp.checkpoint.file import LAST, RankFile, file_name, header_of, is_file_name
from mpicomp.errors import CheckpointError

_NAME = re.compile(r"([0-9]{8,18})(\.part)?")
_NO_DATE = "00"  # start of names, below a million, that count as a checkpoint even without a readable file


@dataclass(frozen=True)
class _Found:
    """A checkpoint, or what is left of one."""

    path: Path
    named: int  # number in the folder's name
    number: int  # number in the files, by which checkpoints are ordered: a folder may be a copy under another name


def complete_folder(folder: Path, number: int) -> Path:
    """Return the folder of a complete checkpoint."""
    return folder / f"{number:08d}"


def part_folder(folder: Path, number: int) -> Path:
    """Return the folder of an incomplete checkpoint."""
    return folder / f"{number:08d}.part"


def _list(folder: Path) -> tuple[list[_Found], list[_Found]]:
    """Return the checkpoints, oldest first, and those that are half written."""
    complete: list[_Found] = []
    parts: list[_Found] = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and f"{int(match[1]):08d}" == match[1] and path.is_dir():
            number = _number(path, int(match[1]))
            if number is not None:
                (parts if match[2] else complete).append(_Found(path, int(match[1]), number))
    # The newest is the last one; of two copies it is the one that was not renamed.
    return sorted(complete, key=lambda entry: (entry.number, entry.named == entry.number, entry.named)), parts


def _number(path: Path, named: int) -> int | None:
    """Return the number of the checkpoint in a folder, or None."""
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return None
    files = [path / name for name in names if is_file_name(name)]
    for header in map(header_of, files):
        if header is not None:
            return header.checkpoint
    # A crash may leave an empty folder or torn files.
    return named if path.name.startswith(_NO_DATE) and (files or not names) else None


def _remove(found: _Found, to: Path | None = None) -> None:
    """Remove a folder, renamed to ``to`` first, if mpicomp has made all of it and the system allows it."""
    with contextlib.suppress(OSError):
        with os.scandir(found.path) as entries:
            if found.path.is_symlink() or not all(_is_rank_file(entry, found.named) for entry in entries):
                return
        shutil.rmtree(found.path if to is None else found.path.rename(to), ignore_errors=True)


def _is_rank_file(entry: os.DirEntry[str], number: int) -> bool:
    """Return whether an entry of a folder is a rank's file of the checkpoint with a number, or an empty one."""
    if not is_file_name(entry.name) or not entry.is_file(follow_symlinks=False):
        return False
    header = header_of(Path(entry))
    return entry.stat().st_size == 0 if header is None else header.checkpoint == number


def begin(folder: Path) -> int:
    """Clean up after a crash, make the folder of a new checkpoint, and return its number."""
    folder.mkdir(parents=True, exist_ok=True)
    present = set(os.listdir(folder))
    complete, parts = _list(folder)
    for part in parts:
        _remove(part)
    number = max([0, *(entry.number for entry in complete + parts)]) + 1
    while not present.isdisjoint((complete_folder(folder, number).name, part_folder(folder, number).name)):
        number += 1
    if number > LAST:
        raise CheckpointError(f"save_checkpoint: the last number, {LAST}, was used in '{folder}'; empty it")
    part_folder(folder, number).mkdir()
    return number


def finish(folder: Path, number: int, ranks: int) -> None:
    """Rename the folder that all ranks have written to, so that it is complete."""
    part = part_folder(folder, number)
    for rank in range(ranks):
        if not (part / file_name(rank)).exists():
            raise CheckpointError(f"rank 0 does not see the file of rank {rank} in '{part}'")
    _sync(part)
    part.rename(complete_folder(folder, number))
    _sync(folder)


def drop_older(folder: Path, keep: int) -> None:
    """Remove all but the newest checkpoints, where the system allows it."""
    with contextlib.suppress(OSError):
        complete = [entry for entry in _list(folder)[0] if entry.named == entry.number]
        for entry in complete[:-keep]:
            _remove(entry, part_folder(folder, entry.named))


def _sync(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot sync folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def newest(folder: Path) -> list[int]:
    """Return the number in the newest checkpoint's name, its number, token and ranks; zeros where there is none."""
    try:
        complete, _ = _list(folder)
    except FileNotFoundError:
        complete = []
    if not complete:
        return [0, 0, 0, 0]
    path = complete[-1].path
    header = RankFile(path / file_name(0)).header
    last = path / file_name(header.ranks - 1)
    if not last.exists():  # the number of ranks may be that of a damaged file
        RankFile(last)
    return [complete[-1].named, header.checkpoint, header.token, header.ranks]
