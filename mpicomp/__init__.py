"""Compressed gradient exchange for data-parallel training, native to MPI.

Public names stand in ``__init__.pyi`` and are imported when they are first used: ``import mpicomp`` starts neither MPI
nor a compiler and loads no torch and no CuPy. The class of every built-in compressor is an attribute too.
"""

import ast as _ast
import importlib as _importlib
from pathlib import Path as _Path
from typing import Any as _Any

from mpicomp._version import __version__ as __version__
from mpicomp.job import abort as _abort  # noqa: F401 (replaces sys.exit before a script looks it up)

_MODULES = {
    alias.name: statement.module
    for statement in _ast.parse(_Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(statement, _ast.ImportFrom) and str(statement.module).startswith("mpicomp")
    for alias in statement.names
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> _Any:
    if name == "torch":
        return _importlib.import_module("mpicomp.torch")
    if name in _MODULES:
        value = getattr(_importlib.import_module(str(_MODULES[name])), name)
    else:
        value = _compressor_class(name)
    globals()[name] = value
    return value


def _compressor_class(name: str) -> _Any:
    if name[:1].isupper():
        from mpicomp.compressors import COMPRESSORS

        for cls in COMPRESSORS.classes():
            if cls.__name__ == name and COMPRESSORS.plugin(cls.id) is None:
                return cls
    raise AttributeError(f"module 'mpicomp' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
