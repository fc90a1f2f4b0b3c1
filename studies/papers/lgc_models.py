"""Bytes of LGC in the paper's own models, which are too large to be trained here: those that rounds announce."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpicomp.arrays import ArraySpec
from mpicomp.collectives import bind
from mpicomp.compressors import get_compressor
from mpicomp.mpi.rounds import Group
from mpicomp.reducer.bucket import cut
from mpicomp.reducer.layout import LARGE_BUCKET

_NUM_STEPS = 40
MODELS = {"ResNet-50": ((3, 4, 6, 3), 1000), "ResNet-101": ((3, 4, 23, 3), 10)}
"""Blocks and classes; the printed megabytes imply these classes."""
PRINTED_MB = {
    ("ResNet-50", 2): {"top-k": 0.102, "ring": 0.032, "server": 0.017},
    ("ResNet-101", 4): {"top-k": 0.17, "ring": 0.074, "server": 0.021},
}
"""MB of a step by model and ranks, table IV; of the server those of the rank that sends the common code."""


def parameters(model: str) -> list[tuple[str, int]]:
    """Return names and sizes of a ResNet's parameters, in the order of the network.

    >>> sum(size for _, size in parameters("ResNet-50"))  # as everyone counts them
    25557032
    """
    blocks, classes = MODELS[model]
    found: list[tuple[str, int]] = []

    def add(layer: str, norm: str, numel: int, width: int) -> None:
        found.extend([(f"{layer}.weight", numel), (f"{norm}.weight", width), (f"{norm}.bias", width)])

    add("conv1", "bn1", 3 * 64 * 49, 64)
    before = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            shapes = (before, width, 1), (width, width, 3), (width, 4 * width, 1)
            for place, (inner, outer, side) in enumerate(shapes, 1):
                add(f"{name}.conv{place}", f"{name}.bn{place}", inner * outer * side**2, outer)
            if block == 0:
                add(f"{name}.downsample.0", f"{name}.downsample.1", before * 4 * width, 4 * width)
            before = 4 * width
    return [*found, ("fc.weight", before * classes), ("fc.bias", classes)]


def step_bytes(model: str, config: Mapping[str, Any], collective: str, ranks: int, step: int) -> tuple[float, float]:
    """Return the bytes that a rank hands to the transport in a step: mean over ranks and steps, and of the least rank.

    Buckets are those of training: parameters in the order of backward, 32 MB each.
    """
    members = [ArraySpec(name, "float32", (size,)) for name, size in reversed(parameters(model))]
    whole = {member.name: member.numel for member in members}
    sent = np.zeros((_NUM_STEPS, ranks))
    for bucket in cut(members, LARGE_BUCKET):
        names, sizes = [member.name for member in bucket], [member.numel for member in bucket]
        scheme = bind(get_compressor(config).bind(names, sizes, model=whole), collective)
        for turn in range(len(sent)):
            for rank in range(ranks):
                group = Group(rank, ranks)
                tasks = scheme.rounds(sum(sizes), np.dtype(np.float32), group, step + turn)
                sent[turn, rank] += sum(task.sent_bytes(group) for task in tasks if not task.once)
    return float(sent.mean()), float(sent.min())
