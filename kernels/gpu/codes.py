"""Codes of a few bits an element: 16-bit floats, signs, levels and grids."""

from typing import Any, NamedTuple

import numpy as np
from mpicomp.kernels import cpu
from mpicomp.kernels.cpu.bits import halves
from mpicomp.kernels.cpu.quadratic_levels import check_places, split_of
from mpicomp.kernels.gpu.compile import THREADS, launch, strides, sweeps, twin_of
from mpicomp.kernels.gpu.message import step_of
from mpicomp.kernels.gpu.scatter import Pieces
from mpicomp.kernels.gpu.workspace import Partials, Verdict, reuse, table_of_rows
from mpicomp.kernels.sizes import SQUARES_BLOCK


@twin_of(cpu.narrow)
def narrow(array, wire, out, sent=None):
    blocks = sweeps(array.size, array.dtype)
    partials = reuse(Partials, blocks, 1)
    launch("cast", f"narrow_{wire}", array.dtype, blocks, array, array.size, out, _or_null(sent), partials.memory)
    return partials.total(0)


@twin_of(cpu.widen)
def widen(source, wire, out):
    launch("cast", f"widen_{wire}", out.dtype, sweeps(out.size, out.dtype), source, out.size, out)


@twin_of(cpu.widen_add)
def widen_add(source, wire, out):
    launch("cast", f"widen_add_{wire}", out.dtype, sweeps(out.size, out.dtype), source, out.size, out)


class SignStats(NamedTuple):
    """Numbers of a sum that `accumulate_signs` has packed, as 0-d arrays; ``lost`` is the energy of its rounding."""

    nonzero: Any
    total: Any
    energy: Any
    finite: Any
    lost: Any


@twin_of(cpu.pack_signs)
def pack_signs(array, block, scales, words, sent=None):
    return _pack_signs(array, 1.0, None, block, scales, words, sent, None).lost


@twin_of(cpu.pack_signs_in_place)
def pack_signs_in_place(array, block, scales, words):
    return _pack_signs(array, 1.0, None, block, scales, words, None, array).lost


def accumulate_signs(
    gradient: Any, factor: float, residual: Any, out: Any, block: int, scales: Any, words: Any
) -> SignStats:
    """Pack ``factor * gradient + residual``, and leave in ``out`` the rest that the message lacks, in one launch.

    The gradient is an array, or a table of `Pieces` that fill one. Message and rest have the bits of
    `pack_signs_in_place`.
    """
    stats: SignStats = _pack_signs(gradient, factor, residual, block, scales, words, None, out)
    return stats


def _pack_signs(gradient, factor, residual, block, scales, words, sent, left):
    array, pieces, number = (0, gradient.rows, gradient.number) if isinstance(gradient, Pieces) else (gradient, 0, 0)
    out = gradient if left is None else left
    blocks = strides(scales.size * THREADS)  # of threads, each of which handles some blocks of elements
    partials = reuse(Partials, blocks, 4, True)
    launch(
        "signs", "pack_signs", out.dtype, blocks,
        array, pieces, number, float(factor), _or_null(residual), out.size, block, scales, scales.size, words,
        _or_null(sent), _or_null(left), partials.memory,
    )  # fmt: skip
    return SignStats(partials.count(), partials.total(1), partials.total(2), partials.finite(), partials.total(3))


@twin_of(cpu.unpack_signs)
def unpack_signs(scales, words, block, out):
    launch("signs", "unpack_signs", out.dtype, strides(out.size), scales, words, block, out, out.size)


@twin_of(cpu.unpack_signs_add)
def unpack_signs_add(scales, words, block, factor, out, afresh=False):
    launch(
        "signs", "unpack_signs_add", out.dtype, strides(out.size),
        scales, scales.strides[0] // scales.itemsize, words, words.strides[0] // words.itemsize, words.shape[0],
        block, float(factor), int(afresh), out, out.size,
    )  # fmt: skip


# Means are summed in another order than on the host: a base or a step, which travels with the codes, may differ in its
# last bit.
@twin_of(cpu.pack_quadratic)
def pack_quadratic(array, bits, out, sent):
    split = split_of(out.size, array.size, bits)
    blocks = strides(array.size)  # of threads, as many as a block of elements has
    partials = reuse(Partials, blocks, 1)
    launch(
        "quadratic_levels", "pack_quadratic", array.dtype, blocks,
        array, array.size, bits, out, split // 4, out[split:], -(-array.size // SQUARES_BLOCK), sent, partials.memory,
    )  # fmt: skip
    return partials.total(0)


# A memset and one launch: parts of equal length at equal distances are described by a few numbers, others by a table.
@twin_of(cpu.unpack_quadratic)
def unpack_quadratic(messages, starts, counts, bits, out):
    check_places("unpack_quadratic", messages.size, starts, counts, bits, out.size)
    places, lengths = step_of(starts), step_of(counts)
    table = 0
    if places is None or lengths is None or lengths[1] != 0:
        table = table_of_rows(np.array([starts, counts]).T)
        places = lengths = 0, 0
    verdict = reuse(Verdict)
    launch(
        "quadratic_levels", "unpack_quadratic", out.dtype, strides(out.size),
        messages, *places, lengths[0], table, bits, out, out.size, verdict.memory,
    )  # fmt: skip
    return verdict.good()


# A warp measures a bucket: a bucket as long as the array takes long. An L2 norm is summed in another order than on the
# host: a step, which travels with the codes, may differ in its last bit.
@twin_of(cpu.pack_grid)
def pack_grid(array, bucket, bits, norm, steps, words, sent, key=None):
    offset = (1 << (bits - 1)) - 1
    launch(
        "grid", "measure_norms", array.dtype, strides(32 * steps.size),
        array, array.size, bucket, int(norm == "l2"), offset, steps, steps.size,
    )  # fmt: skip
    return _pack_codes(array, bucket, bits, 2 * offset, offset, 0, steps, words, sent, key)


@twin_of(cpu.pack_range)
def pack_range(array, bucket, bits, bases, steps, words, sent, key=None):
    points = (1 << bits) - 1
    launch(
        "grid", "measure_ranges", array.dtype, strides(32 * steps.size),
        array, array.size, bucket, points, bases, steps, steps.size,
    )  # fmt: skip
    return _pack_codes(array, bucket, bits, points, 0, bases, steps, words, sent, key)


@twin_of(cpu.unpack_grid)
def unpack_grid(bases, steps, words, bucket, bits, out):
    _unpack_codes("unpack_grid", bases, steps, words, bucket, bits, 1.0, out)


@twin_of(cpu.unpack_grid_add)
def unpack_grid_add(bases, steps, words, bucket, bits, factor, out):
    _unpack_codes("unpack_grid_add", bases, steps, words, bucket, bits, float(factor), out)


@twin_of(cpu.pack_votes)
def pack_votes(array, words):
    launch("signs", "pack_votes", array.dtype, strides(64 * words.size), array, array.size, words, 2 * words.size)


@twin_of(cpu.unpack_votes)
def unpack_votes(words, value, out):
    launch("signs", "unpack_votes", out.dtype, strides(out.size), words, float(value), out, out.size)


def _pack_codes(array, bucket, bits, points, offset, bases, steps, words, sent, key):
    groups = 2 * (words.size // bits)  # of 32 elements
    blocks = strides(32 * groups)
    partials = reuse(Partials, blocks, 1)
    launch(
        "grid", "pack_codes", array.dtype, blocks,
        array, array.size, bucket, bits, points, offset, bases, steps, *_random(key), words, groups, sent,
        partials.memory,
    )  # fmt: skip
    return partials.total(0)


def _unpack_codes(name, bases, steps, words, bucket, bits, factor, out):
    blocks = strides(out.size)
    launch("grid", name, out.dtype, blocks, _or_null(bases), steps, words, bucket, bits, factor, out, out.size)


def _or_null(array):
    return 0 if array is None else array


def _random(key):
    return (0, 0, 0) if key is None else (1, *map(int, halves(key)))
