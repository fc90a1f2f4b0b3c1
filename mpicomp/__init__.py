"""Compressed gradient exchange for data-parallel training, native to MPI.

Public names live here and in `mpicomp.torch`; they are loaded when they are first used, so that
``import mpicomp`` starts neither MPI nor a compiler and loads no torch and no CuPy.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mpicomp._version import __version__
from mpicomp.system import abort as _abort  # noqa: F401 (puts itself in front of sys.exit before a script looks it up)

if TYPE_CHECKING:
    from mpicomp import torch
    from mpicomp.algorithms.countsketch import CountSketch
    from mpicomp.algorithms.dcttopk import DCTTopK
    from mpicomp.algorithms.fetchsgd import FetchSGD
    from mpicomp.algorithms.powersgd import PowerSGD
    from mpicomp.algorithms.signsgd import SignSGD
    from mpicomp.checkpoint import load_checkpoint, save_checkpoint
    from mpicomp.collectives import list_collectives
    from mpicomp.compressors import (
        DGC,
        QSGD,
        BlockRandomK,
        ChunkTopK,
        Compressor,
        Context,
        Dense,
        EFSign,
        GaussianK,
        GlobalRandKMaxNorm,
        MaxNorm,
        MSTopK,
        Natural,
        OneBit,
        Quantiser,
        RandomK,
        RedSync,
        Selection,
        SharedQuantiser,
        SharedSparsifier,
        SIDCo,
        Sparsifier,
        TernGrad,
        Threshold,
        TopK,
        Uniform,
        get_compressor,
        list_compressors,
    )
    from mpicomp.errors import MpicompError
    from mpicomp.policies import get_policy, list_policies
    from mpicomp.reducer import BucketRecord, Reducer, StepRecord, allreduce
    from mpicomp.reducer.tracing import trace
    from mpicomp.registry import register
    from mpicomp.system.gpus import local_device
    from mpicomp.system.stopping import STOPPED, ask_to_stop, stop_on_signals

_HOMES = {
    "BlockRandomK": "mpicomp.compressors",
    "BucketRecord": "mpicomp.reducer",
    "ChunkTopK": "mpicomp.compressors",
    "Compressor": "mpicomp.compressors",
    "CountSketch": "mpicomp.algorithms.countsketch",
    "DCTTopK": "mpicomp.algorithms.dcttopk",
    "DGC": "mpicomp.compressors",
    "Dense": "mpicomp.compressors",
    "FetchSGD": "mpicomp.algorithms.fetchsgd",
    "EFSign": "mpicomp.compressors",
    "GaussianK": "mpicomp.compressors",
    "GlobalRandKMaxNorm": "mpicomp.compressors",
    "MaxNorm": "mpicomp.compressors",
    "MSTopK": "mpicomp.compressors",
    "MpicompError": "mpicomp.errors",
    "Natural": "mpicomp.compressors",
    "OneBit": "mpicomp.compressors",
    "PowerSGD": "mpicomp.algorithms.powersgd",
    "QSGD": "mpicomp.compressors",
    "Quantiser": "mpicomp.compressors",
    "RandomK": "mpicomp.compressors",
    "RedSync": "mpicomp.compressors",
    "Reducer": "mpicomp.reducer",
    "STOPPED": "mpicomp.system.stopping",
    "SIDCo": "mpicomp.compressors",
    "Context": "mpicomp.compressors",
    "Selection": "mpicomp.compressors",
    "SharedQuantiser": "mpicomp.compressors",
    "SharedSparsifier": "mpicomp.compressors",
    "SignSGD": "mpicomp.algorithms.signsgd",
    "Sparsifier": "mpicomp.compressors",
    "StepRecord": "mpicomp.reducer",
    "TernGrad": "mpicomp.compressors",
    "Threshold": "mpicomp.compressors",
    "TopK": "mpicomp.compressors",
    "Uniform": "mpicomp.compressors",
    "allreduce": "mpicomp.reducer",
    "ask_to_stop": "mpicomp.system.stopping",
    "get_compressor": "mpicomp.compressors",
    "list_collectives": "mpicomp.collectives",
    "list_compressors": "mpicomp.compressors",
    "get_policy": "mpicomp.policies",
    "list_policies": "mpicomp.policies",
    "load_checkpoint": "mpicomp.checkpoint",
    "local_device": "mpicomp.system.gpus",
    "register": "mpicomp.registry",
    "save_checkpoint": "mpicomp.checkpoint",
    "stop_on_signals": "mpicomp.system.stopping",
    "trace": "mpicomp.reducer.tracing",
}

__all__ = [
    "DGC",
    "QSGD",
    "STOPPED",
    "BlockRandomK",
    "BucketRecord",
    "ChunkTopK",
    "Compressor",
    "Context",
    "CountSketch",
    "DCTTopK",
    "Dense",
    "EFSign",
    "FetchSGD",
    "GaussianK",
    "GlobalRandKMaxNorm",
    "MSTopK",
    "MaxNorm",
    "MpicompError",
    "Natural",
    "OneBit",
    "PowerSGD",
    "Quantiser",
    "RandomK",
    "RedSync",
    "Reducer",
    "SIDCo",
    "Selection",
    "SharedQuantiser",
    "SharedSparsifier",
    "SignSGD",
    "Sparsifier",
    "StepRecord",
    "TernGrad",
    "Threshold",
    "TopK",
    "Uniform",
    "__version__",
    "allreduce",
    "ask_to_stop",
    "get_compressor",
    "get_policy",
    "list_collectives",
    "list_compressors",
    "list_policies",
    "load_checkpoint",
    "local_device",
    "register",
    "save_checkpoint",
    "stop_on_signals",
    "torch",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name == "torch":
        return importlib.import_module(f"mpicomp.{name}")
    value = getattr(importlib.import_module(_HOMES[name]), name) if name in _HOMES else _registered(name)
    globals()[name] = value
    return value


def _registered(name: str) -> Any:
    """Return the built-in compressor's class of a name: a new one is in no list here."""
    if name[:1].isupper():
        from mpicomp.registry import COMPRESSORS

        for cls in COMPRESSORS.classes():
            if cls.__name__ == name and COMPRESSORS.plugin(cls.id) is None:
                return cls
    raise AttributeError(f"module 'mpicomp' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
