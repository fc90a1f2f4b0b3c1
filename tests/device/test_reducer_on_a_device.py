"""Steps with arrays on a device: states, 16 bits, momentum, streams, policies, and what is not finite."""

import gc

import numpy as np
import pytest
from device import fake_cuda
from device.steps_on_a_device import compare_steps, fetched, gradients_of, host, reduced
from worlds import Ranks

import mpicomp
from mpicomp.errors import DisagreementError, NonFiniteError, OutOfMemoryError
from mpicomp.mpi.thread import ProgressThread

SHAPES = {"first": (30, 20), "second": (9,)}
SCHEDULES = ["lazy", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eager", "random"))]


@pytest.fixture(params=SCHEDULES)
def cupy(request, monkeypatch):
    return fake_cuda.install(monkeypatch, request.param)


def stepped(ranks, step, move, **settings):
    gradients = [gradients_of(rank, step, SHAPES, **settings) for rank in range(len(ranks.reducers))]
    return fetched(reduced(ranks, gradients, move))


def compare(cupy, *args, steps=3, **settings):
    compare_steps(lambda: Ranks(2, *args, **settings), cupy.asarray, SHAPES, steps)


@pytest.mark.parametrize("loads", ["host", "device"])
@pytest.mark.parametrize("saves", ["host", "device"])
@pytest.mark.parametrize(
    "compressor",
    [mpicomp.TopK(ratio=0.1), mpicomp.DGC(ratio=0.1, momentum=0.9), mpicomp.PowerSGD(rank=1), mpicomp.SIDCo(ratio=0.1)],
    ids=str,
)
def test_states_move_between_host_and_device(compressor, saves, loads, cupy):
    """After it was loaded, a run is bit for bit the one that was not interrupted."""
    moves = {"host": host, "device": cupy.asarray}
    whole, first, second = (Ranks(2, compressor) for _ in range(3))
    for step in range(3):
        stepped(whole, step, host)
        stepped(first, step, moves[saves])
    for saved, loaded in zip(first.reducers, second.reducers, strict=True):
        state = saved.state_dict()
        assert all(isinstance(residual, np.ndarray) for residual in state["residuals"].values())
        loaded.load_state_dict(state)
    for step in range(3, 6):
        np.testing.assert_equal(stepped(second, step, moves[loads]), stepped(whole, step, host))
    np.testing.assert_equal(*(ranks.reducers[0].state_dict()["residuals"] for ranks in (second, whole)))


@pytest.mark.parametrize("compressor", [mpicomp.Dense(), mpicomp.TopK(ratio=0.1)], ids=str)
def test_16_bits_come_back_as_16_bits(compressor, cupy):
    """Residuals are float32."""
    there, here = Ranks(2, compressor), Ranks(2, compressor)
    for step in range(3):
        found = stepped(there, step, cupy.asarray, dtype=np.float16)
        assert {mean.dtype for mean in found[0].values()} == {np.dtype(np.float16)}
        np.testing.assert_equal(found, stepped(here, step, host, dtype=np.float16))
    residual = there.reducers[0].residual("first")
    assert residual.dtype == np.float32
    np.testing.assert_equal(residual, here.reducers[0].residual("first"))


@pytest.mark.parametrize("strided", [False, True])
def test_arrays_of_any_strides(strided, cupy):
    ranks = Ranks(1, "dense")
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    array = cupy.asarray(values)
    given, expected = (array[::2, 1:].transpose(), values[::2, 1:].T) if strided else (array, values)
    [mean] = ranks.reduce([{"w": given}])
    np.testing.assert_array_equal(mean["w"].get(), expected)


@pytest.mark.parametrize("compressor", [mpicomp.Dense(), mpicomp.TopK(ratio=0.1), mpicomp.QSGD()], ids=str)
@pytest.mark.parametrize("policy", ["raise", "skip", "pass"])
def test_what_is_not_finite(compressor, policy, cupy):
    def bad(move):
        ranks = Ranks(2, compressor, nonfinite=policy, feedback=compressor.contractive)
        stepped(ranks, 0, move)
        gradients = [gradients_of(rank, 1, SHAPES) for rank in range(2)]
        gradients[1]["second"][3] = np.nan
        try:
            outcome = fetched(reduced(ranks, gradients, move))
        except NonFiniteError as error:
            outcome = str(error)
        return outcome, [ranks.residuals(name) for name in SHAPES], stepped(ranks, 2, move)

    np.testing.assert_equal(bad(cupy.asarray), bad(host))


def test_clipping_by_the_norm_of_all(cupy):
    compare(cupy, mpicomp.DGC(ratio=0.1, clip=1.0))


@pytest.mark.parametrize("compressor", [mpicomp.Dense(), mpicomp.TopK(ratio=0.1), mpicomp.OneBit()], ids=str)
def test_ranks_on_host_and_device_together(compressor, cupy):
    mixed, alike = Ranks(3, compressor), Ranks(3, compressor)
    for step in range(3):
        gradients = [gradients_of(rank, step, SHAPES) for rank in range(3)]
        there = {name: cupy.asarray(gradient) for name, gradient in gradients[0].items()}
        means = mixed.reduce([there, *gradients[1:]])
        assert isinstance(means[0]["first"], fake_cuda.ndarray)
        assert isinstance(means[1]["first"], np.ndarray)
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
    ranks, entered, delivered = Ranks(2), np.zeros(SHAPES["first"]), np.zeros(SHAPES["first"])
    for step in range(6):
        means = stepped(ranks, step, cupy.asarray)
        np.testing.assert_equal(means[0], means[1])
        entered += sum(gradients_of(rank, step, SHAPES)["first"] for rank in range(2))
        delivered += 2.0 * means[0]["first"]
    np.testing.assert_allclose(entered, delivered + ranks.residual_sum("first"), rtol=0, atol=1e-4)


@pytest.mark.parametrize("policy", ["gravac", "lgreco", "flexible"])
def test_policies_survey_arrays_of_a_device(policy, cupy):
    compare(cupy, {"lgreco": mpicomp.TopK(ratio=0.1)}.get(policy), policy=policy, steps=6)


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
        assert isinstance(means["first"], np.ndarray)


def test_memory_for_gradients_of_torch_is_torchs(cupy, torch_memory):
    numel = sum(array.size for array in gradients_of(0, 0, SHAPES).values())
    ranks = Ranks(2, mpicomp.TopK(ratio=0.1))
    for step in range(3):
        stepped(ranks, step, cupy.asarray)
    assert torch_memory.held >= 2 * 2 * 4 * numel  # residual and sum of each rank
    for reducer in ranks.reducers:
        reducer.close()
    del ranks, reducer
    gc.collect()
    assert not torch_memory.held


def test_no_memory_on_a_device_is_one_error_and_loses_nothing(cupy, torch_memory):
    there, here = Ranks(2, mpicomp.TopK(ratio=0.1)), Ranks(2, mpicomp.TopK(ratio=0.1))
    for step in range(2):
        np.testing.assert_equal(stepped(there, step, cupy.asarray), stepped(here, step, host))
    large = {"large": np.ones(50_000, np.float32)}
    torch_memory.room = 100_000
    with pytest.raises(OutOfMemoryError, match=r"GPU 0: torch's allocator has no .* bytes"):
        reduced(there, [gradients_of(rank, 2, SHAPES) | large for rank in range(2)], cupy.asarray)
    torch_memory.room = float("inf")
    for step in range(2, 4):
        np.testing.assert_equal(stepped(there, step, cupy.asarray), stepped(here, step, host))
