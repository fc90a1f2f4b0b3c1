"""Arrays in, arrays out: the sweeps over memory that compression is made of.

Nothing here knows of MPI, torch or state. `cpu` holds the Numba kernels, `gpu` the CUDA kernels, with the same names,
signatures and results; `of` returns those for an array. Importing this package compiles nothing.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpicomp.kernels.cpu import *  # noqa: F403  (for the signatures of the functions that `__getattr__` returns)

_HOST = "mpicomp.kernels.cpu"
_CUDA = "mpicomp.kernels.gpu"

_modules: dict[type, Any] = {}  # by the type of an array; None for other types that were met


def of(array: Any) -> Any:
    """Return the kernels that work where an array is: the module `cpu`, or `gpu` for arrays of CuPy.

    >>> import numpy as np
    >>> of(np.zeros(3)).__name__
    'mpicomp.kernels.cpu'
    """
    kind = type(array)
    module = _modules[kind] if kind in _modules else _module_of(kind)
    if module is None:
        raise TypeError(f"kernels: there are none for {type(array).__name__}; use a NumPy or CuPy array")
    return module


def _module_of(kind: type) -> Any:
    if kind not in _modules:
        numpy, cupy = sys.modules.get("numpy"), sys.modules.get("cupy")
        name = None
        if numpy is not None and issubclass(kind, numpy.ndarray):
            name = _HOST
        elif cupy is not None and issubclass(kind, cupy.ndarray):
            name = _CUDA
        _modules[kind] = None if name is None else importlib.import_module(name)
    return _modules[kind]


def __getattr__(name: str) -> Any:
    """Return the kernel of that name for whatever arrays it is called with: ``energy(x)`` is ``of(x).energy(x)``.

    Called with numbers alone it is the host's.
    """
    host = None if name.startswith("_") else getattr(importlib.import_module(_HOST), name, None)
    if host is None:
        raise AttributeError(f"module 'mpicomp.kernels' has no kernel '{name}'")

    def call(*args: Any, **settings: Any) -> Any:
        for value in args:
            kind = type(value)
            module = _modules[kind] if kind in _modules else _module_of(kind)
            if module is not None:
                return getattr(module, name)(*args, **settings)
        return host(*args, **settings)

    call.__name__ = call.__qualname__ = name
    globals()[name] = call
    return call
