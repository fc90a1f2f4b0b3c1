"""One array, no state."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from mpicomp.collectives import fitting
from mpicomp.compressors import Compressor, Dense, get_compressor
from mpicomp.reducer.reducer import Reducer
from mpicomp.transport import Transport
from mpicomp.transport.connect import connect


def allreduce(array: Any, compressor: Compressor | str | Mapping[str, Any] | None = None, comm: Any = None) -> Any:
    """Average one array over the ranks, compressed and without state: elements that are not sent are lost.

    Collective over ``comm``. For something that is averaged again and again use a `Reducer`, which keeps what
    was not sent, its buffers and its communicator.

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
    chosen = Dense() if compressor is None else get_compressor(compressor)
    # One array tells nothing about the next one: the collective is the first that fits.
    reducer = Reducer(chosen, fitting(chosen)[0], feedback=False, comm=_world() if comm is None else comm)
    try:
        return reducer.reduce({"array": array})["array"]
    finally:
        reducer.close()


_world: Callable[[], Transport] = functools.cache(connect)  # which duplicates MPI.COMM_WORLD once, not at every call
