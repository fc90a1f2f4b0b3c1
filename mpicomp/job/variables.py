"""The environment variables of mpicomp: their names, words that mean on or off, and names that are misspelt."""

import difflib
import os
from collections.abc import Mapping

from mpicomp.errors import ConfigurationError
from mpicomp.job import print_stderr

FLAGS = ("MPICOMP_ABORT", "MPICOMP_NAPS", "MPICOMP_CUDA_AWARE", "MPICOMP_PROBE")
SECONDS = ("MPICOMP_STALL", "MPICOMP_STALL_END")
_OTHERS = ("MPICOMP_PLUGINS", "MPICOMP_PLAN", "MPICOMP_LAB", "MPICOMP_BOOT_ID")  # the last two are set by the lab
_WORDS = {
    word: value for value, words in ((True, "1 true on yes"), (False, "0 false off no")) for word in words.split()
}
FLAG_WORDS = "0 or 1 (false, off, no; true, on, yes)"

_reported = False  # this process has looked for unknown names


def flag(name: str, environ: Mapping[str, str] = os.environ) -> bool | None:
    """Return whether a variable is on or off, None where it is empty or not set.

    >>> [flag("MPICOMP_NAPS", {"MPICOMP_NAPS": text}) for text in ("off", "1", "")]
    [False, True, None]
    """
    text = environ.get(name, "").strip()
    if text and text.lower() not in _WORDS:
        raise ConfigurationError(f"{name} must be {FLAG_WORDS}, got {text!r}")
    return _WORDS.get(text.lower())


def flag_or_none(name: str, environ: Mapping[str, str] = os.environ) -> bool | None:
    """Return the same, and None for nonsense, which `wrong_flag` finds when ranks connect."""
    return _WORDS.get(environ.get(name, "").strip().lower())


def seconds(name: str, default: float, environ: Mapping[str, str] = os.environ) -> float:
    """Return a limit, 0 for never, -1 where it is no number of seconds.

    >>> [seconds("MPICOMP_STALL", 60.0, {"MPICOMP_STALL": text}) for text in ("", "2.5", "off", "soon")]
    [60.0, 2.5, 0.0, -1.0]
    """
    text = environ.get(name, "").strip()
    if not text:
        return default
    if _WORDS.get(text.lower()) is False:
        return 0.0
    try:
        limit = float(text)
    except ValueError:
        return -1.0
    return limit if 0 <= limit < float("inf") else -1.0


def wrong_flag(environ: Mapping[str, str] = os.environ) -> int:
    """Return the place in `FLAGS` of one that this rank cannot read, or -1; of MPICOMP_PROBE rank 0's counts later."""
    for place, name in enumerate(FLAGS[:3]):
        if environ.get(name, "").strip() and flag_or_none(name, environ) is None:
            return place
    return -1


def report_unknown(environ: Mapping[str, str] = os.environ) -> None:
    """Tell the user of names that begin as mpicomp's and are none; once in a process."""
    global _reported
    known = (*FLAGS, *SECONDS, *_OTHERS)
    if not _reported:
        _reported = True
        for name in sorted(environ):
            if name.startswith("MPICOMP_") and name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known[:7])}"
                print_stderr(f"the environment variable {name} is unknown and has no effect; {hint}")
