"""Bits of 64-bit words, for which Numba has no functions."""

from typing import Any

from llvmlite import ir
from numba.extending import intrinsic


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
