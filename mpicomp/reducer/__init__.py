"""One step: accumulate, plan, exchange, record."""

from mpicomp.reducer.record import BucketRecord, StepRecord
from mpicomp.reducer.reducer import Reducer
from mpicomp.reducer.special_reducers import allreduce

__all__ = ["BucketRecord", "Reducer", "StepRecord", "allreduce"]
