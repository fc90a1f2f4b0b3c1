"""Compressors: one file each, one registry. They turn arrays into messages and know no MPI."""

from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base import Compressor, Entry, Scope, Selection, SharedSparsifier, Sparsifier
from mpicomp.compressors.candidates import Candidates
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.registry import (
    compressor_class,
    get_compressor,
    list_compressors,
    register_compressor,
)
from mpicomp.compressors.topk import TopK

__all__ = [
    "Accumulated",
    "Candidates",
    "Compressor",
    "Dense",
    "Entry",
    "Scope",
    "Selection",
    "SharedSparsifier",
    "Sparsifier",
    "TopK",
    "compressor_class",
    "get_compressor",
    "list_compressors",
    "register_compressor",
]
