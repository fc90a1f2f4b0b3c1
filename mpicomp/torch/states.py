"""States that ``torch.load`` reads by its defaults: of tensors, numbers, strings, bools, None, dicts and lists."""

from collections import deque
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np
import torch

from mpicomp import arrays

_COMPILED = "_orig_mod."  # prefix that torch.compile adds to the names of a module's parameters
_BASES = (bool, int, float, str)  # a subclass of one of these would be stored by the name of its class


def name_of(name: str) -> str:
    """Return the name of a parameter without the marks of compiled modules.

    >>> name_of("_orig_mod.head.weight"), name_of("layers.0._orig_mod.weight")
    ('head.weight', 'layers.0.weight')
    """
    return name.replace(_COMPILED, "")


def to_tensors(state: Any) -> Any:
    """Return a state with tensors in place of arrays, in the same memory, and Python's numbers and lists."""
    return _converted(state, _to_torch)


def to_arrays(state: Any) -> Any:
    """Undo `to_tensors`; arrays are unchanged."""
    return _converted(state, _to_numpy)


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {
            name_of(key) if isinstance(key, str) else convert(key): _converted(item, convert)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple | deque | Set):
        return [_converted(item, convert) for item in value]
    return convert(value)


def _to_torch(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    for base in _BASES:
        if isinstance(value, base):
            return base(value)
    if not isinstance(value, np.ndarray):
        return value
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    if not value.flags.writeable or any(stride < 0 for stride in value.strides):
        value = value.copy()  # torch supports neither
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def _to_numpy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.bfloat16:
        value = value.float()  # NumPy has no bfloat16, and float32 is exact
    return arrays.to_host(value)
