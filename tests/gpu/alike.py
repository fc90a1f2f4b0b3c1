"""When two results are the same."""

import numpy as np
from mpicomp.kernels import cpu, gpu


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


def run_twins(place, name, *arguments, signed_zeros=True):
    """Run a kernel on the host and, with copies of its arrays, on a device; return both results.

    Every array has the same bits afterwards, whether the kernel reads or writes it; without ``signed_zeros``, zeros may
    differ in their sign. An array that stands twice among the arguments is the same one on the device.
    """
    arrays = {id(value): value for value in arguments if isinstance(value, np.ndarray)}
    there = {key: place.put(value).reshape(value.shape) for key, value in arrays.items()}
    with place.quiet():
        far = getattr(gpu, name)(*(there.get(id(value), value) for value in arguments))
    with np.errstate(all="ignore"):
        here = getattr(cpu, name)(*arguments)
    for key, value in arrays.items():
        if signed_zeros:
            assert_alike(there[key].reshape(value.size), value)
        else:
            np.testing.assert_array_equal(there[key].reshape(value.size).get(), value.reshape(-1))
    return here, far
