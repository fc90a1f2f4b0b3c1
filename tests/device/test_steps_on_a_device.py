"""Steps with arrays on a device: states, 16 bits, streams, policies, algorithms, and what is not finite."""

import gc

import numpy as np
import pytest
from device import fake_cuda
from device.steps_on_a_device import compare_steps, fetched, gradients_of, host, reduced, stepped
from marks import slow
from worlds import Ranks

import mpicomp
from mpicomp.compressors.powersgd import Matrix, stacked
from mpicomp.errors import DisagreementError, OutOfMemoryError
from mpicomp.mpi.thread import ProgressThread

SHAPES = {
    "d.weight": (8, 12), "d.bias": (8,), "c.weight": (8, 12), "c.bias": (8,), "b.weight": (30, 20), "b.bias": (30,),
    "a.weight": (8, 12),
}  # fmt: skip
LGC = {"ratio": 0.3, "dense_steps": 1, "training_steps": 2, "encoder": (4, 4), "decoder": (4, 4)}
ALGORITHMS = [
    mpicomp.PowerSGD(rank=2, min_compression_rate=0.5),
    mpicomp.PowerSGD(rank=1, min_compression_rate=0.5, rows=10, wire="bf16"),
    mpicomp.PowerSGD(rank=1, min_compression_rate=0.5, layers={"b.*": 3}),
    mpicomp.SignSGD(),
    mpicomp.LGC(**LGC),
    mpicomp.LGC(**LGC, signs=False, error="selected"),
    mpicomp.LGC(**LGC, instance="server"),
    mpicomp.LGC(**(LGC | {"ratio": 0.001})),  # too few values for a code
]
REMEMBERING = [mpicomp.TopK(ratio=0.1), mpicomp.DGC(ratio=0.1, momentum=0.9), mpicomp.SIDCo(ratio=0.1), *ALGORITHMS]
TOPK = mpicomp.TopK(ratio=0.1)


def compare(cupy, compressor, change=None, steps=5, size=3, shapes=SHAPES, dtype=np.float32, **settings):
    """Step on the device and on the host, and compare means, residuals or errors; return the ranks on the device."""
    if compressor is not None:
        settings.setdefault("feedback", compressor.feedback)
    return compare_steps(lambda: Ranks(size, compressor, **settings), cupy.asarray, shapes, steps, change, dtype)


@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
@pytest.mark.parametrize("compressor", ALGORITHMS, ids=str)
def test_all_phases_have_the_bits_of_the_host(compressor, dtype, cupy):
    compare(cupy, compressor, dtype=dtype)


@pytest.mark.parametrize(
    ("compressor", "places"),
    list(zip(REMEMBERING, 4 * [("host", "device"), ("device", "device"), ("device", "host")], strict=False)),
    ids=str,
)
def test_states_move_between_host_and_device(compressor, places, eager):
    """They hold arrays of the host alone; after it was loaded a run is bit for bit the one that went on."""
    saves, loads = ({"host": host, "device": eager.asarray}[place] for place in places)
    whole, first, second = (Ranks(3, compressor, feedback=compressor.feedback) for _ in range(3))
    for step in range(6):
        gradients = [gradients_of(rank, step, SHAPES) for rank in range(3)]
        expected = stepped(whole, gradients, host)
        if step == 4:
            for before, after in zip(first.reducers, second.reducers, strict=True):
                state = before.state_dict()
                assert not any(isinstance(leaf, fake_cuda.ndarray) for leaf in leaves(state))
                after.load_state_dict(state)
        found = stepped(first, gradients, saves) if step < 4 else stepped(second, gradients, loads)
        np.testing.assert_equal(found, expected)
    np.testing.assert_equal(*(ranks.reducers[0].state_dict()["residuals"] for ranks in (second, whole)))


def leaves(value):
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, list | tuple) else [value]


def fill(*steps, part=(), value=0.0):
    """Return a change of gradients: a part of a matrix of all ranks, or of all of their arrays, in some steps."""

    def change(step, gradients):
        for rank in gradients if step in steps else ():
            for name in ["b.weight"] if part else rank:
                rank[name][part or ...] = value

    return change


CHANGES = {
    "nan": fill(1, 4, part=(3, slice(4, 9)), value=np.nan),
    "zeros": fill(0, 1, 2, 4),  # factors of zeros are drawn again; a frame of zeros is one
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("compressor", ALGORITHMS, ids=str)
def test_what_is_not_finite_and_what_is_zero(compressor, change, eager):
    compare(eager, compressor, change, steps=6)


@pytest.mark.parametrize("nonfinite", ["raise", "skip", "pass"])
@pytest.mark.parametrize("bad", [np.nan, slow(np.inf), slow(3e38)])
@pytest.mark.parametrize("compressor", [mpicomp.Dense(), TOPK, mpicomp.QSGD(), *ALGORITHMS[:5:4]], ids=str)
def test_what_is_not_finite_on_one_rank(compressor, bad, nonfinite, cupy):
    def change(step, gradients):
        if step in (1, 4):
            gradients[1]["b.weight"][3, 4:9] = bad

    compare(cupy, compressor, change, steps=6, nonfinite=nonfinite)


def test_a_column_that_is_empty_is_drawn_anew(eager):
    compare(eager, mpicomp.PowerSGD(rank=3, min_compression_rate=0.5), fill(*range(5), part=(slice(1, None),)))


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
    compare(eager, mpicomp.PowerSGD(rank=1, min_compression_rate=0.5), shapes=shapes)


READS = [  # of the inner collective, too, which reads whether a mean is finite
    (mpicomp.PowerSGD(rank=1), 4),
    (mpicomp.SignSGD(), 0),
    (mpicomp.LGC(**LGC), 6),
]


@pytest.mark.parametrize(("compressor", "most"), READS, ids=str)
def test_the_host_waits_for_few_numbers(compressor, most, eager):
    """Of a rank in a step: at most so many times, each for all of them at once, and never for one alone."""
    shapes = {"w": (40, 30)}  # of several arrays the stand-in's moments are added up by the host
    ranks = compare(eager, compressor, shapes=shapes)
    places = [bucket.device for reducer in ranks.reducers for bucket in reducer.layout.buckets]
    alone, before = eager.reads, places[0].reads
    reduced(ranks, [gradients_of(rank, 9, shapes) for rank in range(3)], eager.asarray)
    assert places[0].reads - before <= most * len(places)
    assert eager.reads == alone


@pytest.mark.parametrize(
    ("compressor", "settings"),
    [
        *((compressor, {"dtype": np.float16}) for compressor in (mpicomp.Dense(), TOPK)),  # residuals are float32
        (mpicomp.DGC(ratio=0.1, clip=1.0), {}),  # by the norm of all
        *((compressor, {"policy": policy, "steps": 6, "size": 2})
          for policy, compressor in (("gravac", None), ("lgreco", TOPK), ("flexible", None))),
    ],
    ids=str,
)  # fmt: skip
def test_steps_have_the_bits_of_the_host(compressor, settings, cupy):
    ranks = compare(cupy, compressor, **settings)
    assert ranks.reducers[0].residual("b.weight").dtype == np.float32


@pytest.mark.parametrize("strided", [False, True])
def test_arrays_of_any_strides(strided, cupy):
    ranks = Ranks(1, "dense")
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    array = cupy.asarray(values)
    given, expected = (array[::2, 1:].transpose(), values[::2, 1:].T) if strided else (array, values)
    [mean] = ranks.reduce([{"w": given}])
    np.testing.assert_array_equal(mean["w"].get(), expected)


@pytest.mark.parametrize("compressor", [mpicomp.Dense(), mpicomp.TopK(ratio=0.1), mpicomp.OneBit()], ids=str)
def test_ranks_on_host_and_device_together(compressor, cupy):
    mixed, alike = Ranks(3, compressor), Ranks(3, compressor)
    for step in range(3):
        gradients = [gradients_of(rank, step, SHAPES) for rank in range(3)]
        there = {name: cupy.asarray(gradient) for name, gradient in gradients[0].items()}
        means = mixed.reduce([there, *gradients[1:]])
        assert isinstance(means[0]["b.weight"], fake_cuda.ndarray)
        assert isinstance(means[1]["b.weight"], np.ndarray)
        np.testing.assert_equal(fetched(means), fetched(alike.reduce(gradients)))


def test_what_another_stream_makes_is_waited_for(cupy):
    """The array names the stream that is current; what is given back can be used in it at once."""
    stream = cupy.driver.stream()
    ranks = Ranks(1, mpicomp.TopK(ratio=1.0))
    for step in range(3):
        with cupy.stream(stream):
            given = cupy.asarray(np.full(50, step, np.float32)) + 1
            [means] = ranks.reduce([{"w": given}])
            np.testing.assert_array_equal((means["w"] * 2).get(), np.full(50, 2 * step + 2))


def test_each_array_is_handed_over_in_the_stream_that_makes_it(cupy):
    """The current stream of the thread that exchanges does not count."""
    reducer = Ranks(1, mpicomp.TopK(ratio=1.0), bucket_bytes=80).reducers[0]
    streams = {name: cupy.driver.stream() for name in "abc"}
    reducer.reduce({name: cupy.asarray(np.zeros(20, np.float32)) for name in streams})
    with ProgressThread(reducer.transport) as thread:
        for step in range(3):
            begun, given = reducer.stream(thread), {}
            for place, (name, stream) in enumerate(streams.items()):
                with cupy.stream(stream):
                    given[name] = cupy.asarray(np.full(20, step, np.float32)) + place
                    begun.put(name, given[name])
            means = begun.finish(given)
            for place, name in enumerate(streams):
                np.testing.assert_array_equal((means[name] * 2).get(), np.full(20, 2 * (step + place)))
    reducer.close()


def test_events_do_not_grow_with_the_number_of_arrays(cupy, monkeypatch):
    """A model of two hundred parameters would wait for two hundred events in a step, else, and as many again."""
    record, counted = cupy.driver.record, []
    monkeypatch.setattr(cupy.driver, "record", lambda *words: (counted.append(words), record(*words))[1])
    recorded = []
    for arrays in (2, 50):
        ranks = Ranks(1, mpicomp.TopK(ratio=0.1))
        for step in range(3):
            counted.clear()
            values = np.random.default_rng(step).standard_normal((arrays, 100 // arrays), np.float32)
            ranks.reduce([{str(place): cupy.asarray(value) for place, value in enumerate(values)}])
        recorded.append(len(counted))
    assert recorded[0] == recorded[1]


def test_the_joint_choice_surveys_arrays_of_a_device(cupy):
    """What it chooses depends on what it measures; all ranks get the same, and nothing is lost."""
    ranks, entered, delivered = Ranks(2), np.zeros(SHAPES["b.weight"]), np.zeros(SHAPES["b.weight"])
    for step in range(6):
        means = fetched(reduced(ranks, [gradients_of(rank, step, SHAPES) for rank in range(2)], cupy.asarray))
        np.testing.assert_equal(means[0], means[1])
        entered += sum(gradients_of(rank, step, SHAPES)["b.weight"] for rank in range(2))
        delivered += 2.0 * means[0]["b.weight"]
    np.testing.assert_allclose(entered, delivered + ranks.residual_sum("b.weight"), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "compressor", [mpicomp.PowerSGD(rank=1), mpicomp.LGC(ratio=0.3, encoder=(2,), decoder=(2,))], ids=str
)
def test_algebra_of_its_own_is_not_mixed(compressor, cupy):
    """A library's matrix products have other bits on a GPU than on the host: all ranks refuse it."""
    ranks = Ranks(2, compressor)
    gradients = [gradients_of(rank, 0, SHAPES) for rank in range(2)]
    there = {name: cupy.asarray(gradient) for name, gradient in gradients[0].items()}
    with pytest.raises(DisagreementError, match=r"where gradients are, .* got a GPU on rank 0 and the host on rank 1"):
        ranks.reduce([there, gradients[1]])
    for means in ranks.reduce(gradients):
        assert isinstance(means["b.weight"], np.ndarray)


def test_memory_for_gradients_of_torch_is_torchs(cupy, torch_memory):
    numel = sum(array.size for array in gradients_of(0, 0, SHAPES).values())
    ranks = Ranks(2, mpicomp.TopK(ratio=0.1))
    for step in range(3):
        reduced(ranks, [gradients_of(rank, step, SHAPES) for rank in range(2)], cupy.asarray)
    assert torch_memory.held >= 2 * 2 * 4 * numel  # residual and sum of each rank
    for reducer in ranks.reducers:
        reducer.close()
    del ranks, reducer
    gc.collect()
    assert not torch_memory.held


def test_no_memory_on_a_device_is_one_error_and_loses_nothing(cupy, torch_memory):
    there, here = Ranks(2, mpicomp.TopK(ratio=0.1)), Ranks(2, mpicomp.TopK(ratio=0.1))
    for step in range(2):
        gradients = [gradients_of(rank, step, SHAPES) for rank in range(2)]
        np.testing.assert_equal(stepped(there, gradients, cupy.asarray), stepped(here, gradients, host))
    large = {"large": np.ones(50_000, np.float32)}
    torch_memory.room = 100_000
    with pytest.raises(OutOfMemoryError, match=r"GPU 0: torch's allocator has no .* bytes"):
        reduced(there, [gradients_of(rank, 2, SHAPES) | large for rank in range(2)], cupy.asarray)
    torch_memory.room = float("inf")
    for step in range(2, 4):
        gradients = [gradients_of(rank, step, SHAPES) for rank in range(2)]
        np.testing.assert_equal(stepped(there, gradients, cupy.asarray), stepped(here, gradients, host))
