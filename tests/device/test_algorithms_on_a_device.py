"""Algorithms whose arrays are on a device: what they remember, learn and draw, with the bits of the host."""

import numpy as np
import pytest
from device import fake_cuda
from worlds import Ranks

import mpicomp
from mpicomp.algorithms.matrix_batches import Matrix, stacked
from mpicomp.errors import MpicompError

SHAPES = {
    "d.weight": (8, 12), "d.bias": (8,), "c.weight": (8, 12), "c.bias": (8,), "b.weight": (30, 20), "b.bias": (30,),
    "a.weight": (8, 12),
}  # fmt: skip
LGC = {"ratio": 0.3, "dense_steps": 1, "training_steps": 2, "encoder": (4, 4), "decoder": (4, 4)}
ALGORITHMS = [
    mpicomp.PowerSGD(rank=2, min_compression_rate=0.5, iterations=2),
    mpicomp.PowerSGD(rank=1, min_compression_rate=0.5, rows=10, wire="bf16", warm_start=False),
    mpicomp.PowerSGD(rank=1, min_compression_rate=0.5, start_step=1, layers={"b.*": 3}),
    mpicomp.CountSketch(ratio=0.05, momentum=0.9),
    mpicomp.FetchSGD(ratio=0.05, momentum=0.5),
    mpicomp.SignSGD(),
    mpicomp.LGC(**LGC, code="linear"),
    mpicomp.LGC(**LGC, code="linear", signs=False, error="selected", wire="fp16"),
    mpicomp.LGC(**LGC, code="linear", instance="server"),
    mpicomp.LGC(**LGC),
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


def gradients_of(rank, step, shapes=SHAPES, dtype=np.float32):
    random = np.random.default_rng([rank, step])
    return {name: random.laplace(size=shape).astype(dtype) for name, shape in shapes.items()}


def on_host(value):
    return value.get() if isinstance(value, fake_cuda.ndarray) else value.copy()


def stepped(ranks, given, bring):
    """Give the means and the residuals of a step, on the host; what cannot be computed is the error of a rank."""
    try:
        means = ranks.reduce([{name: bring(value) for name, value in item.items()} for item in given])
    except MpicompError as error:
        return str(error), type(error.__cause__)
    reported = [{name: on_host(value) for name, value in mean.items()} for mean in means]
    return reported, [ranks.residuals(name) for name in given[0]]


def ranks_of(compressor, size=3, **settings):
    return Ranks(size, compressor, feedback=compressor.feedback, **settings)


def host(value):
    return value


def compare(compressor, bring, change=None, steps=STEPS, shapes=SHAPES, dtype=np.float32, **settings):
    """Step on the host and at another place, and compare all that comes out."""
    there, here = (ranks_of(compressor, **settings) for _ in range(2))
    for step in range(steps):
        given = [gradients_of(rank, step, shapes, dtype) for rank in range(3)]
        if change is not None:
            change(step, given)
        np.testing.assert_equal(stepped(there, given, bring), stepped(here, given, host))
    return there


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("compressor", ALGORITHMS, ids=str)
def test_all_phases_have_the_bits_of_the_host(compressor, dtype, cupy):
    compare(compressor, cupy.asarray, dtype=dtype)


@pytest.mark.parametrize("saves", ["host", "device"])
@pytest.mark.parametrize("compressor", ALGORITHMS, ids=str)
def test_what_is_remembered_moves_between_host_and_device(compressor, saves, eager):
    """States hold arrays of the host alone, and it does not matter where they come from."""
    bring, other = {"host": (host, eager.asarray), "device": (eager.asarray, host)}[saves]
    whole, first, second = (ranks_of(compressor) for _ in range(3))
    for step in range(6):
        given = [gradients_of(rank, step) for rank in range(3)]
        expected = stepped(whole, given, host)
        if step == 4:
            for before, after in zip(first.reducers, second.reducers, strict=True):
                state = before.state_dict()
                assert not any(isinstance(leave, fake_cuda.ndarray) for leave in leaves(state))
                after.load_state_dict(state)
        ranks, value = (first, bring) if step < 4 else (second, other)
        np.testing.assert_equal(stepped(ranks, given, value), expected)


def leaves(value):
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list | tuple) else [value]


@pytest.mark.parametrize("bad", [np.nan, *(pytest.param(bad, marks=pytest.mark.slow) for bad in (np.inf, 3e38))])
@pytest.mark.parametrize("compressor", ALGORITHMS, ids=str)
def test_what_is_not_finite_is_found_alike(compressor, bad, eager):
    def change(step, given):
        if step in (1, 4):
            given[1]["b.weight"][3, 4:9] = bad

    compare(compressor, eager.asarray, change, steps=6)


@pytest.mark.parametrize("compressor", ALGORITHMS, ids=str)
def test_zeros(compressor, eager):
    """Factors are drawn again where there is nothing to go on from; a frame of zeros is one."""

    def change(step, given):
        for item in given:
            for value in item.values():
                value[:] = 0 if step != 3 else value

    compare(compressor, eager.asarray, change)


def test_a_column_that_is_empty_is_drawn_anew(eager):
    def change(step, given):
        for item in given:
            item["b.weight"][1:] = 0  # of rank one

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
    for matrix, entry in zip(matrices, [item for view in views for item in view], strict=True):
        np.testing.assert_array_equal(entry.reshape(-1), array[matrix.start : matrix.stop])
    compare(mpicomp.PowerSGD(rank=1, min_compression_rate=0.5), eager.asarray, shapes=shapes)


WEIGHTS = np.random.default_rng(0).random(sum(int(np.prod(shape)) for shape in SHAPES.values()))


class Weighted(mpicomp.CountSketch):
    """What a user might write: weights in host memory."""

    id = "test-weighted"
    paper = "none: a user's own"

    def weights(self, context):
        return WEIGHTS.astype(np.float32)


def test_weights_of_elements_may_be_in_host_memory(cupy):
    compare(Weighted(ratio=0.05), cupy.asarray)


READS = [  # of the inner collective, too, which reads whether a mean is finite
    (mpicomp.PowerSGD(rank=1), 4),
    (mpicomp.PowerSGD(rank=1, iterations=2, min_compression_rate=1), 8),
    (mpicomp.CountSketch(ratio=0.05), 3),
    (mpicomp.FetchSGD(ratio=0.05), 2),
    (mpicomp.SignSGD(), 0),
    (mpicomp.LGC(**LGC, code="linear"), 6),
]


@pytest.mark.parametrize(("compressor", "most"), READS, ids=str)
def test_the_host_waits_for_few_numbers(compressor, most, eager):
    """Of a rank in a step: at most so many times, each for all of them at once, and never for one alone."""
    shapes = {"w": (40, 30)}  # of several arrays the stand-in's moments are added up by the host
    ranks = compare(compressor, eager.asarray, shapes=shapes)
    places = [bucket.device for reducer in ranks.reducers for bucket in reducer.layout.buckets]
    alone, before = eager.reads, [place.reads for place in places]
    given = [gradients_of(rank, 9, shapes) for rank in range(3)]
    ranks.reduce([{name: eager.asarray(value) for name, value in item.items()} for item in given])
    assert max(place.reads - b for place, b in zip(places, before, strict=True)) <= most
    assert eager.reads == alone
