"""Sixty-four magnitudes compared at once: the vector instruction that Numba's own loops do not reach."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 64
"""Elements that one comparison looks at."""

_REGISTER = 512  # bits; where the processor's vectors are shorter LLVM cuts them


@intrinsic
def at_least(typingctx: Any, bits: Any, start: Any, bound: Any) -> Any:
    """Give a 64-bit mask of the elements ``bits[start : start + LANES]`` whose magnitude bits reach ``bound``.

    The caller answers for the range. A loop over single elements with a branch in it would not be vectorised.
    """
    width = bits.dtype.bitwidth
    lanes = _REGISTER // width
    word = ir.IntType(width)
    vector = ir.VectorType(word, lanes)
    place = ir.IntType(64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        first = builder.insert_element(ir.Constant(vector, ir.Undefined), arguments[2], ir.Constant(ir.IntType(32), 0))
        everywhere = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
        bounds = builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), everywhere)
        unsigned = ir.Constant(vector, [(1 << (width - 1)) - 1] * lanes)
        result = ir.Constant(place, 0)
        for offset in range(0, LANES, lanes):
            address = builder.gep(data, [builder.add(arguments[1], ir.Constant(place, offset))])
            loaded = builder.load(builder.bitcast(address, vector.as_pointer()), align=width // 8)
            reached = builder.icmp_unsigned(">=", builder.and_(loaded, unsigned), bounds)
            part = builder.zext(builder.bitcast(reached, ir.IntType(lanes)), place)
            result = builder.or_(result, builder.shl(part, ir.Constant(place, offset)))
        return result

    return types.uint64(bits, types.intp, bits.dtype), generate
