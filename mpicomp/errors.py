"""Errors meant for people: each names the subsystem, the rule, the value and the remedy."""

import difflib
import sys
import warnings
from collections.abc import Iterable

_LIBRARIES = ("mpicomp", "torch")


class MpicompError(Exception):
    """Base of every error that mpicomp raises on purpose."""


class ConfigurationError(MpicompError, ValueError):
    """A setting has a value that it cannot have."""


class UnknownNameError(ConfigurationError):
    """A name is not known to a subsystem; the message has ``advice``, or suggests the nearest name that is known.

    Examples
    --------
    >>> print(UnknownNameError("compressor", "topq", ["dense", "topk"]))
    compressor: unknown name 'topq'; did you mean 'topk'? Known: dense, topk
    """

    def __init__(self, subsystem: str, name: str, known: Iterable[str], advice: str | None = None) -> None:
        self.subsystem = subsystem
        self.name = name
        self.known = sorted(known)
        near = difflib.get_close_matches(str(name).lower(), self.known, n=1, cutoff=0.4)
        hint = f"; {advice}." if advice else f"; did you mean '{near[0]}'?" if near else "."
        super().__init__(f"{subsystem}: unknown name '{name}'{hint} Known: {', '.join(self.known)}")


class IncompatiblePairError(ConfigurationError):
    """A compressor and a collective that do not fit each other."""


class ArrayTypeError(MpicompError, TypeError):
    """An array of a kind or dtype that cannot be reduced."""


class DisagreementError(MpicompError, RuntimeError):
    """The ranks passed different things; raised on all of them before anything is delivered."""


class NonFiniteError(MpicompError, ArithmeticError):
    """A gradient held NaN or infinity on some rank; raised on all of them, and nothing was applied."""


class MessageError(MpicompError, ValueError):
    """A message that is torn, of another version, or points outside the array."""


class CheckpointError(MpicompError, RuntimeError):
    """A checkpoint that cannot be written, or is incomplete, torn or made of files of several ones."""


class FileWriteError(MpicompError, OSError):
    """A file that cannot be written: a full disk, a limit, a right that is missing."""


class OutOfMemoryError(MemoryError, MpicompError):
    """A rank has no memory left for an exchange; raised on all of them before anything is delivered."""


class LaunchError(MpicompError, RuntimeError):
    """The job was started in a way that cannot work."""


class RankFailedError(MpicompError, RuntimeError):
    """A rank has died while others exchange with it; raised on those that are left."""


class AgreedRankFailure(RankFailedError):  # noqa: N818, it is an error by its base class
    """A rank has died, as all that are left have agreed, so that they need not agree again."""


class ClosedError(MpicompError, RuntimeError):
    """Something was used after ``close()``."""


def warn_user(text: str) -> None:
    """Warn, and show the line of the user's script that has led here."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level + 1)
