"""Libraries that are loaded into this process, the MPI library among them."""

import re
from collections.abc import Iterable
from pathlib import Path

# libmpi.so.12, libmpi_abi.so.1, libmpich.so.12, libmpi_gnu_123.so.12 (Cray), but not libmpicxx or libmpi_cxx,
# libmpi_mpifh and their like, which only stand on it.
_LIBRARY = re.compile(r"/(libmpi|libmpi_abi|libmpich|libmpi_(gnu|cray|intel|nvidia)\w*)\.(so|dylib)[.\d]*$")


def files(maps: Iterable[str] | None = None) -> list[str]:
    """Return the paths of the files that are mapped into this process, libraries among them."""
    if maps is None:
        try:
            maps = Path("/proc/self/maps").read_text().splitlines()
        except OSError:
            return []
    return list(dict.fromkeys(path[0] for line in maps if (path := line.split(maxsplit=5)[5:])))


def library(maps: Iterable[str] | None = None) -> str | None:
    """Return the path of the MPI library that is loaded into this process.

    Examples
    --------
    >>> library(["7f00-7f01 r-xp 00000000 08:01 42    /opt/mpi/lib/libmpi.so.40.40.7"])
    '/opt/mpi/lib/libmpi.so.40.40.7'
    """
    return next((path for path in files(maps) if _LIBRARY.search(path)), None)
