"""Sixty-four elements at once, and bits of 64-bit words: the instructions that Numba's loops do not reach."""

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 64  # elements that one call looks at; as many as a word has bits

_REGISTER = 512  # bits; where the processor's vectors are shorter LLVM cuts them
_PLACE = ir.IntType(64)


@intrinsic
def ones(typingctx: Any, word: Any) -> Any:
    """Count the bits that are set."""
    return word(word), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


@intrinsic
def first_one(typingctx: Any, word: Any) -> Any:
    """Return the place of the lowest bit that is set; anything for zero, which has none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return word(word), generate


@intrinsic
def at_least(typingctx: Any, bits: Any, start: Any, bound: Any) -> Any:
    """Return a 64-bit mask of the elements ``bits[start : start + LANES]`` whose magnitude bits reach ``bound``.

    The caller answers for the range. A loop over single elements with a branch in it would not be vectorised.
    """
    width = bits.dtype.bitwidth
    vector = ir.VectorType(ir.IntType(width), _REGISTER // width)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bounds = _everywhere(builder, arguments[2], vector)
        unsigned = ir.Constant(vector, [(1 << (width - 1)) - 1] * vector.count)
        result = ir.Constant(_PLACE, 0)
        for offset, address in _addresses(context, builder, signature, arguments, vector):
            loaded = builder.load(address, align=width // 8)
            reached = builder.icmp_unsigned(">=", builder.and_(loaded, unsigned), bounds)
            result = _with_bits(builder, result, reached, offset, vector)
        return result

    return types.uint64(bits, types.intp, bits.dtype), generate


@intrinsic
def negative(typingctx: Any, bits: Any, start: Any) -> Any:
    """Return a 64-bit mask of the elements ``bits[start : start + LANES]`` whose sign bit is set.

    The caller answers for the range.
    """
    width = bits.dtype.bitwidth
    vector = ir.VectorType(ir.IntType(width), _REGISTER // width)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zeros = ir.Constant(vector, [0] * vector.count)
        result = ir.Constant(_PLACE, 0)
        for offset, address in _addresses(context, builder, signature, arguments, vector):
            below = builder.icmp_signed("<", builder.load(address, align=width // 8), zeros)
            result = _with_bits(builder, result, below, offset, vector)
        return result

    return types.uint64(bits, types.intp), generate


@intrinsic
def put_signed(typingctx: Any, out: Any, start: Any, word: Any, value: Any) -> Any:
    """Write ``-value`` to the elements ``out[start : start + LANES]`` whose bit in ``word`` is set, else ``value``.

    The caller answers for the range.
    """
    return types.void(out, types.intp, types.uint64, out.dtype), _signed(out, add=False)


@intrinsic
def add_signed(typingctx: Any, out: Any, start: Any, word: Any, value: Any) -> Any:
    """Add the values that `put_signed` writes."""
    return types.void(out, types.intp, types.uint64, out.dtype), _signed(out, add=True)


def _signed(out: Any, add: bool) -> Any:
    width = out.dtype.bitwidth
    lanes = _REGISTER // width

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, word, value = arguments
        vector = ir.VectorType(value.type, lanes)
        plus, minus = (_everywhere(builder, number, vector) for number in (value, builder.fneg(value)))
        for offset, address in _addresses(context, builder, signature, arguments, vector):
            bits = builder.trunc(builder.lshr(word, ir.Constant(_PLACE, offset)), ir.IntType(lanes))
            values = builder.select(builder.bitcast(bits, ir.VectorType(ir.IntType(1), lanes)), minus, plus)
            if add:
                values = builder.fadd(builder.load(address, align=width // 8), values)
            builder.store(values, address, align=width // 8)
        return context.get_dummy_value()

    return generate


def _addresses(
    context: Any, builder: Any, signature: Any, arguments: Any, vector: ir.VectorType
) -> Iterator[tuple[int, Any]]:
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    for offset in range(0, LANES, vector.count):
        address = builder.gep(data, [builder.add(arguments[1], ir.Constant(_PLACE, offset))])
        yield offset, builder.bitcast(address, vector.as_pointer())


def _everywhere(builder: Any, value: Any, vector: ir.VectorType) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, undefined, zeros)


def _with_bits(builder: Any, word: Any, truths: Any, offset: int, vector: ir.VectorType) -> Any:
    part = builder.zext(builder.bitcast(truths, ir.IntType(vector.count)), _PLACE)
    return builder.or_(word, builder.shl(part, ir.Constant(_PLACE, offset)))
