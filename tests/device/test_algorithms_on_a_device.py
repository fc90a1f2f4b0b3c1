"""Algorithms whose arrays are on a device: what they remember, learn and draw, with the bits of the host."""

import numpy as np
import pytest
from device import fake_cuda
from device.steps_on_a_device import compare_steps, gradients_of, host, reduced, stepped
from worlds import Ranks

import mpicomp
from mpicomp.compressors.powersgd import Matrix, stacked

SHAPES = {
    "d.weight": (8, 12), "d.bias": (8,), "c.weight": (8, 12), "c.bias": (8,), "b.weight": (30, 20), "b.bias": (30,),
    "a.weight": (8, 12),
}  # fmt: skip
LGC = {"ratio": 0.3, "dense_steps": 1, "training_steps": 2, "encoder": (4, 4), "decoder": (4, 4)}
ALGORITHMS = [
    mpicomp.PowerSGD(rank=2, min_compression_rate=0.5, iterations=2),
    mpicomp.PowerSGD(rank=1, min_compression_rate=0.5, rows=10, wire="bf16", warm_start=False),
    mpicomp.PowerSGD(rank=1, min_compression_rate=0.5, start_step=1, layers={"b.*": 3}),
    mpicomp.SignSGD(),
    mpicomp.LGC(**LGC),
    mpicomp.LGC(**LGC, signs=False, error="selected"),
    mpicomp.LGC(**LGC, instance="server"),
    mpicomp.LGC(**(LGC | {"ratio": 0.001})),  # too few values for a code
]
STEPS = 5


@pytest.fixture(params=["lazy", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eager", "random"))])
def cupy(request, monkeypatch):
    return fake_cuda.install(monkeypatch, request.param)


@pytest.fixture
def eager(monkeypatch):
    return fake_cuda.install(monkeypatch)


def ranks_of(compressor):
    return Ranks(3, compressor, feedback=compressor.feedback)


def compare(compressor, move, change=None, steps=STEPS, shapes=SHAPES, dtype=np.float32):
    return compare_steps(lambda: ranks_of(compressor), move, shapes, steps, change, dtype)


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("compressor", ALGORITHMS, ids=str)
def test_all_phases_have_the_bits_of_the_host(compressor, dtype, cupy):
    compare(compressor, cupy.asarray, dtype=dtype)


@pytest.mark.parametrize(
    ("compressor", "saves"),
    [(compressor, ("host", "device")[number % 2]) for number, compressor in enumerate(ALGORITHMS)],
    ids=str,
)
def test_what_is_remembered_moves_between_host_and_device(compressor, saves, eager):
    """States hold arrays of the host alone, and it does not matter where they come from."""
    move, other = {"host": (host, eager.asarray), "device": (eager.asarray, host)}[saves]
    whole, first, second = (ranks_of(compressor) for _ in range(3))
    for step in range(6):
        gradients = [gradients_of(rank, step, SHAPES) for rank in range(3)]
        expected = stepped(whole, gradients, host)
        if step == 4:
            for before, after in zip(first.reducers, second.reducers, strict=True):
                state = before.state_dict()
                assert not any(isinstance(leaf, fake_cuda.ndarray) for leaf in leaves(state))
                after.load_state_dict(state)
        found = stepped(first, gradients, move) if step < 4 else stepped(second, gradients, other)
        np.testing.assert_equal(found, expected)


def leaves(value):
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, list | tuple) else [value]


@pytest.mark.parametrize("bad", [np.nan, *(pytest.param(bad, marks=pytest.mark.slow) for bad in (np.inf, 3e38))])
@pytest.mark.parametrize("compressor", ALGORITHMS, ids=str)
def test_what_is_not_finite_is_found_alike(compressor, bad, eager):
    def change(step, gradients):
        if step in (1, 4):
            gradients[1]["b.weight"][3, 4:9] = bad

    compare(compressor, eager.asarray, change, steps=6)


@pytest.mark.parametrize("compressor", ALGORITHMS, ids=str)
def test_zeros_have_the_bits_of_the_host(compressor, eager):
    """Factors of zeros are drawn again; a frame of zeros is one."""

    def change(step, gradients):
        for rank in gradients if step != 3 else ():
            for gradient in rank.values():
                gradient[:] = 0

    compare(compressor, eager.asarray, change)


def test_a_column_that_is_empty_is_drawn_anew(eager):
    def change(step, gradients):
        for rank in gradients:
            rank["b.weight"][1:] = 0  # of rank one

    compare(mpicomp.PowerSGD(rank=3, min_compression_rate=0.5), eager.asarray, change)


GAPS = [
    ({"a": (4, 6), "b": (4, 6)}, [2]),
    ({"a": (4, 6), "x": (3,), "b": (4, 6)}, [1, 1]),
    ({"a": (4, 6), "x": (3,), "b": (4, 6), "y": (2,)}, [1, 1]),
    ({"a": (4, 6), "x": (3,), "b": (4, 6), "y": (3,)}, [2]),
    ({"x": (3,), "a": (4, 6), "y": (3,), "b": (4, 6)}, [2]),
    ({"x": (2,), "a": (4, 6), "y": (3,), "b": (4, 6)}, [1, 1]),
    ({"a": (4, 6), "x": (3,), "b": (4, 6), "y": (3,), "c": (4, 6)}, [2, 1]),
]


@pytest.mark.parametrize(("shapes", "counts"), GAPS)
def test_stacks_see_their_matrices_wherever_they_are(shapes, counts, eager):
    """A view, of whatever place, and the same factors however they are stacked."""
    start, matrices = 0, []
    for shape in shapes.values():
        if len(shape) > 1:
            matrices.append(Matrix(start, *shape, 1))
        start += int(np.prod(shape))
    stacks = stacked(matrices, start)
    assert [stack.count for stack in stacks] == counts
    array = np.arange(start)
    views = [stack.of(array) for stack in stacks]
    assert all(np.shares_memory(view, array) for view in views)
    for matrix, part in zip(matrices, [part for view in views for part in view], strict=True):
        np.testing.assert_array_equal(part.reshape(-1), array[matrix.start : matrix.stop])
    compare(mpicomp.PowerSGD(rank=1, min_compression_rate=0.5), eager.asarray, shapes=shapes)


READS = [  # of the inner collective, too, which reads whether a mean is finite
    (mpicomp.PowerSGD(rank=1), 4),
    (mpicomp.PowerSGD(rank=1, iterations=2, min_compression_rate=1), 8),
    (mpicomp.SignSGD(), 0),
    (mpicomp.LGC(**LGC), 6),
]


@pytest.mark.parametrize(("compressor", "most"), READS, ids=str)
def test_the_host_waits_for_few_numbers(compressor, most, eager):
    """Of a rank in a step: at most so many times, each for all of them at once, and never for one alone."""
    shapes = {"w": (40, 30)}  # of several arrays the stand-in's moments are added up by the host
    ranks = compare(compressor, eager.asarray, shapes=shapes)
    places = [bucket.device for reducer in ranks.reducers for bucket in reducer.layout.buckets]
    alone, before = eager.reads, places[0].reads
    reduced(ranks, [gradients_of(rank, 9, shapes) for rank in range(3)], eager.asarray)
    assert places[0].reads - before <= most * len(places)
    assert eager.reads == alone
