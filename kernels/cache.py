"""Cache of compiled functions, shared by the processes of one host.

Numba alone keeps compiled code next to the source or in the home folder. On a cluster both lie on a file system that
all hosts share, or that none may write to: then every rank compiles, hosts overwrite each other's files, and without
any place to write to the import fails. Here each host has a folder, the first process that needs a function compiles
it while the others wait, and a damaged file is compiled again.
"""

import contextlib
import functools
import hashlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba.core import config
from numba.core.caching import FunctionCache, NullCache
from numba.core.runtime import rtsys

Function = TypeVar("Function", bound=Callable[..., Any])

MAX_WAIT_S = 60.0  # no function takes as long to compile: the process that is waited for was stopped or failed
_POLL_S = 0.02
_BOOT = Path("/proc/sys/kernel/random/boot_id")

_setting = threading.Lock()  # of Numba's folder, while one of its caches reads it
_compiler_is_loaded = False  # in this process: that takes as long as to compile several functions


def cached(function: Function) -> Function:
    """Keep the compiled code of a function of ``numba.njit`` without ``cache=True``, and return the function.

    Nothing is read or written before the function is first compiled, and no error is raised.
    """
    dispatcher: Any = function
    if hasattr(dispatcher, "py_func"):  # with NUMBA_DISABLE_JIT, Numba does not wrap functions
        dispatcher._cache = HostCache(dispatcher.py_func)  # in place of Numba's cache, by enable_caching()
    return function


class HostCache(NullCache):  # type: ignore[misc]
    """Cache of one function, in the place of Numba's, which calls it with the lock of its compiler held."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._lock: Any = None  # held while this process compiles

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Return the code compiled for a signature, or None if this process is to compile it; wait if another does."""
        global _compiler_is_loaded
        if self._files is None:
            return None
        found = self._load(signature, context)
        if found is None:
            if not _compiler_is_loaded:
                time.sleep(_POLL_S)  # a process that has loaded its compiler goes first, so that most never load theirs
            self._lock = self._lock or host_lock(self._files._cache_file._index_path)
            found = self._load(signature, context) if self._lock else None
            _compiler_is_loaded |= found is None
            if found is not None:
                self._release()
        return found

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Write the compiled code if this process has the lock: files of two writers would get mixed."""
        if self._lock is None:
            return
        with contextlib.suppress(OSError):  # a full disk, a quota
            try:
                self._files.save_overload(signature, compiled)
            except OSError:
                raise
            except Exception:  # a damaged index cannot be read: write a new one
                self._files.flush()
                self._files.save_overload(signature, compiled)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @functools.cached_property
    def _files(self) -> Any:
        place = folder()
        if place is None:
            return None
        with _setting:
            before = config.CACHE_DIR
            config.CACHE_DIR = str(place / _fingerprint())
            try:
                return FunctionCache(self._function)
            except (OSError, RuntimeError):  # Numba's errors without a folder or a source file
                return None
            finally:
                config.CACHE_DIR = before

    def _load(self, signature: Any, context: Any) -> Any:
        # Not by Numba's load_overload, which first loads all that a compiler needs, SciPy too: 0.4 to 0.9 s. Code that
        # is compiled needs the runtime alone. A process that compiles loads the rest by itself.
        try:
            rtsys.initialize(context)
            return self._files._load_overload(signature, context)
        except Exception:  # a file that was cut short fails to unpickle in more ways than can be listed
            return None


def host_lock(name: str) -> Any:
    """Return a held lock among this user's processes on this host, after at most `MAX_WAIT_S`; None without one.

    Its file is local to the node: not every shared file system has locks. A process that dies releases it.
    """
    place = local_folder()
    if place is None:
        return None
    from filelock import FileLock  # here: most processes find all functions compiled

    digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    lock = FileLock(place / f"{digest}.lock", mode=0o600, thread_local=False)
    try:
        lock.acquire(timeout=MAX_WAIT_S, poll_interval=_POLL_S)
    except (OSError, NotImplementedError):  # Timeout is one of the first; no locks, or no space
        return None
    return lock


@functools.cache
def folder() -> Path | None:
    """Return this user's folder of compiled functions on this host; None where none can be made."""
    name = f"mpicomp-{os.getuid()}-{socket.gethostname()}"
    named = [os.environ[variable] for variable in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME") if os.environ.get(variable)]
    return next(filter(None, (_private(Path(parent) / name) for parent in named)), None) or local_folder()


@functools.cache
def local_folder() -> Path | None:
    """Return a folder of this user that only processes of this host share; None where none can be made.

    The temporary folder is mostly local. In case it is not, the name has the random number that Linux draws at each
    start. Hosts of an emulated cluster share the folder: ``MPICOMP_BOOT_ID`` is the number of their machine.
    """
    try:
        boot = os.environ.get("MPICOMP_BOOT_ID")
        boot = boot or (_BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname())
        return _private(Path(tempfile.gettempdir()) / f"mpicomp-{os.getuid()}-{boot}")
    except OSError:
        return None


def _private(path: Path) -> Path | None:
    """Make a folder of this user alone; None where that fails or another user made it: its files are run as code."""
    try:
        path.mkdir(0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if path.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o022:
            return None
        tempfile.TemporaryFile(dir=path).close()
    except OSError:
        return None
    return path


@functools.cache
def _fingerprint() -> str:
    """Return a name of this version of the sources: Numba compares the file of a function, not of those it calls."""
    here, digest = Path(__file__).parent, hashlib.blake2b(digest_size=8)
    for path in sorted([*here.glob("*.py"), *here.glob("cpu/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()
