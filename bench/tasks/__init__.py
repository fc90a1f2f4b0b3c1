"""Training tasks: real data, a real model, an optimizer tuned for dense exchange, a held-out measurement.

A task is plain PyTorch and knows nothing of MPI or compression, so that measurements on it have
a baseline that was not built for the purpose. `get_task` loads one by name; torch and scikit-learn
are imported then and not before.
"""

from mpicomp.bench.tasks.task import Task as Task
from mpicomp.bench.tasks.task import get_task as get_task
from mpicomp.bench.tasks.task import list_tasks as list_tasks

__all__ = ["Task", "get_task", "list_tasks"]
