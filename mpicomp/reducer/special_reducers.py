"""A reducer that knows its optimizer, and the mean of a single array without state."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpicomp.collectives import fitting
from mpicomp.compressors import Compressor, get_compressor
from mpicomp.reducer.reducer import Reducer
from mpicomp.transport import Transport
from mpicomp.transport.connect import connect


class TrainingReducer(Reducer):
    """A reducer of a training loop, which knows how its optimizer uses means.

    Parameters
    ----------
    *args, **settings
        Of `Reducer`.
    normalises : bool
        Whether the optimizer divides the mean by the root of its mean square, as Adam does. Late gradients then arrive
        in bursts that make its steps smaller, which ``auto`` and the warning of a slow compressor consider.
    local_steps : sequence of int
        Numbers of local steps from one call of `reduce` to the next, ascending, if ranks exchange the updates of local
        steps. Of several, ``policy="auto"`` chooses one; see `Reducer.local_steps`.
    """

    def __init__(self, *args: Any, normalises: bool = True, local_steps: Sequence[int] = (1,), **settings: Any) -> None:
        self._normalises, self._local_steps = normalises, local_steps
        super().__init__(*args, **settings)


def allreduce(array: Any, compressor: Compressor | str | Mapping[str, Any] | None = None, comm: Any = None) -> Any:
    """Average one array over the ranks, compressed and without state: elements that are not sent are lost.

    Collective over ``comm``. To average arrays in every step use a `Reducer`, which keeps unsent elements, its buffers
    and its communicator.

    Parameters
    ----------
    array : array
        NumPy, CuPy or torch; float16, bfloat16, float32 or float64; not modified.
    compressor : Compressor, str, mapping or None
        None is dense.
    comm : mpi4py.MPI.Comm, Transport or None
        None stands for MPI.COMM_WORLD.

    Returns
    -------
    array
        The mean: of the same kind, dtype and shape, read-only, the same bits on every rank.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.transport import LocalWorld
    >>> allreduce(np.array([3, -5, 1], np.float32), "dense", LocalWorld(1).transports[0]).tolist()
    [3.0, -5.0, 1.0]
    """
    chosen = get_compressor("dense" if compressor is None else compressor)
    # A single call has nothing to learn from: the collective is the first that fits.
    reducer = Reducer(chosen, fitting(chosen)[0], feedback=False, comm=_world() if comm is None else comm)
    try:
        return reducer.reduce({"array": array})["array"]
    finally:
        reducer.close()


_world: Callable[[], Transport] = functools.cache(connect)  # which duplicates MPI.COMM_WORLD once, not at every call
