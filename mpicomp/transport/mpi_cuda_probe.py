"""``python -m mpicomp.transport.mpi_cuda_probe``: give MPI a pointer to GPU memory and see whether it survives.

One rank alone sends an array of a device to itself, and sums it. Exit status 0 where it comes out right, 1 where it
does not, `mpicomp.system.cuda.NO_GPU` where there is nothing to try it with; a library that reads the pointer as one of
the host ends the process, which is why `mpicomp.system.cuda.probe` starts it as a child.
"""

import sys

import numpy as np

from mpicomp.places.driver import Driver, driver
from mpicomp.system.cuda import NO_GPU

_ELEMENTS = 1 << 18  # libraries take different paths for short and long messages; this is a long one


def passes(cuda: Driver) -> bool:
    """Return whether numbers come out of MPI as they went in."""
    from mpi4py import MPI  # starts MPI, which only a process with a GPU has to

    numbers = cuda.pinned(4 * _ELEMENTS).view(np.float32)
    stream, event = cuda.stream(0), cuda.event(0)
    first, second = (cuda.memory(0, numbers.nbytes) for _ in range(2))

    def copy(values: np.ndarray, address: int) -> None:
        numbers[:] = values
        cuda.send(0, address, numbers.ctypes.data, numbers.nbytes, stream)
        cuda.record(0, event, stream)
        cuda.wait(0, event)

    def arrived(values: np.ndarray) -> bool:
        numbers[:] = 0
        cuda.fetch(0, numbers.ctypes.data, second, numbers.nbytes, stream)
        cuda.record(0, event, stream)
        cuda.wait(0, event)
        return bool(np.array_equal(numbers, values))

    buffers = [[MPI.memory.fromaddress(address, numbers.nbytes), MPI.FLOAT] for address in (first, second)]
    values = np.arange(_ELEMENTS, dtype=np.float32)
    copy(values, first)
    copy(-values, second)
    MPI.COMM_SELF.Sendrecv(buffers[0], 0, 0, buffers[1], 0, 0)
    if not arrived(values):
        return False
    copy(-values, second)
    MPI.COMM_SELF.Allreduce(buffers[0], buffers[1])
    return arrived(values)


if __name__ == "__main__":
    found = driver()
    if found is None or not found.count():
        sys.exit(NO_GPU)
    sys.exit(0 if passes(found) else 1)
