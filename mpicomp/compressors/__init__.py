"""Compressors: one file each, one registry. They turn arrays into messages and know no MPI."""

from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.base import (
    Compressor,
    Entry,
    Quantiser,
    Scope,
    Selection,
    SharedQuantiser,
    SharedSparsifier,
    Sparsifier,
)
from mpicomp.compressors.candidates import Candidates
from mpicomp.compressors.countsketch import CountSketch
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.dgc import DGC
from mpicomp.compressors.efsign import EFSign
from mpicomp.compressors.fetchsgd import FetchSGD
from mpicomp.compressors.gaussiank import GaussianK
from mpicomp.compressors.globalrandk_maxnorm import GlobalRandKMaxNorm
from mpicomp.compressors.lgc import LGC
from mpicomp.compressors.maxnorm import MaxNorm
from mpicomp.compressors.mstopk import MSTopK
from mpicomp.compressors.natural import Natural
from mpicomp.compressors.onebit import OneBit
from mpicomp.compressors.powersgd import PowerSGD
from mpicomp.compressors.qsgd import QSGD
from mpicomp.compressors.randomk import BlockRandomK, RandomK
from mpicomp.compressors.redsync import RedSync
from mpicomp.compressors.registry import (
    compressor_class,
    get_compressor,
    list_compressors,
    register_compressor,
)
from mpicomp.compressors.sidco import SIDCo
from mpicomp.compressors.signsgd import SignSGD
from mpicomp.compressors.terngrad import TernGrad
from mpicomp.compressors.threshold import Threshold
from mpicomp.compressors.topk import TopK
from mpicomp.compressors.uniform import Uniform

__all__ = [
    "DGC",
    "LGC",
    "QSGD",
    "Accumulated",
    "BlockRandomK",
    "Candidates",
    "Compressor",
    "CountSketch",
    "Dense",
    "EFSign",
    "Entry",
    "FetchSGD",
    "GaussianK",
    "GlobalRandKMaxNorm",
    "MSTopK",
    "MaxNorm",
    "Natural",
    "OneBit",
    "PowerSGD",
    "Quantiser",
    "RandomK",
    "RedSync",
    "SIDCo",
    "Scope",
    "Selection",
    "SharedQuantiser",
    "SharedSparsifier",
    "SignSGD",
    "Sparsifier",
    "TernGrad",
    "Threshold",
    "TopK",
    "Uniform",
    "compressor_class",
    "get_compressor",
    "list_compressors",
    "register_compressor",
]
