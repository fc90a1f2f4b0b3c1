"""When two results are the same."""

import numpy as np


def assert_alike(there, own):
    """Hold a device array to the host's: the same numbers, zeros of the same sign, NaN where there is one."""
    told = there.get()
    assert told.dtype == own.dtype
    np.testing.assert_array_equal(told, own.reshape(-1))
    numbers = ~np.isnan(told)
    np.testing.assert_array_equal(np.signbit(told[numbers]), np.signbit(own.reshape(-1)[numbers]))


def with_specials(array):
    """Put numbers of all kinds among the others: some that are none, zeros, and the smallest and largest ones."""
    info = np.finfo(array.dtype)
    few = [np.nan, -np.nan, np.inf, -np.inf, 0, -0.0, info.tiny, -info.smallest_subnormal, 1e-40, 3e38, info.max]
    places = np.random.default_rng(array.size).choice(array.size, min(array.size, 3 * len(few)), replace=False)
    array[places] = np.array(few * 3)[: places.size].astype(array.dtype)
    return array
