"""The job that this process belongs to: its launcher, its signals, its end, its processors and GPUs."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from mpicomp.errors import FileWriteError


def print_stderr(text: str) -> None:
    """Print a message to stderr, at once."""
    print(f"mpicomp: {text}", file=sys.stderr, flush=True)


def plural(number: int, noun: str) -> str:
    """Return a number with a noun, in the plural unless it is 1."""
    return f"{number} {noun}{'s' * (number != 1)}"


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], newline: str | None = None) -> Iterator[IO[str]]:
    """Open a text file that takes the place of an old one when all is written, or leaves it: a `FileWriteError`."""
    target = Path(path)
    plain = target.is_file() or not target.exists()
    target = target.resolve() if plain else target  # a link stays one
    part = target.with_name(f"{target.name}.part") if plain else target
    try:
        with part.open("w", encoding="utf-8", newline=newline) as file:
            yield file
        if plain:
            part.replace(target)
    except OSError as error:
        raise FileWriteError(f"'{target}' cannot be written: {error}; make room, or name another file") from error
    finally:
        if plain:
            part.unlink(missing_ok=True)
