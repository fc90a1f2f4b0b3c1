"""CUDA kernels for contiguous one-dimensional CuPy arrays of float32 or float64.

What stands in `mpicomp.kernels.cpu` under the same name gives the same result, but for numbers that are subnormal as
float32: CuPy has every source compiled so that they are treated as zero. Everything goes into the current stream, and
nothing waits: a number that a CPU function returns is a 0-d device array here, and whoever makes a Python number of it
waits for it. Numbers that kernels are told may be such arrays, too.

Importing this compiles nothing and needs no CuPy; a source is compiled when one of its kernels is first launched on a
device. Scratch of single functions comes from CuPy's memory pool, that of `topk` and `sidco` from a `Workspace`.
"""

from mpicomp.kernels.cpu import BINS, GROUP, edges, mask_of
from mpicomp.kernels.gpu.accumulate import accumulate, accumulate_candidates, is_finite
from mpicomp.kernels.gpu.bits import magnitude_bits, magnitude_of
from mpicomp.kernels.gpu.blocks import decode_blocks, encode_blocks
from mpicomp.kernels.gpu.cast import narrow, widen, widen_add
from mpicomp.kernels.gpu.chunks import select_in_chunks
from mpicomp.kernels.gpu.collect import collect
from mpicomp.kernels.gpu.convolution import conv_double, conv_halve, conv_mix, conv_room
from mpicomp.kernels.gpu.countsketch import sketch_add, sketch_clear, sketch_estimate
from mpicomp.kernels.gpu.exponents import pack_exponents, unpack_exponents, unpack_exponents_add
from mpicomp.kernels.gpu.fields import pack_fields, pack_objections, settle_levels, unpack_fields
from mpicomp.kernels.gpu.grid import pack_grid, pack_range, unpack_grid, unpack_grid_add
from mpicomp.kernels.gpu.indices import ascending_below, decode_indices, decode_indices_of, encode_indices
from mpicomp.kernels.gpu.merge import (
    count_reaching,
    intersect,
    merge_add,
    merge_subtract,
    norm_change,
    split_largest,
)
from mpicomp.kernels.gpu.message import sparse_add, write_header, write_pairs, write_tail
from mpicomp.kernels.gpu.moments import Moments, logarithms
from mpicomp.kernels.gpu.pieces import Pieces, concatenate
from mpicomp.kernels.gpu.scatter import clear_at, gather, scatter_add, subtract_at
from mpicomp.kernels.gpu.select import kth_magnitude, select_candidates, select_largest
from mpicomp.kernels.gpu.sidco import Estimate, sidco
from mpicomp.kernels.gpu.signs import pack_signs, unpack_signs, unpack_signs_add
from mpicomp.kernels.gpu.spectrum import spectrum
from mpicomp.kernels.gpu.squares import pack_squares, unpack_squares
from mpicomp.kernels.gpu.sweep import energy, momentum, scale, share_rounding
from mpicomp.kernels.gpu.tail import Tail, counts_above, select_above, select_listed, tail
from mpicomp.kernels.gpu.topk import Stats, topk
from mpicomp.kernels.gpu.votes import majority, pack_votes, unpack_votes
from mpicomp.kernels.gpu.workspace import Workspace
from mpicomp.kernels.sizes import fields_of, index_bytes, squares_bytes, words_of

GATHERS = True
"""Whether many pieces are best put one behind the other before they are summed: launches cost more than that does."""

__all__ = [
    "BINS",
    "GROUP",
    "Estimate",
    "Moments",
    "Pieces",
    "Stats",
    "Tail",
    "Workspace",
    "accumulate",
    "accumulate_candidates",
    "ascending_below",
    "clear_at",
    "collect",
    "concatenate",
    "conv_double",
    "conv_halve",
    "conv_mix",
    "conv_room",
    "count_reaching",
    "counts_above",
    "decode_blocks",
    "decode_indices",
    "decode_indices_of",
    "edges",
    "encode_blocks",
    "encode_indices",
    "energy",
    "fields_of",
    "gather",
    "index_bytes",
    "intersect",
    "is_finite",
    "kth_magnitude",
    "logarithms",
    "magnitude_bits",
    "magnitude_of",
    "majority",
    "mask_of",
    "merge_add",
    "merge_subtract",
    "momentum",
    "narrow",
    "norm_change",
    "pack_exponents",
    "pack_fields",
    "pack_grid",
    "pack_objections",
    "pack_range",
    "pack_signs",
    "pack_squares",
    "pack_votes",
    "scale",
    "scatter_add",
    "select_above",
    "select_candidates",
    "select_in_chunks",
    "select_largest",
    "select_listed",
    "settle_levels",
    "share_rounding",
    "sidco",
    "sketch_add",
    "sketch_clear",
    "sketch_estimate",
    "sparse_add",
    "spectrum",
    "split_largest",
    "squares_bytes",
    "subtract_at",
    "tail",
    "topk",
    "unpack_exponents",
    "unpack_exponents_add",
    "unpack_fields",
    "unpack_grid",
    "unpack_grid_add",
    "unpack_signs",
    "unpack_signs_add",
    "unpack_squares",
    "unpack_votes",
    "widen",
    "widen_add",
    "words_of",
    "write_header",
    "write_pairs",
    "write_tail",
]
