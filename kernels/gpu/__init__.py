"""CUDA kernels for contiguous one-dimensional CuPy arrays of float32 or float64.

A kernel returns the same as that of its name in `mpicomp.kernels.cpu`, except for numbers that are subnormal as
float32: CuPy has every source compiled so that they are treated as zero. Every launch goes into the current stream,
and none waits: a number that a CPU function returns is a 0-d device array here, and converting it to a Python number
waits for it. Numbers as arguments may be such arrays, too.

Importing this compiles nothing and needs no CuPy; a source is compiled when one of its kernels is first launched on a
device. Scratch of single functions comes from CuPy's memory pool, that of `topk` and `sidco` from a `Workspace`.
"""

import typing

from mpicomp.kernels.cpu import BINS, GROUP, Moments, TailStatistics, edges, mask_of
from mpicomp.kernels.gpu.codes import (
    accumulate_signs,
    narrow,
    pack_grid,
    pack_quadratic,
    pack_range,
    pack_signs,
    pack_signs_in_place,
    pack_votes,
    unpack_grid,
    unpack_grid_add,
    unpack_quadratic,
    unpack_signs,
    unpack_signs_add,
    unpack_votes,
    widen,
    widen_add,
)  # fmt: skip
from mpicomp.kernels.gpu.compile import compile_ahead
from mpicomp.kernels.gpu.indices import ascending_below, decode_indices, decode_indices_of, encode_indices
from mpicomp.kernels.gpu.message import sparse_add, sparse_add_and_subtract, write_header, write_tail
from mpicomp.kernels.gpu.scatter import (
    Pieces,
    clear_at,
    concatenate,
    gather,
    scatter_add,
    subtract_at,
    table_of,
)  # fmt: skip
from mpicomp.kernels.gpu.select import (
    Message,
    Output,
    kth_magnitude,
    magnitude_bits,
    magnitude_of,
    select_above,
    select_largest,
)  # fmt: skip
from mpicomp.kernels.gpu.sidco import Estimate, sidco
from mpicomp.kernels.gpu.sweeps import (
    accumulate,
    energy,
    logarithms,
    momentum,
    scale,
    share_rounding,
    spectrum,
    tail_statistics,
)  # fmt: skip
from mpicomp.kernels.gpu.topk import Stats, topk
from mpicomp.kernels.gpu.workspace import Workspace
from mpicomp.kernels.sizes import index_bytes, quadratic_bytes
from mpicomp.kernels.sizes import public_names as _public_names

if not typing.TYPE_CHECKING:  # for type checkers all imports are public
    __all__ = _public_names(globals())

GATHERS = True
"""Whether many pieces are best concatenated before they are summed: a launch costs more than that."""
