"""Plugins: files and packages of users' that register compressors, collectives, policies and training tasks.

They are found as entry points of the group ``mpicomp.plugins`` of installed packages, in the variable
``MPICOMP_PLUGINS``, and by ``--plugin`` of the command line, which adds to that variable, so that the processes of a
job see it too. They are imported at the first look-up of a name, never by ``import mpicomp``.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from pathlib import Path

from mpicomp.errors import ConfigurationError

GROUP = "mpicomp.plugins"
VARIABLE = "MPICOMP_PLUGINS"

_loaded: dict[str, str] = {}  # what was imported: a file's path, or a module's name without one; and what others see
_entered = False  # whether entry points were read


def add(name: str) -> None:
    """Have a plugin loaded by this process and by those that it starts.

    Parameters
    ----------
    name : str
        A Python file or a module. Of a file the path is kept as an absolute one.
    """
    name = str(Path(name).resolve()) if _is_file(name) else name
    names = [*_wanted(), name]
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys(names))


def load_all() -> None:
    """Import every plugin that is not imported yet.

    An entry point that fails warns, since nobody has asked for it by name.

    Raises
    ------
    ConfigurationError
        Where a file or module that was named is missing or fails.
    """
    global _entered
    if not _entered:
        _entered = True
        for point in importlib.metadata.entry_points(group=GROUP):
            try:
                _load(point.module)
            except ConfigurationError as error:
                warnings.warn(f"{error}; it is an entry point, '{point.name}', and left out", stacklevel=2)
    for name in _wanted():
        _load(name)


def loaded() -> list[str]:
    """Return what was imported, sorted: each plugin's name with a digest of its file, for ranks to compare."""
    return sorted(_loaded.values())


def _wanted() -> list[str]:
    return [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]


def _is_file(name: str) -> bool:
    return name.endswith(".py") or os.sep in name


def _load(name: str) -> None:
    """Import a file or a module, unless its file was imported already, under whatever name."""
    try:
        if _is_file(name):
            spec = importlib.util.spec_from_file_location(f"mpicomp_plugin_{Path(name).stem}", name)
        else:
            spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise _failed(name, error) from error
    if spec is None or (_is_file(name) and not Path(name).is_file()):
        raise ConfigurationError(f"plugin: there is no {'file' if _is_file(name) else 'module'} '{name}'")
    place = os.path.realpath(spec.origin) if spec.has_location and spec.origin else spec.name
    if place in _loaded:
        return
    _loaded[place] = _described(name, place)
    try:
        if not _is_file(name):
            importlib.import_module(name)
            return
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look themselves up there
        assert spec.loader is not None
        spec.loader.exec_module(module)
    except Exception as error:
        del _loaded[place]
        raise _failed(name, error) from error


def _failed(name: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"plugin: '{name}' cannot be loaded: {type(error).__name__}: {error}")


def _described(name: str, place: str) -> str:
    if not os.path.isfile(place):
        return name
    digest = hashlib.blake2b(Path(place).read_bytes(), digest_size=4).hexdigest()
    return f"{Path(place).stem if _is_file(name) else name} ({digest})"
