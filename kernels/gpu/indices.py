"""Elias-Fano code of ascending indices; see `mpicomp.kernels.cpu.indices`."""

from typing import Any

import numpy as np
from mpicomp.kernels import cpu
from mpicomp.kernels.gpu.compile import launch, library, strides, twin_of
from mpicomp.kernels.gpu.workspace import Verdict, reuse, table_of_rows
from mpicomp.kernels.sizes import layout_of


@twin_of(cpu.ascending_below)
def ascending_below(indices, numel):
    verdict = reuse(Verdict)
    launch("indices", "ascending", np.float32, strides(indices.size), indices, indices.size, numel, verdict.memory)
    return verdict.good()


# The device decides whether the indices ascend below ``numel``; ``out`` is all zeros where they do not.
@twin_of(cpu.encode_indices)
def encode_indices(indices, numel, out):
    bits, low, upper = layout_of(indices.size, numel)
    code = out.view(np.uint64)
    if code.size != low + upper:
        raise ValueError(f"encode_indices: the code has {8 * (low + upper)} bytes, out has {8 * code.size}")
    code.fill(0)
    verdict = reuse(Verdict)
    launch(
        "indices", "encode", np.float32, strides(indices.size),
        indices, indices.size, numel, bits, low, upper, code, verdict.memory,
    )  # fmt: skip
    return verdict.good()


# Damaged bytes never touch anything outside the arrays.
@twin_of(cpu.decode_indices)
def decode_indices(code, count, numel, out):
    if out.size != count:
        raise ValueError(f"decode_indices: {count} indices do not fill an array of {out.size}")
    _, low, upper = layout_of(count, numel)
    if _bytes_of(code) != 8 * (low + upper):
        return _refused()
    return decode_indices_of(code, [0], [count], numel, out)


# One launch, a block to a code. Codes of equal counts at equal distances are described by a few numbers, others by a
# table that goes to the device.
@twin_of(cpu.decode_indices_of)
def decode_indices_of(messages, starts, counts, numel, out):
    if sum(counts) != out.size:
        raise ValueError(f"decode_indices_of: {sum(counts)} indices do not fill an array of {out.size}")
    if any(start % 8 for start in starts):
        raise ValueError("decode_indices_of: a code begins at a multiple of 8")
    rows, first, room = [], 0, _bytes_of(messages) // 8
    for start, count in zip(starts, counts, strict=True):
        bits, low, upper = layout_of(count, numel)
        if start < 0 or start // 8 + low + upper > room:
            return _refused()
        rows.append((start // 8, count, bits, low, upper, first))
        first += count
    start, *same, _ = rows[0] if rows else (0,) * 6
    step = rows[1][0] - start if len(rows) > 1 else 0
    even = all(row == (start + place * step, *same, place * same[0]) for place, row in enumerate(rows))
    table = 0 if even else table_of_rows(rows)
    verdict = reuse(Verdict)
    launch(
        "indices", "decode", np.float32, len(rows),
        messages, len(rows), table, start, step, *same, numel, out, verdict.memory,
    )  # fmt: skip
    return verdict.good()


def _refused() -> Any:
    return library().zeros(1, np.bool_)[0]


def _bytes_of(array: Any) -> int:
    return int(array.size * array.dtype.itemsize)
