"""Long arrays in files: all of their bytes are real, and what does not fit in memory is on a disk."""

import tempfile

import numpy as np

from mpicomp.gpu import Device

LONG = 256 << 20  # bytes of an array that is long


def store_long_arrays(monkeypatch, folder):
    """Have arrays of the host that are long, workspaces' and buckets', be files of a folder, as long as they live."""
    in_memory = {"empty": Device.empty, "zeros": Device.zeros}

    def stored(name):
        def make(self, size, dtype):
            if int(size) * np.dtype(dtype).itemsize < LONG:
                return in_memory[name](self, size, dtype)
            with tempfile.TemporaryFile(dir=folder) as file:  # without a name: nothing is left behind
                return np.asarray(np.memmap(file, dtype, "w+", shape=(int(size),)))

        return make

    for name in in_memory:
        monkeypatch.setattr(Device, name, stored(name))
