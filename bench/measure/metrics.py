"""JSON lines, one a step; the schema is in docs/metrics.md."""

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self


class MetricsWriter:
    """Writes a line a step, flushed at once, so that a job that dies leaves its measurements.

    Parameters
    ----------
    path : str or None
        None writes nothing.

    Raises
    ------
    OSError
        Where the file cannot be opened.
    """

    def __init__(self, path: str | None) -> None:
        self._file = None if path is None else open(path, "a+b")  # noqa: SIM115, closed in __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def begin(self, step: int) -> None:
        """Begin with a step, before the first line: of what is there, only lines of earlier steps stay."""
        if self._file is None:
            return
        self._file.seek(0)
        kept = 0
        for line in self._file if step else ():
            try:
                if json.loads(line)["step"] >= step:
                    break
            except (ValueError, LookupError, TypeError):  # torn, as its job ended
                break
            kept += len(line)
        self._file.truncate(kept)

    @property
    def wanted(self) -> bool:
        """Whether lines are written, so that others need not make them."""
        return self._file is not None

    def write(self, line: Mapping[str, Any]) -> None:
        """Write one step."""
        if self._file is not None:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
