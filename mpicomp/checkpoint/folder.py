"""The folder of a job's checkpoints, which rank 0 alone changes.

Each checkpoint is a folder of its own, ``00000012``; one that is being written, or removed, is called
``00000012.part``.
"""

import contextlib
import os
import re
import shutil
from pathlib import Path

from mpicomp.checkpoint.file import RankFile, file_name
from mpicomp.errors import CheckpointError

_NAME = re.compile(r"([0-9]{8,})(\.part)?")


def complete_folder(folder: Path, number: int) -> Path:
    """Give where a checkpoint is once all ranks have written it."""
    return folder / f"{number:08d}"


def part_folder(folder: Path, number: int) -> Path:
    """Give where a checkpoint is before that."""
    return folder / f"{number:08d}.part"


def _list(folder: Path) -> tuple[list[int], list[Path]]:
    """Give the numbers of the checkpoints, oldest first, and the folders of those that are half written."""
    numbers, parts = [], []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and match[2]:
            parts.append(path)
        elif match:
            numbers.append(int(match[1]))
    return sorted(numbers), parts


def begin(folder: Path) -> int:
    """Clean up after a crash, make the folder to write into, and give the new checkpoint's number."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers, parts = _list(folder)
    for part in parts:
        shutil.rmtree(part, ignore_errors=True)
    number = max([0, *numbers, *(int(part.stem) for part in parts)]) + 1
    part_folder(folder, number).mkdir()
    return number


def finish(folder: Path, number: int, ranks: int) -> None:
    """Make what all ranks have written a checkpoint."""
    part = part_folder(folder, number)
    for rank in range(ranks):
        if not (part / file_name(rank)).exists():
            raise CheckpointError(f"rank 0 does not see the file of rank {rank} in '{part}'")
    _sync(part)
    part.rename(complete_folder(folder, number))
    _sync(folder)


def drop_older(folder: Path, keep: int) -> None:
    """Remove all but the newest checkpoints, as far as one may; what is left of one has no name to be loaded by."""
    with contextlib.suppress(OSError):
        for number in _list(folder)[0][:-keep]:
            complete_folder(folder, number).rename(part_folder(folder, number))
            shutil.rmtree(part_folder(folder, number), ignore_errors=True)


def _sync(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems know no such thing for folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def newest(folder: Path) -> list[int]:
    """Give the name of the newest checkpoint, and its number, token and ranks; zeros where there is none."""
    try:
        numbers, _ = _list(folder)
    except FileNotFoundError:
        numbers = []
    if not numbers:
        return [0, 0, 0, 0]
    header = RankFile(complete_folder(folder, numbers[-1]) / file_name(0)).header
    return [numbers[-1], header.checkpoint, header.token, header.ranks]
