"""Compressors: one file each. They turn arrays into messages and know no MPI.

The names here are those of base classes and of the compressors that other parts of the library use; `mpicomp` has all.
"""

from mpicomp.compressors.accumulated import Accumulated, Candidates
from mpicomp.compressors.base_compressor import COMPRESSORS, Compressor, Entry
from mpicomp.compressors.context import Context
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.kinds import Quantiser, SharedSparsifier, Sparsifier
from mpicomp.compressors.onebit import OneBit
from mpicomp.compressors.quantize import QSGD
from mpicomp.compressors.randomk import RandomK
from mpicomp.compressors.sidco import SIDCo
from mpicomp.compressors.thresholds import DGC
from mpicomp.compressors.topk import TopK
from mpicomp.compressors.wire import Selection

__all__ = [
    "COMPRESSORS",
    "DGC",
    "QSGD",
    "Accumulated",
    "Candidates",
    "Compressor",
    "Context",
    "Dense",
    "Entry",
    "OneBit",
    "Quantiser",
    "RandomK",
    "SIDCo",
    "Selection",
    "SharedSparsifier",
    "Sparsifier",
    "TopK",
    "compressor_class",
    "get_compressor",
    "list_compressors",
]

get_compressor = COMPRESSORS.build
list_compressors = COMPRESSORS.names
compressor_class = COMPRESSORS.cls
