"""One exchange among ranks inside one process."""

from typing import NamedTuple

import numpy as np

from mpicomp.collectives import Context, Scheme, bind
from mpicomp.compressors.accumulated import TRAILER, Accumulated, Piece
from mpicomp.compressors.wire import Selection
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.rounds import Returned, Round, advance, observe
from mpicomp.testing import mean_of


class Outcome(NamedTuple):
    results: list
    transports: list
    scheme: Scheme
    accumulated: list  # every rank's array as the exchange leaves it, which is what `sent` is a share of
    holds: list  # what it is then


def run(
    compressor,
    collective,
    arrays,
    step=0,
    identical_sums=True,
    residuals=None,
    stale=(),
    hosts=1,
    segment=None,
    memories=None,
    in_place=False,
):
    """Exchange one array a rank; what arrives in segments does so in segments of that length, the last one first."""
    world = LocalWorld(len(arrays), identical_sums, hosts)
    scheme = bind(compressor, collective)
    exchanges, accumulated = [], []
    for rank, array in enumerate(arrays):
        buffer = np.full(array.size + TRAILER, np.nan, array.dtype)
        residual = None if residuals is None else residuals[rank]
        accumulated.append(Accumulated(buffer, residual, [Piece(0, array)], stale=rank in stale))
        accumulated[-1].may_be_overwritten = in_place
        memory = {} if memories is None else memories[rank]
        context = Context(group=world.transports[rank].group, step=step, memory=memory)
        exchange = scheme.exchange(accumulated[-1], context)
        exchanges.append(exchange if segment is None else in_segments(exchange, segment))
    results = world.run(exchanges)
    for result, array in zip(results, arrays, strict=True):
        result.mean = mean_of(result, array)
    after, holds = [whole.array() for whole in accumulated], [whole.holds for whole in accumulated]
    return Outcome(results, world.transports, scheme, after, holds)


def in_segments(exchange, segment):
    """Let what arrives do so in segments."""

    def cut(task):
        if isinstance(task, Round) and task.arrived is not None:
            task.arrived = _cut(task.arrived, segment)

    return observe(exchange, before=cut)


def _cut(arrived, segment):
    def one_by_one(start, stop):
        for place in reversed(range(start, stop, segment)):
            arrived(place, min(place + segment, stop))

    return one_by_one


def dense(sent, numel, dtype=np.float64):
    """Give what was sent as an array."""
    if isinstance(sent, Selection):
        out = np.zeros(numel, dtype)
        out[sent.indices] = sent.values
        return out
    return sent.astype(dtype)


def gradients(ranks, numel, dtype, seed=0):
    """One array a rank. Some have nothing that is large: with a fixed limit they select nothing."""
    scales = [1e-3 if rank % 3 == 1 else 1.0 for rank in range(ranks)]
    rng = np.random.default_rng(seed)
    return [(scale * rng.standard_t(3, numel)).astype(dtype) for scale in scales]


def drive(exchange, answer):
    """Run one rank's generator of rounds, with a function's reply to each; return its value."""
    request = advance(exchange)
    while not isinstance(request, Returned):
        request = advance(exchange, answer(request))
    return request.value
