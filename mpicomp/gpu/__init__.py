"""The device of a bucket: the host or a GPU, with its kernels, its allocation and its stream."""

from mpicomp.gpu.arrays import device_array
from mpicomp.gpu.cuda import common_device, on_device
from mpicomp.gpu.device import HOST, Device, MeanPart, StreamOrder, current_device, received_on_host, to_python

__all__ = [
    "HOST", "Device", "MeanPart", "StreamOrder", "common_device", "current_device", "device_array", "on_device",
    "received_on_host", "to_python",
]  # fmt: skip
