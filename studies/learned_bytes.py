"""Bytes of the layers that a learned code covers, by themselves: those of their rounds, under any exchange."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from mpicomp import LGC
from mpicomp.collectives import bind
from mpicomp.compressors import get_compressor
from mpicomp.rounds import Group

_DTYPE = np.dtype(np.float32)


def coded_bytes(buckets: Sequence[Mapping[str, Any]], covered: LGC, ranks: int, step: int) -> dict[str, float]:
    """Return the bytes of the layers that a code covers, as if they were all there is.

    The bytes of rounds are those of the shapes that collectives announce, which are those that they run.

    Parameters
    ----------
    buckets : sequence of mapping
        Of a step, as ``train --metrics`` has them: what was run.
    covered : LGC
        Says which layers these are.
    ranks : int
        That took part, in one group.
    step : int
        Counted from 0.

    Returns
    -------
    dict
        Of a row, see docs/studies.md: elements of these layers, payload that a rank hands to the transport (mean over
        ranks, and of the rank that has least), and bytes that leave a rank (mean over ranks).
    """
    model = {layer["name"]: layer["numel"] for bucket in buckets for layer in bucket["layers"]}
    sent, wire, numel = np.zeros(ranks), np.zeros(ranks), 0
    for bucket in buckets:
        layers = [(layer["name"], layer["numel"]) for layer in bucket["layers"]]
        own = _covered(covered, model, layers)
        if not own:
            continue
        own_names, own_sizes = [name for name, _ in own], [size for _, size in own]
        compressor = get_compressor(bucket["compressor"]).bind(own_names, own_sizes, model=model)
        scheme = bind(compressor, bucket["collective"])
        numel += sum(own_sizes)
        for rank in range(ranks):
            group = Group(rank, ranks)
            for task in scheme.rounds(sum(own_sizes), _DTYPE, group, step):
                if not task.once:
                    sent[rank] += task.sent_bytes(group)
                    wire[rank] += task.wire_bytes(group)
    return {
        "coded_numel": numel,
        "coded_sent_bytes": fmean(sent),
        "coded_least_bytes": float(sent.min()),
        "coded_wire_bytes": fmean(wire),
    }


def _covered(covered: LGC, model: Mapping[str, int], layers: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return those parameters of a bucket whose selected values travel in a code."""
    names, sizes = [name for name, _ in layers], [size for _, size in layers]
    parts = covered.bind(names, sizes, model=model).selected(sum(sizes)).parts
    found, start = [], 0
    for name, size in layers:
        if any(part.travels == "coded" and part.start <= start < part.stop for part in parts):
            found.append((name, size))
        start += size
    return found
