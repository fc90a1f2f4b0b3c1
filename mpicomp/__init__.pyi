"""Public names, each with the module that holds it; `__init__.py` imports them from there when they are first used."""

from typing import Any

from mpicomp import torch as torch
from mpicomp._version import __version__ as __version__
from mpicomp.bounded.allreduce import allreduce as allreduce
from mpicomp.checkpoint import load_checkpoint as load_checkpoint
from mpicomp.checkpoint import save_checkpoint as save_checkpoint
from mpicomp.collectives import list_collectives as list_collectives
from mpicomp.compressors import DGC as DGC
from mpicomp.compressors import QSGD as QSGD
from mpicomp.compressors import Compressor as Compressor
from mpicomp.compressors import Context as Context
from mpicomp.compressors import Dense as Dense
from mpicomp.compressors import OneBit as OneBit
from mpicomp.compressors import Quantiser as Quantiser
from mpicomp.compressors import RandomK as RandomK
from mpicomp.compressors import Selection as Selection
from mpicomp.compressors import SIDCo as SIDCo
from mpicomp.compressors import Sparsifier as Sparsifier
from mpicomp.compressors import TopK as TopK
from mpicomp.compressors import get_compressor as get_compressor
from mpicomp.compressors import list_compressors as list_compressors
from mpicomp.compressors.powersgd import PowerSGD as PowerSGD
from mpicomp.errors import MpicompError as MpicompError
from mpicomp.job.gpus import local_device as local_device
from mpicomp.job.stop import STOPPED as STOPPED
from mpicomp.job.stop import ask_to_stop as ask_to_stop
from mpicomp.job.stop import stop_on_signals as stop_on_signals
from mpicomp.policies import get_policy as get_policy
from mpicomp.policies import list_policies as list_policies
from mpicomp.reducer import BucketRecord as BucketRecord
from mpicomp.reducer import Reducer as Reducer
from mpicomp.reducer import StepRecord as StepRecord
from mpicomp.reducer.trace import trace as trace
from mpicomp.registry import register as register

def __getattr__(name: str) -> Any: ...  # the class of any other compressor
