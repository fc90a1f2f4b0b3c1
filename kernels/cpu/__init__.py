"""Numba kernels for contiguous one-dimensional NumPy arrays of float32 or float64.

Magnitudes are compared as integers: the bits of a float without its sign order like its absolute value,
with infinity above every finite number and NaN above infinity. One integer maximum in a sweep thus finds
the largest magnitude and shows whether everything was finite.
"""

import typing

from mpicomp.kernels.cpu.above_threshold import (
    TailStatistics,
    select_above,
    select_listed,
    tail_statistics,
)
from mpicomp.kernels.cpu.accumulate import accumulate, accumulate_candidates
from mpicomp.kernels.cpu.bits import magnitude_bits, magnitude_of, mask_of
from mpicomp.kernels.cpu.cast import narrow, widen, widen_add
from mpicomp.kernels.cpu.elementwise import energy, momentum, scale, share_rounding
from mpicomp.kernels.cpu.grid import pack_grid, pack_range, unpack_grid, unpack_grid_add
from mpicomp.kernels.cpu.indices import ascending_below, decode_indices, decode_indices_of, encode_indices
from mpicomp.kernels.cpu.merge import count_reaching, intersect, merge_add, merge_subtract, norm_change, split_largest
from mpicomp.kernels.cpu.message import (
    ascending_parts,
    mean_of_pairs,
    sparse_add,
    write_header,
    write_pairs_plain,
    write_tail,
)
from mpicomp.kernels.cpu.moments import Moments, logarithms
from mpicomp.kernels.cpu.products import conv_double, conv_halve, conv_mix, conv_room
from mpicomp.kernels.cpu.quadratic_levels import pack_quadratic, unpack_quadratic
from mpicomp.kernels.cpu.scatter import Pieces, clear_at, concatenate, gather, scatter_add, subtract_at
from mpicomp.kernels.cpu.select import kth_magnitude, select_candidates, select_largest
from mpicomp.kernels.cpu.signs import (
    pack_signs,
    pack_signs_in_place,
    pack_votes,
    unpack_signs,
    unpack_signs_add,
    unpack_votes,
)
from mpicomp.kernels.cpu.spectrum import BINS, GROUP, edges, spectrum
from mpicomp.kernels.sizes import index_bytes, quadratic_bytes
from mpicomp.kernels.sizes import public_names as _public_names

if not typing.TYPE_CHECKING:  # for type checkers all imports are public
    __all__ = _public_names(globals())
