"""Schedule files: changes of links while the job runs.

A line is ``seconds bandwidth latency``, in the syntax of the command line, comma lists included. Blank lines
and what follows a ``#`` do not count. A bandwidth of 0 is a link that is down. Times are counted from the start
of the command and must not go back.
"""

import math
from pathlib import Path

from mpicomp.bench.lab.errors import LabError
from mpicomp.bench.lab.settings import Change, parse_links


def read_schedule(path: Path, hosts: int) -> tuple[Change, ...]:
    """Return the changes that the file `path` lists for a lab of `hosts` hosts."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise LabError(f"--schedule must be a file that can be read, got {str(path)!r}: {reason}") from None
    return parse_schedule(text, hosts, name=str(path))


def parse_schedule(text: str, hosts: int, name: str = "schedule") -> tuple[Change, ...]:
    """Return the changes in `text`; `name` stands in the messages.

    Examples
    --------
    >>> parse_schedule("2.5 100mbit 0us", hosts=1)
    (Change(at_s=2.5, links=(Link(bandwidth=100000000, latency_ns=0),)),)
    """
    changes: list[Change] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{name}, line {number}"
        if len(words) != 3:
            raise LabError(f"{where}: a line must be 'seconds bandwidth latency', got {line.strip()!r}")
        try:
            at_s = float(words[0])
        except ValueError:
            at_s = math.nan
        if not 0 <= at_s < math.inf:
            raise LabError(f"{where}: seconds must be a number of 0 or more, got {words[0]!r}")
        if changes and at_s < changes[-1].at_s:
            raise LabError(f"{where}: seconds must not go back, got {words[0]!r} after {changes[-1].at_s:g}")
        try:
            links = parse_links(words[1], words[2], hosts, may_be_down=True)
        except LabError as error:
            raise LabError(f"{where}: {str(error).removeprefix('--')}") from None
        changes.append(Change(at_s, links))
    if not changes:
        raise LabError(f"{name}: a schedule must have at least one line 'seconds bandwidth latency', got none")
    return tuple(changes)
