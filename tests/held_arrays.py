"""Memory of NumPy's arrays, counted without tracemalloc: that crashes Python 3.11 next to threads of torch and gloo."""

import gc

import numpy as np

_MIN_BYTES = 4096  # smaller ones, as messages of the watchdog, come and go


def held_bytes():
    """Return the bytes of the arrays that objects of this process refer to, without those of before the first test."""
    gc.collect()  # what earlier tests left would count before and not after
    found, holders = {}, gc.get_objects()
    while holders:
        for value in gc.get_referents(holders.pop()):
            while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
                value = value.base
            if isinstance(value, np.ndarray) and value.nbytes >= _MIN_BYTES:
                found[id(value)] = value.nbytes
            elif isinstance(value, dict | tuple) and not gc.is_tracked(value):
                holders.append(value)  # Python leaves those out that hold arrays and no other containers
    return sum(found.values())
