"""Compressors: one file each. They turn arrays into messages and know no MPI."""

from mpicomp.compressors.base_compressor import COMPRESSORS, Compressor, Entry
from mpicomp.compressors.candidates import Candidates
from mpicomp.compressors.chunktopk import ChunkTopK
from mpicomp.compressors.context import Context
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.dgc import DGC
from mpicomp.compressors.efsign import EFSign
from mpicomp.compressors.gaussiank import GaussianK
from mpicomp.compressors.globalrandk_maxnorm import GlobalRandKMaxNorm
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.kinds import Quantiser, SharedQuantiser, SharedSparsifier, Sparsifier
from mpicomp.compressors.maxnorm import MaxNorm
from mpicomp.compressors.mstopk import MSTopK
from mpicomp.compressors.natural import Natural
from mpicomp.compressors.onebit import OneBit
from mpicomp.compressors.qsgd import QSGD
from mpicomp.compressors.randomk import BlockRandomK, RandomK
from mpicomp.compressors.redsync import RedSync
from mpicomp.compressors.sidco import SIDCo
from mpicomp.compressors.terngrad import TernGrad
from mpicomp.compressors.threshold import Threshold
from mpicomp.compressors.topk import TopK
from mpicomp.compressors.uniform import Uniform
from mpicomp.compressors.wire_format import Selection

__all__ = [
    "COMPRESSORS",
    "DGC",
    "QSGD",
    "BlockRandomK",
    "Candidates",
    "ChunkTopK",
    "Compressor",
    "Context",
    "Dense",
    "EFSign",
    "Entry",
    "GaussianK",
    "GlobalRandKMaxNorm",
    "GradientWithResidual",
    "MSTopK",
    "MaxNorm",
    "Natural",
    "OneBit",
    "Quantiser",
    "RandomK",
    "RedSync",
    "SIDCo",
    "Selection",
    "SharedQuantiser",
    "SharedSparsifier",
    "Sparsifier",
    "TernGrad",
    "Threshold",
    "TopK",
    "Uniform",
    "compressor_class",
    "get_compressor",
    "list_compressors",
]

get_compressor = COMPRESSORS.build
list_compressors = COMPRESSORS.names
compressor_class = COMPRESSORS.cls
