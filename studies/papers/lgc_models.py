"""Bytes of LGC in the paper's own models, which are too large to be trained here: those that rounds announce."""

import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mpicomp.algorithms.lgc.compressor import index_bytes
from mpicomp.arrays import Described
from mpicomp.collectives import bind
from mpicomp.compressors import Compressor, get_compressor
from mpicomp.compressors.base import kept
from mpicomp.reducer.bucket import cut
from mpicomp.reducer.layout import LARGE_BUCKET
from mpicomp.rounds import Group

_STEPS = 40
MODELS = {"ResNet-50": ((3, 4, 6, 3), 1000), "ResNet-101": ((3, 4, 23, 3), 10)}
"""Blocks and classes; the printed megabytes imply these classes."""
PRINTED_MB = {
    ("ResNet-50", 2): {"top-k": 0.102, "ring": 0.032, "server": 0.017},
    ("ResNet-101", 4): {"top-k": 0.17, "ring": 0.074, "server": 0.021},
}
"""MB of a step by model and ranks, table IV; of the server those of the rank that sends the common code."""


def parameters(model: str) -> list[tuple[str, int]]:
    """Return names and sizes of a ResNet's parameters, in the order of the network.

    Examples
    --------
    >>> sum(size for _, size in parameters("ResNet-50"))  # as everyone counts them
    25557032
    """
    blocks, classes = MODELS[model]
    found = [("conv1.weight", 3 * 64 * 49), *_norm("bn1", 64)]
    before = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            for place, (inner, outer, side) in enumerate(
                ((before, width, 1), (width, width, 3), (width, 4 * width, 1)), 1
            ):
                found += [(f"{name}.conv{place}.weight", inner * outer * side**2), *_norm(f"{name}.bn{place}", outer)]
            if block == 0:
                found += [
                    (f"{name}.downsample.0.weight", before * 4 * width),
                    *_norm(f"{name}.downsample.1", 4 * width),
                ]
            before = 4 * width
    return [*found, ("fc.weight", before * classes), ("fc.bias", classes)]


def _norm(name: str, width: int) -> Iterator[tuple[str, int]]:
    yield from ((f"{name}.weight", width), (f"{name}.bias", width))


def parts(model: str, ratio: float) -> dict[str, int]:
    """Return the bytes of what every rank sends by LGC beside indices: the first layer, the last one's values, a code.

    Examples
    --------
    >>> parts("ResNet-50", 0.001)
    {'first': 37632, 'last': 8196, 'code': 23559}
    """
    (_, first), *others = parameters(model)
    last = sum(kept(ratio, size) for name, size in others if name.startswith("fc."))
    inner = sum(kept(ratio, size) for name, size in others if not name.startswith("fc."))
    return {"first": 4 * first, "last": 4 * last, "code": inner}  # a code has a number for four values


def step_bytes(model: str, compressor: Compressor, collective: str, ranks: int, step: int) -> tuple[float, float]:
    """Return the bytes that a rank hands to the transport in a step: mean over ranks and steps, and of the least rank.

    Buckets are those of training: parameters in the order of backward, 32 MB each. Steps differ in who leads, so that
    several are looked at.
    """
    members = [Described(name, "float32", (size,)) for name, size in reversed(parameters(model))]
    whole = {member.name: member.numel for member in members}
    sent = np.zeros((_STEPS, ranks))
    for group in cut(members, LARGE_BUCKET):
        names, sizes = [member.name for member in group], [member.numel for member in group]
        scheme = bind(compressor.bind(names, sizes, model=whole), collective)
        for turn in range(len(sent)):
            for rank in range(ranks):
                own = Group(rank, ranks)
                tasks = scheme.rounds(sum(sizes), np.dtype(np.float32), own, step + turn)
                sent[turn, rank] += sum(task.sent_bytes(own) for task in tasks if not task.once)
    return float(sent.mean()), float(sent.min())


def index_bits(numel: int, ratio: float) -> dict[str, float]:
    """Return the bits of an index among ``numel``: by DEFLATE as they are, of their differences, here, and the entropy.

    Examples
    --------
    >>> {name: round(bits) for name, bits in index_bits(100_000, 0.01).items()}
    {'deflate': 16, 'differences': 13, 'here': 9, 'entropy': 8}
    """
    count = kept(ratio, numel)
    indices = np.sort(np.random.default_rng(0).choice(numel, count, replace=False)).astype(np.uint32)
    entropy = -math.log2(ratio) - (1 - ratio) / ratio * math.log2(1 - ratio)
    nbytes = {
        "deflate": len(zlib.compress(indices.tobytes(), 9)),
        "differences": len(zlib.compress(np.diff(indices, prepend=np.uint32(0)).tobytes(), 9)),
        "here": index_bytes(count, numel),
    }
    return {name: 8 * own / count for name, own in nbytes.items()} | {"entropy": entropy}


def rows(exchanges: Mapping[str, tuple[Mapping[str, Any], str]], learnt: int) -> list[dict[str, Any]]:
    """Return the rows of a table for these exchanges, by name, when codes travel, which is after ``learnt`` steps."""
    found = []
    for (model, ranks), printed in PRINTED_MB.items():
        dense = 4 * sum(size for _, size in parameters(model))
        topk = 0.0
        for name, (config, collective) in exchanges.items():
            mean, least = step_bytes(model, get_compressor(config), collective, ranks, learnt + 1)
            topk = topk or mean
            paper = printed.get(name.removesuffix(" as published").removesuffix(" here"))
            found.append({
                "model": model, "ranks": ranks, "exchange": name,
                "paper's MB": paper, "paper's fewer": None if paper is None else dense / 1e6 / paper,
                "paper's of top-k": None if paper is None else printed["top-k"] / paper,
                "MB": mean / 1e6, "least": least / 1e6, "fewer": dense / mean, "of top-k": topk / mean,
            })  # fmt: skip
    return found
