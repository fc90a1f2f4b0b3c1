"""Error feedback: gradient plus residual, in one sweep that also collects moments and candidates."""

import numpy as np
from mpicomp.kernels.cpu.above_threshold import append_reaching
from mpicomp.kernels.cpu.bits import MASKS
from mpicomp.kernels.cpu.compile import Floats, Indices, cut, kernel, spread
from mpicomp.kernels.cpu.moments import MAX_ENERGY, MIN_ENERGY, Moments, _sums
from numpy.typing import NDArray

_BLOCK = 1024  # elements that are swept again while they are in the first-level cache


def accumulate(
    gradient: Floats, residual: Floats | None, out: Floats, threads: int = 1, factor: float = 1.0
) -> Moments:
    """Write ``factor * (gradient + residual)`` to ``out`` in one sweep, and return the moments of the sum.

    The gradient may be ``out`` itself. Without a residual nothing is added to it. The factor is not 0.
    """
    second = out[:0] if residual is None else residual
    if threads == 1:
        return Moments(*_accumulate(gradient, second, factor, out))

    def sweep(part: slice) -> Moments:
        return Moments(*_accumulate(gradient[part], second[part], factor, out[part]))

    first, *others = spread(sweep, cut(out.size, threads))
    return sum(others, first)


def accumulate_candidates(
    gradient: Floats,
    residual: Floats | None,
    out: Floats,
    bound: int,
    base: int,
    index: Indices,
    bits: NDArray[np.unsignedinteger],
    count: int,
    threads: int = 1,
) -> tuple[int, Moments]:
    """Accumulate as `accumulate`, and list the elements whose magnitude bits reach ``bound``, in the same sweep.

    Their positions plus ``base`` and their magnitude bits are appended to ``index`` and ``bits`` from ``count`` on.
    Return the number of candidates so far, which is above ``index.size`` where some were not stored, and the moments of
    ``out``.
    """
    mask = MASKS[out.dtype]
    limit, words = mask.dtype.type(bound), out.view(mask.dtype)
    second = out[:0] if residual is None else residual
    if threads == 1:
        found, sums = _list(gradient, second, out, words, mask, limit, base, index[count:], bits[count:])
        return count + found, Moments(*sums)
    parts = cut(out.size, threads)
    room = max(0, index.size - count)
    slots = [slice(count + room * p // len(parts), count + room * (p + 1) // len(parts)) for p in range(len(parts))]

    def sweep(part: slice) -> tuple[int, Moments]:
        slot = slots[parts.index(part)]
        inputs = gradient[part], second[part], out[part], words[part], mask, limit, base + part.start
        found, sums = _list(*inputs, index[slot], bits[slot])
        return int(found), Moments(*sums)

    outcomes = spread(sweep, parts)
    moments = sum((moments for _, moments in outcomes[1:]), outcomes[0][1])
    for slot, (found, _) in zip(slots, outcomes, strict=True):
        stored = min(found, slot.stop - slot.start)
        if slot.start > count and count + stored <= index.size:
            index[count : count + stored] = index[slot.start : slot.start + stored]
            bits[count : count + stored] = bits[slot.start : slot.start + stored]
        if found > stored and len(parts) > 1:
            count = max(count, index.size)  # a part without room: not all of them are stored, whatever the sum
        count += found
    return count, moments


@kernel
def _add(gradient, residual, factor, block, out):  # type: ignore[no-untyped-def]
    nonzero = 0
    total, energy = out.dtype.type(0), out.dtype.type(0)
    first, has_residual = gradient[block], residual.size > 0
    second = residual[block] if has_residual else first
    for i in range(out.size):
        value = first[i] + second[i] if has_residual else first[i]
        out[i] = value * factor
        nonzero += value != 0
        total += abs(value)
        energy += value * value
    return nonzero, np.float64(total), np.float64(energy)


# The kernels go through memory once, block by block, and let each of their loops run over a block while it lies in the
# first-level cache: separately they vectorise, in one loop they do not, as an array and its bits share memory. Blocks
# are slices because an index that starts at zero needs no check of its sign.


@kernel
def _add_block(gradient, residual, factor, start, out):  # type: ignore[no-untyped-def]
    block = slice(start, min(start + _BLOCK, out.size))
    part = out[block]
    nonzero, total, energy = _add(gradient, residual, factor, block, part)
    if nonzero > 0 and not (MIN_ENERGY < energy < MAX_ENERGY):
        total, energy = _sums(part)
        return nonzero, total / factor, energy / factor / factor
    return nonzero, total, energy


@kernel
def _all_finite(out, energy):  # type: ignore[no-untyped-def]
    if np.isfinite(energy):
        return True
    finite = out.itemsize == 8  # squares of finite numbers overflow too
    if finite:
        for i in range(out.size):
            finite &= np.isfinite(out[i])
    return finite


@kernel
def _accumulate(gradient, residual, factor, out):  # type: ignore[no-untyped-def]
    number = out.dtype.type(factor)
    nonzero, total, energy = 0, 0.0, 0.0
    for start in range(0, out.size, _BLOCK):
        of_block = _add_block(gradient, residual, number, start, out)
        nonzero += of_block[0]
        total += of_block[1]
        energy += of_block[2]
    return nonzero, total, energy, _all_finite(out, energy)


@kernel
def _list(gradient, residual, out, bits, mask, bound, base, index, found):  # type: ignore[no-untyped-def]
    one = out.dtype.type(1)
    count, nonzero, total, energy = np.int64(0), 0, 0.0, 0.0
    for start in range(0, out.size, _BLOCK):
        of_block = _add_block(gradient, residual, one, start, out)
        nonzero += of_block[0]
        total += of_block[1]
        energy += of_block[2]
        block = bits[start : min(start + _BLOCK, out.size)]
        count = append_reaching(None, block, mask, bound, base + start, index, found, count)
    return count, (nonzero, total, energy, _all_finite(out, energy))
