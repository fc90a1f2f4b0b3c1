"""What benchmarks print and write: rows, and where they were measured."""

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpicomp._version import __version__

SCHEMA = 1

_PACKAGES = ("numpy", "numba", "torch")


def environment(threads: int, device: str) -> dict[str, Any]:
    """Give versions and the processor: what numbers depend on, and nothing that tells who measured when.

    Parameters
    ----------
    threads : int
        How many were asked for.
    device : str
        ``"cpu"`` or the name of a GPU.
    """
    return {
        "mpicomp": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "cupy": getattr(sys.modules.get("cupy"), "__version__", None),  # its packages have many names
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "device": device,
    }


def write(path: str, rows: Sequence[Mapping[str, Any]], threads: int, device: str = "cpu") -> None:
    """Write rows and environment as one JSON object."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"schema": SCHEMA, "environment": environment(threads, device), "rows": rows}, file, indent=1)
        file.write("\n")


def show(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Print a table.

    Parameters
    ----------
    rows : sequence of mapping
        Values by column; None is shown as nothing.
    columns : mapping of str to str
        The columns in their order, each with its format; that of text is empty.
    """
    cells = [["" if row[name] is None else format(row[name], form) for name, form in columns.items()] for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        console = None
    else:
        console = Console()
    if console is None or not console.is_terminal:  # whoever reads a file or a pipe wants no lines cut
        print(plain(list(columns), cells, [form == "" for form in columns.values()]), flush=True)
        return
    table = Table()
    for name, form in columns.items():
        table.add_column(name, justify="left" if form == "" else "right", overflow="fold")
    for line in cells:
        table.add_row(*line)
    console.print(table)


def plain(header: Sequence[str], cells: Sequence[Sequence[str]], left: Sequence[bool]) -> str:
    """Lay out a table in plain text.

    Examples
    --------
    >>> print(plain(["name", "copies"], [["memcpy", "1.00"], ["topk.compress", "12.50"]], [True, False]))
    name           copies
    memcpy           1.00
    topk.compress   12.50
    """
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if flush else cell.rjust(width)
            for cell, width, flush in zip(line, widths, left, strict=True)
        )
        for line in [header, *cells]
    ]
    return "\n".join(line.rstrip() for line in lines)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
