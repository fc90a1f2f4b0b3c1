"""One step: accumulate, plan, exchange, record."""

from mpicomp.reducer.record import BucketRecord, StepRecord
from mpicomp.reducer.reducer import Reducer, allreduce

__all__ = ["BucketRecord", "Reducer", "StepRecord", "allreduce"]
