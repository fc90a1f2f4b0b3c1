"""Plugins: users' files and packages that register compressors, collectives, policies and training tasks.

They are entry points of the group ``mpicomp.plugins``, or in the variable ``MPICOMP_PLUGINS``, to which the command
line's ``--plugin`` adds, so that all processes of a job see them. They are imported when a name is looked up, never by
``import mpicomp``.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path

from mpicomp.errors import ConfigurationError

GROUP = "mpicomp.plugins"
VARIABLE = "MPICOMP_PLUGINS"

_loaded: dict[str, str] = {}  # by file, or module without one: the description that ranks compare
_entered = False  # whether entry points were read
_read = ""  # the variable at the last load


def add(name: str) -> None:
    """Add a Python file or a module to the plugins of this process and of those that it starts."""
    name = os.path.realpath(name) if _is_file(name) else name
    if os.pathsep in name:
        raise ConfigurationError(
            f"plugin: '{os.pathsep}' separates plugins in {VARIABLE} and cannot be in a path, got '{name}'; "
            "move or rename it"
        )
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*_wanted(), name]))


def load_all() -> None:
    """Import plugins that are not imported yet; a failure raises `ConfigurationError`, and of an entry point warns."""
    global _entered, _read
    if not _entered:
        _entered = True
        for point in importlib.metadata.entry_points(group=GROUP):
            try:
                _load(point.module)
            except ConfigurationError as error:
                warnings.warn(f"{error}; it is an entry point, '{point.name}', and left out", stacklevel=2)
    wanted = os.environ.get(VARIABLE, "")
    if wanted != _read:
        for name in _wanted():
            _load(name)
        _read = wanted


def loaded() -> list[str]:
    """Return the imported plugins, sorted: names with digests of their files, for ranks to compare."""
    return sorted(_loaded.values())


def _wanted() -> list[str]:
    return [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]


def _is_file(name: str) -> bool:
    return name.endswith(".py") or os.sep in name


def _load(name: str) -> None:
    spec = _found(name)
    place = os.path.realpath(spec.origin) if spec.has_location and spec.origin else spec.name
    if place in _loaded:
        return
    _loaded[place] = _described(name, place)
    try:
        if not _is_file(name):
            importlib.import_module(name)
        elif not _is_imported(place):
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses look themselves up there
            assert spec.loader is not None
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del _loaded[place]
        if _is_file(name):
            sys.modules.pop(spec.name, None)
        raise _failed(name, error) from error


def _found(name: str) -> ModuleSpec:
    if _is_file(name):
        path = os.path.realpath(name)
        if not os.path.isfile(path):
            raise ConfigurationError(f"plugin: there is no file '{name}'")
        # Files of the same name in several folders are different modules.
        digest = hashlib.blake2b(path.encode(), digest_size=4).hexdigest()
        spec = importlib.util.spec_from_file_location(f"mpicomp_plugin_{Path(name).stem}_{digest}", path)
        if spec is None:
            raise ConfigurationError(f"plugin: a file's name has to end in .py, got '{name}'")
        return spec
    try:
        spec = importlib.util.find_spec(name)
    except (Exception, SystemExit) as error:  # of the packages around it
        raise _failed(name, error) from error
    if spec is None:
        there = os.path.exists(f"{name}.py")
        hint = f"; a file is named with its ending, as in {name}.py" if there else ""
        raise ConfigurationError(f"plugin: there is no module '{name}'{hint}")
    return spec


def _is_imported(place: str) -> bool:
    files = [getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())]
    name = os.path.basename(place)
    return any(file and os.path.basename(file) == name and os.path.realpath(file) == place for file in files)


def _failed(name: str, error: BaseException) -> ConfigurationError:
    return ConfigurationError(f"plugin: '{name}' cannot be loaded: {type(error).__name__}: {error}")


def _described(name: str, place: str) -> str:
    name = Path(name).stem if _is_file(name) else name
    if not os.path.isfile(place):
        return name
    return f"{name} ({hashlib.blake2b(Path(place).read_bytes(), digest_size=4).hexdigest()})"
