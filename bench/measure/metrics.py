"""JSON lines, one a step; the schema is in docs/observability.md."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import msgspec

from mpicomp.errors import FileWriteError
from mpicomp.job import print_stderr

_FLUSH_S = 0.25  # seconds after which lines are written: a job that dies loses no more
_MAX_LINES = 256  # lines that are kept until then
# For NumPy's numbers; those that are not finite become null.
_encoder = msgspec.json.Encoder(enc_hook=lambda number: number.item())


class MetricsWriter:
    """Writes a line a step, several at a time; if the disk is full, training continues without."""

    def __init__(self, path: str | None) -> None:
        self.problem: FileWriteError | None = None
        self._path = path
        self._length = 0
        self._lines: list[Callable[[], Mapping[str, Any]]] = []
        self._flushed = time.perf_counter()
        try:
            # Without a buffer: the unwritten part would be tried once more when it is closed.
            self._file = None if path is None else open(path, "a+b", buffering=0)  # noqa: SIM115, closed in __exit__
        except OSError as error:
            raise FileWriteError(f"train: '{path}' cannot be written: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self.flush()
            self._file.close()

    def begin(self, step: int) -> None:
        """Begin with a step, before the first line: of an older file only lines of earlier steps stay."""
        if self._file is None or not self._file.seekable():  # a pipe has no earlier lines
            return
        self._file.seek(0)
        for line in self._file.readall().splitlines(keepends=True) if step else ():
            try:
                if json.loads(line)["step"] >= step:
                    break
            except (ValueError, LookupError, TypeError):  # torn, as its job ended
                break
            self._length += len(line)
        if os.fstat(self._file.fileno()).st_size > self._length:  # /dev/null cannot be cut
            self._file.truncate(self._length)

    @property
    def wanted(self) -> bool:
        return self._file is not None

    def write(self, line: Callable[[], Mapping[str, Any]]) -> None:
        """Write one step. It is asked for when it is written, a quarter of a second later at most, or with the next."""
        if self._file is None or self.problem is not None:
            return
        self._lines.append(line)
        if len(self._lines) >= _MAX_LINES or time.perf_counter() - self._flushed > _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        self._flushed = time.perf_counter()
        if self._file is None or not lines:
            return
        whole = b"".join([_encoder.encode(line()) + b"\n" for line in lines])
        written = 0
        try:
            while written < len(whole):
                written += self._file.write(memoryview(whole)[written:])
        except OSError as error:
            written = whole.rfind(b"\n", 0, written) + 1
            with contextlib.suppress(OSError):  # a pipe has no end that could be cut off
                self._file.truncate(self._length + written)
            step = lines[whole.count(b"\n", 0, written)]()["step"]
            self.problem = FileWriteError(
                f"train: '{self._path}' has no line of step {step} and those after it: {error}; make room, or name "
                "another file"
            )
            print_stderr(f"{self.problem}. Training continues, and ends with this error")
        self._length += written
