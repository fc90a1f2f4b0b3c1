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
        Where the file cannot be opened. An old one is overwritten.
    """

    def __init__(self, path: str | None) -> None:
        self._file = None if path is None else open(path, "w", encoding="utf-8")  # noqa: SIM115, closed in __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, line: Mapping[str, Any]) -> None:
        """Write one step."""
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
