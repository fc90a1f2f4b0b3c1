"""Places: where a bucket lives, with its kernels, its allocation and its stream. The host is one, each GPU another."""

from mpicomp.places.choose import common_place, on_device
from mpicomp.places.place import HOST, MeanPart, Place, here, numbers, picked, received
from mpicomp.places.route_table import RouteTable

__all__ = [
    "HOST", "MeanPart", "Place", "RouteTable", "common_place", "here", "numbers", "on_device", "picked", "received",
]  # fmt: skip
