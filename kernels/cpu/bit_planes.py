"""Small integers in bit planes: for every 64 of them one word a bit, so that b bits take b / 8 bytes, whatever b is.

Words of the same 64 are neighbors, that of the lowest bit first; bit j of a word belongs to integer j.
"""

from typing import Any

from llvmlite import ir
from mpicomp.kernels.cpu.compile import kernel
from mpicomp.kernels.cpu.simd import LANES
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_BYTES = ir.VectorType(ir.IntType(8), LANES)
_TRUTHS = ir.VectorType(ir.IntType(1), LANES)
_WORD = ir.IntType(64)


@kernel
def write_planes(codes, groups, planes, words, first):  # type: ignore[no-untyped-def]
    """Write ``64 * groups`` codes, each below ``2**planes``, to ``words`` from word ``first`` on."""
    for group in range(groups):
        _write(codes, group * LANES, planes, words, first + group * planes)


@kernel
def read_planes(words, first, groups, planes, codes):  # type: ignore[no-untyped-def]
    """Read the integers that `write_planes` has written."""
    for group in range(groups):
        _read(words, first + group * planes, planes, codes, group * LANES)


@intrinsic
def _write(typingctx: Any, codes: Any, start: Any, planes: Any, words: Any, first: Any) -> Any:
    """Write one group. The caller answers for the ranges.

    The planes' top bit is moved to the sign, where one instruction collects it, and after it the others one by one.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, start, planes, out, first = arguments
        address = builder.bitcast(_address(context, builder, codes, array, start), _BYTES.as_pointer())
        free = builder.trunc(builder.sub(ir.Constant(planes.type, 8), planes), ir.IntType(8))
        left = cgutils.alloca_once(builder, _BYTES)
        builder.store(builder.shl(builder.load(address, align=1), _everywhere(builder, free)), left)
        with cgutils.for_range(builder, planes) as loop:
            bits = builder.load(left)
            word = builder.bitcast(builder.icmp_signed("<", bits, ir.Constant(_BYTES, [0] * LANES)), _WORD)
            place = builder.sub(builder.add(first, planes), builder.add(loop.index, ir.Constant(planes.type, 1)))
            builder.store(word, _address(context, builder, words, out, place))
            builder.store(builder.add(bits, bits), left)
        return context.get_dummy_value()

    return types.void(codes, types.intp, types.intp, words, types.intp), generate


@intrinsic
def _read(typingctx: Any, words: Any, first: Any, planes: Any, codes: Any, start: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, first, planes, out, start = arguments
        read = cgutils.alloca_once_value(builder, ir.Constant(_BYTES, [0] * LANES))
        with cgutils.for_range(builder, planes) as loop:
            place = builder.sub(builder.add(first, planes), builder.add(loop.index, ir.Constant(planes.type, 1)))
            word = builder.load(_address(context, builder, words, array, place))
            ones = builder.zext(builder.bitcast(word, _TRUTHS), _BYTES)
            before = builder.load(read)
            builder.store(builder.add(builder.add(before, before), ones), read)
        address = builder.bitcast(_address(context, builder, codes, out, start), _BYTES.as_pointer())
        builder.store(builder.load(read), address, align=1)
        return context.get_dummy_value()

    return types.void(words, types.intp, types.intp, codes, types.intp), generate


def _address(context: Any, builder: Any, kind: Any, array: Any, place: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [place])


def _everywhere(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(_BYTES, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))
