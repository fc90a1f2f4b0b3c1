"""Error feedback: gradient plus residual, in one sweep that also collects moments and candidates."""

import math

import numpy as np
from mpicomp.kernels.cpu.above_threshold import append_reaching
from mpicomp.kernels.cpu.bits import MASKS, as_bits, infinity_of, mask_of
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
    mask, number = MASKS[out.dtype], out.dtype.type(factor)
    bits = out.view(mask.dtype)
    nothing = bits[:0]
    second = out[:0] if residual is None else residual
    if threads == 1:
        return _moments(_accumulate(gradient, second, number, out, bits, mask, None, 0, nothing, nothing), out)

    def sweep(part: slice) -> Moments:
        sums = _accumulate(gradient[part], second[part], number, out[part], bits[part], mask, None, 0, nothing, nothing)
        return _moments(sums, out[part])

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
    limit, words, one = mask.dtype.type(bound), out.view(mask.dtype), out.dtype.type(1)
    second = out[:0] if residual is None else residual
    if threads == 1:
        sums = _accumulate(gradient, second, one, out, words, mask, limit, base, index[count:], bits[count:])
        return count + sums[0], _moments(sums, out)
    parts = cut(out.size, threads)
    room = max(0, index.size - count)
    slots = [slice(count + room * p // len(parts), count + room * (p + 1) // len(parts)) for p in range(len(parts))]

    def sweep(part: slice) -> tuple[int, Moments]:
        slot = slots[parts.index(part)]
        target, place = out[part], base + part.start
        inputs = gradient[part], second[part], one, target, words[part]
        sums = _accumulate(*inputs, mask, limit, place, index[slot], bits[slot])
        return int(sums[0]), _moments(sums, target)

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


def _moments(sums: tuple[int, int, float, float], out: Floats) -> Moments:
    _, nonzero, total, energy = sums
    finite = math.isfinite(energy)
    if not finite and out.dtype == np.float64:  # squares of finite numbers overflow too
        finite = int(_top(as_bits(out), mask_of(out.dtype))) < infinity_of(out.dtype)
    return Moments(nonzero, total, energy, finite)


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


@kernel
def _top(bits, mask):  # type: ignore[no-untyped-def]
    top = mask ^ mask
    for i in range(bits.size):
        top = max(top, bits[i] & mask)
    return top


# The kernel goes through memory once, block by block, and lets each of the loops above run over a block while it lies
# in the first-level cache: separately they vectorise, in one loop they do not, as an array and its bits share memory.
# Blocks are slices because an index that starts at zero needs no check of its sign.


@kernel
def _accumulate(gradient, residual, factor, out, bits, mask, bound, base, index, found):  # type: ignore[no-untyped-def]
    count, nonzero = np.int64(0), 0  # of one type from the start: a literal argument would compile a function again
    total, energy = 0.0, 0.0
    for start in range(0, out.size, _BLOCK):
        block = slice(start, min(start + _BLOCK, out.size))
        part = out[block]
        sums_of_block = _add(gradient, residual, factor, block, part)
        sums = (sums_of_block[1], sums_of_block[2])
        if sums_of_block[0] > 0 and not (MIN_ENERGY < sums_of_block[2] < MAX_ENERGY):
            total_of_block, energy_of_block = _sums(part)
            sums = (total_of_block / factor, energy_of_block / factor / factor)
        nonzero += sums_of_block[0]
        total += sums[0]
        energy += sums[1]
        if bound is not None:
            count = append_reaching(None, bits[block], mask, bound, base + start, index, found, count)
    return count, nonzero, total, energy
