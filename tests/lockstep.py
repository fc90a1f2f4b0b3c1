"""One exchange among ranks inside one process."""

import numpy as np

from mpicomp.collectives import bind
from mpicomp.compressors.wire import Selection
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.rounds import Returned, Round, advance
from mpicomp.testing import accumulated, exchange, mean_of


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
    inputs = [accumulated(array, None if residuals is None else residuals[rank]) for rank, array in enumerate(arrays)]
    for rank, one in enumerate(inputs):
        one.stale, one.may_be_overwritten = rank in stale, in_place

    def cut(task):
        if segment is not None and isinstance(task, Round) and task.arrived is not None:
            task.arrived = _cut(task.arrived, segment)

    outcome = exchange(bind(compressor, collective), arrays, world, inputs, memories, step, cut)
    for result, array in zip(outcome.results, arrays, strict=True):
        result.mean = mean_of(result, array)
    return outcome


def _cut(arrived, segment):
    def one_by_one(start, stop):
        for place in reversed(range(start, stop, segment)):
            arrived(place, min(place + segment, stop))

    return one_by_one


def dense(sent, numel, dtype=np.float64):
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
