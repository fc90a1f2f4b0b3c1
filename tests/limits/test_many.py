"""Many parameters, many buckets, many ranks; and parameters of one element or none."""

from pathlib import Path

import numpy as np
import pytest
from marks import once, slow
from schemes import OWN
from worlds import Ranks

import mpicomp
from mpicomp.collectives import fitting
from mpicomp.testing import pairs

CASES = once(pairs(OWN), key=lambda case: tuple(fitting(case[0])))
SOAK = Path(__file__).resolve().parents[1] / "faults" / "soak.py"


def check(all_ranks, gradients, before):
    """Make a step, look at the law and the ranks' bits, and return the sum of residuals, of all arrays in one."""
    means = all_ranks.reduce(gradients)
    assert all(mean[name].tobytes() == means[0][name].tobytes() for mean in means[1:] for name in mean)
    put_in = sum(flat(gradient) for gradient in gradients) + before
    after = sum(flat({name: reducer.residual(name) for name in gradients[0]}) for reducer in all_ranks.reducers)
    delivered = len(gradients) * flat({name: means[0][name] for name in gradients[0]})
    scale = max(1.0, np.abs(put_in).max(), np.abs(delivered).max())
    np.testing.assert_allclose(delivered + after, put_in, rtol=0, atol=4e-6 * scale)
    return after


def flat(arrays):
    return np.concatenate([array.reshape(-1) for array in arrays.values()]).astype(np.float64)


def small(rank, step, count, largest=9):
    """Return arrays that mostly have an element or none."""
    rng = np.random.default_rng([rank, step])
    sizes = np.random.default_rng(count).choice([0, 1, 1, 1, 2, largest], count)
    return {f"p{place}": rng.normal(size=size).astype(np.float32) for place, size in enumerate(sizes.tolist())}


@pytest.mark.parametrize(("compressor", "collective"), CASES, ids=str)
def test_parameters_of_one_or_no_element_are_reduced(compressor, collective):
    """Each in a bucket of its own, where a compressor has nothing to choose from."""
    all_ranks = Ranks(3, compressor, collective, feedback=True, bucket_bytes=1)
    before = 0.0
    for step in range(3):
        before = check(all_ranks, [small(rank, step, 12, largest=1) for rank in range(3)], before)


@pytest.mark.parametrize(
    ("compressor", "collective"), [("topk", "allgather"), slow("powersgd", "auto"), slow(None, "auto")], ids=str
)
def test_ten_thousand_parameters_are_reduced(compressor, collective):
    all_ranks = Ranks(2, compressor, collective, bucket_bytes=32 << 20)
    before = 0.0
    for step in range(2):
        before = check(all_ranks, [small(rank, step, 10_000) for rank in range(2)], before)


def draw(step, ranks, count, size=20):
    return np.random.default_rng(step).normal(size=(ranks, count, size)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("overlap", [False, True])
def test_thousand_buckets_over_mpi_are_reduced(comm, overlap):
    """Longer than the tags of messages go round, which every channel has 2^15 of."""
    from mpicomp.mpi.thread import ProgressThread

    reducer = mpicomp.Reducer("topk", "star-topk:ring", bucket_bytes=1, comm=comm)
    thread = ProgressThread(reducer.transport).start() if overlap else None
    left = 0.0
    for step in range(3):
        everyones = draw(step, comm.size, 1000)
        given = {f"p{n}": values for n, values in enumerate(everyones[comm.rank])}
        stream = None if thread is None else reducer.stream(thread)
        if stream is None:
            means = reducer.reduce(given)
        else:
            for name, item in given.items():
                stream.put(name, item)
            means = stream.finish(given)
        delivered = comm.size * np.stack([means[name] for name in given]).astype(np.float64)
        after = comm.allreduce(np.stack([reducer.residual(name) for name in given]).astype(np.float64))
        np.testing.assert_allclose(delivered + after, everyones.astype(np.float64).sum(0) + left, rtol=0, atol=1e-4)
        left = after
        assert len(reducer.last_step.buckets) == 1000
    if thread is not None:
        thread.stop()
    reducer.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_16_ranks_over_mpi_agree(mpiexec):
    """Every compressor with every collective that carries it: what `soak.py` begins with."""
    job = mpiexec(16, SOAK, "--steps", "796", timeout=880)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "796 steps" in job.stdout
