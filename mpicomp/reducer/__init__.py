"""One step: accumulate, plan, exchange, record."""

from mpicomp.reducer.record import BucketRecord, StepRecord
from mpicomp.reducer.reducer import Reducer

__all__ = ["BucketRecord", "Reducer", "StepRecord"]
