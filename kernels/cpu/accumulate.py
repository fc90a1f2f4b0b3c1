"""Error feedback: gradient plus residual, in the sweep that also finds what a selection needs."""

import numpy as np
from mpicomp.kernels.cpu.bits import as_bits, infinity_of, mask_of
from mpicomp.kernels.cpu.compile import kernel
from mpicomp.kernels.cpu.sweep import _energy
from numpy.typing import NDArray

_BLOCK = 1024  # elements that are swept again while they are in the first-level cache
_GROUP = 16  # elements that are looked at one by one when their largest is a candidate


def is_finite(top: int, dtype: np.dtype) -> bool:
    """Tell from a sweep's largest magnitude bits whether every element was finite."""
    return int(top) < infinity_of(dtype)


def accumulate(
    gradient: NDArray[np.floating], residual: NDArray[np.floating] | None, out: NDArray[np.floating]
) -> tuple[float, int]:
    """Write ``gradient + residual`` to ``out``, in one sweep.

    Parameters
    ----------
    gradient : array, shape (n,)
        float32 or float64, contiguous. It may be ``out`` itself.
    residual : array, shape (n,), or None
        Of the same dtype. None stands for zeros: the gradient is copied.
    out : array, shape (n,)
        Where the sum goes; of the same dtype.

    Returns
    -------
    energy : float
        Squared L2 norm of ``out``, summed in float64.
    top : int
        Largest magnitude in ``out`` as bits; see `is_finite`.

    Examples
    --------
    >>> import numpy as np
    >>> out = np.empty(2, np.float32)
    >>> energy, top = accumulate(np.array([1, 2], np.float32), np.array([2, 2], np.float32), out)
    >>> out.tolist(), energy, is_finite(top, out.dtype)
    ([3.0, 4.0], 25.0, True)
    """
    energy, top = _accumulate(gradient, residual, out, as_bits(out), mask_of(out.dtype))
    return float(energy), int(top)


def accumulate_candidates(
    gradient: NDArray[np.floating],
    residual: NDArray[np.floating] | None,
    out: NDArray[np.floating],
    bound: int,
    base: int,
    index: NDArray[np.uint32],
    bits: NDArray[np.unsignedinteger],
    count: int,
) -> tuple[int, float, int]:
    """Do what `accumulate` does and list the elements of at least a given magnitude, in the same sweep.

    Parameters
    ----------
    gradient, residual, out
        As in `accumulate`.
    bound : int
        Magnitude bits; elements at or above it are candidates.
    base : int
        What is added to a position in ``out`` to make the candidate's index: where this piece of a bucket starts.
    index : array of uint32
        Indices of the candidates, ascending, appended from ``count`` on.
    bits : array of uint32 or uint64
        Their magnitude bits.
    count : int
        Candidates that are there already.

    Returns
    -------
    count : int
        Candidates found so far. A count above ``index.size`` means that some were not stored.
    energy : float
        As in `accumulate`.
    top : int
        As in `accumulate`.
    """
    mask = mask_of(out.dtype)
    found, energy, top = _accumulate_candidates(
        gradient, residual, out, as_bits(out), mask, mask.dtype.type(bound), base, index, bits, count
    )
    return int(found), float(energy), int(top)


@kernel
def _add(gradient, residual, out, block):  # type: ignore[no-untyped-def]
    part, first = out[block], gradient[block]
    if residual is None:
        for i in range(part.size):
            part[i] = first[i]
    else:
        second = residual[block]
        for i in range(part.size):
            part[i] = first[i] + second[i]
    return _energy(part)


@kernel
def _top(bits, mask):  # type: ignore[no-untyped-def]
    top = mask ^ mask
    for i in range(bits.size):
        top = max(top, bits[i] & mask)
    return top


# The kernels below go through memory once, block by block, and let each of the loops above run over a block
# while it lies in the first-level cache: apart they vectorise, together they do not, since an array and its
# bits are the same memory. Blocks are slices because an index that starts at zero needs no check of its sign.


@kernel
def _accumulate(gradient, residual, out, bits, mask):  # type: ignore[no-untyped-def]
    energy = 0.0
    top = mask ^ mask
    for start in range(0, out.size, _BLOCK):
        block = slice(start, min(start + _BLOCK, out.size))
        energy += _add(gradient, residual, out, block)
        top = max(top, _top(bits[block], mask))
    return energy, top


@kernel
def _accumulate_candidates(gradient, residual, out, bits, mask, bound, base, index, found, count):  # type: ignore[no-untyped-def]
    energy = 0.0
    top = mask ^ mask
    for start in range(0, out.size, _BLOCK):
        block = slice(start, min(start + _BLOCK, out.size))
        energy += _add(gradient, residual, out, block)
        magnitudes = bits[block]
        for first in range(0, magnitudes.size, _GROUP):
            group = magnitudes[first : first + _GROUP]
            largest = _top(group, mask)
            if largest >= bound:
                top = max(top, largest)
                for i in range(group.size):
                    magnitude = group[i] & mask
                    if magnitude >= bound:
                        if count < index.size:
                            index[count] = base + start + first + i
                            found[count] = magnitude
                        count += 1
    return count, energy, top
